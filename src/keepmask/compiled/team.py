"""Run compiled functions on the OpenMP threads that torch already has.

A second thread pool beside torch's would fight it for the cores: torch's threads spin for a while after each operation.
So work is handed to the very team torch uses, through the `GOMP_parallel` entry point of the GNU OpenMP runtime that
torch has loaded. Without that runtime (macOS, Windows) the function runs on the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["Kernel", "address", "rows_an_item", "size_address"]

_ITEMS = 16


class Kernel:
    """A function compiled by `numba.cfunc` as `void function(int64 *arguments)`, run on the threads of the team.

    arguments[0] is a counter, 0 at first, from which every thread takes its pieces of the work by atomic additions:
    it does not matter how many threads come.
    """

    __slots__ = ("_array", "_function", "address")

    def __init__(self, function: Any, num_arguments: int) -> None:
        self._function = function  # owns the code
        self.address: int = function.address
        self._array = ctypes.c_int64 * (1 + num_arguments)

    def __call__(self, num_items: int, *arguments: int) -> None:
        """Run it with these arguments after the counter, and wait. The GIL is released meanwhile.

        num_items: pieces of work; no more threads than that are asked for.
        """
        _team()(self.address, self._array(0, *arguments), min(num_items, torch.get_num_threads()))


def rows_an_item(num_rows: int) -> int:
    """Rows that a thread takes at a time: neighbours where there are many."""
    return num_rows // _ITEMS or 1


def address() -> int:
    """Where `GOMP_parallel(void function(void *), void *data, unsigned num_threads, unsigned flags)` is; 0: nowhere."""
    return _address_of("GOMP_parallel")


def size_address() -> int:
    """Where `int omp_get_num_threads(void)` is, which says in a function of the team how many came; 0: nowhere."""
    return _address_of("omp_get_num_threads")


@cache
def _address_of(name: str) -> int:
    library = _library()
    return 0 if library is None else ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@cache
def _team() -> Callable[[int, Any, int], None]:
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
