"""Servers of this package to ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Serving


@pytest.fixture(scope="session")
def keepmask_server(tiny_with_text: Path) -> Iterator[Callable[..., str]]:
    """keepmask_server(**engine): the URL of a server with these engine options, started once for all who ask."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, str] = {}

        def url(**engine: object) -> str:
            key = repr(sorted(engine.items()))
            if key not in servers:
                servers[key] = stack.enter_context(Serving(tiny_with_text, engine=engine)).url
            return servers[key]

        yield url
