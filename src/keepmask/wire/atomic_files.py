"""Files that appear whole or not at all, and errors that say what a failed write left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_atomically"]


@contextlib.contextmanager
def write_atomically(
    path: Path, *, kept: str = "nothing there was changed", scratch: Path | None = None
) -> Iterator[BinaryIO]:
    """A stream for the new contents of `path`, which replaces it when the block ends without an exception.

    The bytes are on the disk before the name is: written beside the file, synced, renamed. An OSError passes with a
    message that names the file and ends with `kept`; the file itself and its folder are then as they were.
    scratch: the folder to write in, on the same disk (default: the file's own). A kill of the process leaves
    `.<name>.<digits>.tmp` there, for the owner of the folder to remove.
    """
    temporary = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror or error}: cannot write {path}; {kept}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, where the platform can."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
