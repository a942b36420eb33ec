"""Run a compiled function on the OpenMP threads that torch already has.

A second thread pool beside torch's would fight it for the cores: torch's threads spin for a while after each operation.
So work is handed to the very team torch uses, through the `GOMP_parallel` entry point of the GNU OpenMP runtime that
torch has loaded. Without that runtime (macOS, Windows) the function runs on the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

__all__ = ["address", "run"]


def address() -> int:
    """Where `GOMP_parallel(void function(void *), void *data, unsigned num_threads, unsigned flags)` is; 0: nowhere."""
    library = _library()
    return 0 if library is None else ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


def run(function: int, data: int, num_items: int) -> None:
    """Call `void function(void *data)` at these addresses once on each of torch's threads, and wait for all.

    The function takes its share of the num_items pieces of work from a counter in `data` by atomic additions, so it
    does not matter how many threads come. The GIL is released meanwhile.
    """
    _team()(function, data, min(num_items, torch.get_num_threads()))


@cache
def _team() -> Callable[[int, int, int], None]:
    if (library := _library()) is not None:
        parallel = library.GOMP_parallel
        parallel.restype = None
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return lambda function, data, num_threads: parallel(function, data, num_threads, 0)
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return lambda function, data, _num_threads: prototype(function)(data)


@cache
def _library() -> ctypes.CDLL | None:
    path = _openmp()
    return None if path is None else ctypes.CDLL(path)


def _openmp() -> str | None:
    """Path of the GNU OpenMP runtime in this process that torch brought, or else any."""
    try:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    found = sorted(path for path in mapped if Path(path).name.startswith("libgomp"))
    own = [path for path in found if Path(torch.__file__).parent.parent.as_posix() in path]
    return next(iter(own + found), None)
