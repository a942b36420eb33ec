"""Compiling CPU kernels, and running them over the rows of a batch."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["RowThreads", "jit", "jit_reassociated"]

Function = TypeVar("Function", bound=Callable[..., Any])

SOURCES = blake2b(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*_cpu.py")))).hexdigest()


def jit(function: Function) -> Function:
    """Compile a function of scalars and NumPy arrays at its first call; the machine code is cached on disk.

    It runs without the interpreter's lock. Float operations are done as written, one rounding each.
    """
    return _compiled(function, fastmath=False)


def jit_reassociated(function: Function) -> Function:
    """`jit`, but sums may be added up in any order, and a product and a sum rounded once."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def _compiled(function: Function, **options: Any) -> Function:
    keyed = _keyed(function)
    try:
        return cast(Function, numba.njit(keyed, nogil=True, cache=True, error_model="numpy", **options))
    except RuntimeError:  # no folder may keep the code: compile once a process
        return cast(Function, numba.njit(keyed, nogil=True, error_model="numpy", **options))


def _keyed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, closing over `SOURCES`.

    numba finds cached machine code by the function's own file and by what it closes over. But the code of a kernel
    holds that of the kernels it calls, in other files too, so it must be made anew when any of them changes.
    """
    code = function.__code__.replace(co_freevars=(*function.__code__.co_freevars, "SOURCES"))
    cells = (*(function.__closure__ or ()), types.CellType(SOURCES))
    keyed = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    keyed.__doc__, keyed.__module__, keyed.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return keyed


class RowThreads:
    """A few threads that share the rows of a batch, for kernels called as kernel(..., first_row, end_row).

    Threads of its own, because a parallel region of OpenMP waits for all its threads to be scheduled, which on a busy
    machine takes milliseconds.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = max(1, num_threads)
        self._pool: ThreadPoolExecutor | None = None
        self._process = -1

    def run(self, kernel: Callable[..., Any], num_rows: int, work: int, *args: Any) -> None:
        """Call the kernel on all rows. work: elements it touches in all; little work stays on this thread."""
        parts = max(1, min(self._num_threads, num_rows, 1 + work // 2**20))
        bounds = [num_rows * part // parts for part in range(parts + 1)]
        pool = self._others() if parts > 1 else None
        others = [pool.submit(kernel, *args, *bounds[part : part + 2]) for part in range(1, parts)] if pool else []
        kernel(*args, *bounds[:2])
        for other in others:
            other.result()

    def _others(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not follow into a forked process
            self._pool, self._process = ThreadPoolExecutor(self._num_threads - 1), os.getpid()
        return self._pool
