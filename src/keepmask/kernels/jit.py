"""Compiling CPU kernels, and running them over the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba

__all__ = ["RowThreads", "jit", "jit_reassociated"]

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile a function of scalars and NumPy arrays at its first call; the machine code is cached on disk.

    It runs without the interpreter's lock. Float operations are done as written, one rounding each.
    """
    return cast(Function, numba.njit(function, nogil=True, cache=True, error_model="numpy"))


def jit_reassociated(function: Function) -> Function:
    """`jit`, but sums may be added up in any order, and a product and a sum rounded once."""
    reordered = {"reassoc", "contract", "nsz"}
    return cast(Function, numba.njit(function, nogil=True, cache=True, error_model="numpy", fastmath=reordered))


class RowThreads:
    """A few threads that share the rows of a batch, for kernels called as kernel(..., first_row, end_row).

    Threads of its own, because a parallel region of OpenMP waits for all its threads to be scheduled, which on a busy
    machine takes milliseconds.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = max(1, num_threads)
        self._pool = ThreadPoolExecutor(self._num_threads - 1) if self._num_threads > 1 else None

    def run(self, kernel: Callable[..., Any], num_rows: int, work: int, *args: Any) -> None:
        """Call the kernel on all rows. work: elements it touches in all; little work stays on this thread."""
        parts = max(1, min(self._num_threads, num_rows, 1 + work // 2**20))
        if self._pool is None or parts == 1:
            kernel(*args, 0, num_rows)
            return
        bounds = [num_rows * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(kernel, *args, bounds[part], bounds[part + 1]) for part in range(1, parts)]
        kernel(*args, 0, bounds[1])
        for other in others:
            other.result()
