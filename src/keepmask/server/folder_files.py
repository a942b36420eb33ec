"""Reading files below one folder, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from keepmask.engine.weights import INDEX_NAME, indexed_names
from keepmask.errors import RequestError

__all__ = ["WeightFile", "read_below"]

_SUFFIX = ".safetensors"
_MAX_INDEX_BYTES = 2**26


class WeightFile(NamedTuple):
    """A safetensors file."""

    name: str
    data: bytes
    tensors: list[str] | None
    """Names of its tensors, where an index tells."""


def read_below(root: str, path: str, *, max_bytes: int) -> list[WeightFile]:
    """The safetensors file at `path`, or those in the folder at `path`: all, or those of its index where it has one.

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
                files: dict[str, list[str] | None] = {parts[-1]: None}
            else:
                at = _open(opened, parts[-1], os.O_DIRECTORY | os.O_NOFOLLOW, at) if parts else at
                files = _listed(at)
            return list(_read(files, path, at, max_bytes))
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None


def _listed(folder: int) -> dict[str, list[str] | None]:
    """Files of a folder, with the tensors that its index names in each."""
    names = sorted(os.listdir(folder))
    if INDEX_NAME in names:
        index = indexed_names(_read_one(INDEX_NAME, folder, _MAX_INDEX_BYTES))
        return {file: index[file] for file in sorted(index)}
    files: dict[str, list[str] | None] = dict.fromkeys(name for name in names if name.endswith(_SUFFIX))
    if not files:
        raise RequestError(f"path: no {_SUFFIX} file there", param="path")
    return files


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


def _read(files: dict[str, list[str] | None], path: str, folder: int, max_bytes: int) -> Iterator[WeightFile]:
    left = max_bytes
    for name, tensors in files.items():
        data = _read_one(name, folder, left)
        left -= len(data)
        yield WeightFile(name if path.endswith(name) else f"{path}/{name}", data, tensors)


def _read_one(name: str, folder: int, max_bytes: int) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _refusal(name, "is no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _refusal(name, f"holds more than the model's weights can take, {max_bytes} bytes are left")
    return data


def _open(opened: contextlib.ExitStack, name: str, flags: int, folder: int | None = None) -> int:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def _refusal(path: str, problem: str) -> RequestError:
    return RequestError(f"path={path[:200]!r}: {problem}", param="path")
