"""Servers shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Serving
from tiny_model import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared(checkpoint: Path) -> Iterator[Serving]:
    """A server for tests that leave it as they found it."""
    with Serving(checkpoint) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.settle()
