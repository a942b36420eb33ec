"""Reading files below one folder, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import PurePath

from keepmask.errors import RequestError

__all__ = ["read_below"]

_SUFFIX = ".safetensors"


def read_below(root: str, path: str, *, max_bytes: int) -> dict[str, bytes]:
    """The safetensors file at `path`, or all of them in the folder at `path`, by their names.

    path: relative to `root`, or absolute and below it. Each step is opened without following symbolic links, so
    nothing outside is reached, even while others rename files; only regular files are read. Raises RequestError.
    """
    parts = _parts(root, path)
    try:
        with contextlib.ExitStack() as opened:
            at = _open(opened, root, os.O_DIRECTORY)
            for part in parts[:-1]:
                at = _open(opened, part, os.O_DIRECTORY | os.O_NOFOLLOW, at)
            if parts and parts[-1].endswith(_SUFFIX):
                names = [parts[-1]]
            else:
                at = _open(opened, parts[-1], os.O_DIRECTORY | os.O_NOFOLLOW, at) if parts else at
                names = sorted(name for name in os.listdir(at) if name.endswith(_SUFFIX))
            return dict(_read(names, at, max_bytes))
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None


def _parts(root: str, path: str) -> tuple[str, ...]:
    root = os.path.abspath(root)
    given = PurePath(path)
    if "\0" in path or ".." in given.parts:
        raise _refusal(path, "must not hold '..' or NUL")
    if given.is_absolute():
        if not given.is_relative_to(root):
            raise _refusal(path, "is outside the folder for weights")
        given = given.relative_to(root)
    return given.parts


def _read(names: list[str], folder: int, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    if not names:
        raise RequestError(f"path: no {_SUFFIX} file there", param="path")
    left = max_bytes
    for name in names:
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _refusal(name, "is no regular file")
            data = file.read(left + 1)
        if len(data) > left:
            raise _refusal(name, f"holds more than the model's weights can take, {max_bytes} bytes")
        left -= len(data)
        yield name, data


def _open(opened: contextlib.ExitStack, name: str, flags: int, folder: int | None = None) -> int:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def _refusal(path: str, problem: str) -> RequestError:
    return RequestError(f"path={path[:200]!r}: {problem}", param="path")
