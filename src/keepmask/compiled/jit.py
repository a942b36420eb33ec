"""Compiling CPU kernels with numba, whose machine code is kept on disk."""

from __future__ import annotations

import types
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["jit", "jit_reassociated"]

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent.parent
_FILES = sorted([*_PACKAGE.glob("compiled/*.py"), *_PACKAGE.rglob("*_numba.py")])
SOURCES = blake2b(b"".join(path.read_bytes() for path in _FILES)).hexdigest()


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
