"""`needs`: which extra to install when a library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Within it, a ModuleNotFoundError of another package says that `what` needs it, and which extra brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "keepmask"):
            raise
        raise ModuleNotFoundError(
            f"{what} needs {missing}, which is not installed; run: pip install 'keepmask[{extra}]'",
            name=error.name,
            path=error.path,
        ) from error
