"""Compiling CPU kernels with numba, whose machine code is kept on disk."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

__all__ = ["jit", "jit_reassociated", "sources"]

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile a function of scalars and NumPy arrays at its first call; the machine code is cached on disk.

    It runs without the interpreter's lock. Float operations are done as written, one rounding each.
    """
    return _compiled(function, fastmath=False)


def jit_reassociated(function: Function) -> Function:
    """`jit`, but sums may be added up in any order, and a product and a sum rounded once."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def sources(module: str) -> dict[str, bytes]:
    """The sources of a module and of all that it imports, and they in turn, from its own package and from this one.

    By name of the module, in alphabetical order.
    """
    packages = {module.partition(".")[0], __name__.partition(".")[0]}
    found: dict[str, bytes] = {}
    coming = [module]
    while coming:
        name = coming.pop()
        if name not in found and name.partition(".")[0] in packages and (path := _file(name)) is not None:
            found[name] = path.read_bytes()
            coming += _imports(name, found[name], is_package=path.name == "__init__.py")
    return dict(sorted(found.items()))


def _compiled(function: Function, **options: Any) -> Function:
    keyed = _keyed(function)
    try:
        return cast(Function, numba.njit(keyed, nogil=True, cache=True, error_model="numpy", **options))
    except RuntimeError:  # no folder may keep the code: compile once a process
        return cast(Function, numba.njit(keyed, nogil=True, error_model="numpy", **options))


def _keyed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, closing over a digest of all sources that its machine code may come from.

    numba finds cached machine code by the function's own file and by what it closes over. But the code of a kernel
    holds that of the kernels it calls and the constants it reads, in other files too, so it must be made anew when any
    of these changes; and only then.
    """
    code = function.__code__.replace(co_freevars=(*function.__code__.co_freevars, "SOURCES"))
    cells = (*(function.__closure__ or ()), types.CellType(_digest(function.__module__)))
    keyed = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    keyed.__doc__, keyed.__module__, keyed.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return keyed


@cache
def _digest(module: str) -> str:
    digest = blake2b()
    for name, source in sources(module).items():
        digest.update(f"{name} {len(source)} ".encode() + source)
    return digest.hexdigest()


def _file(module: str) -> Path | None:
    """Where a module's source is, by its name and the folder of its package; nothing is imported for it."""
    root, *parts = module.split(".")
    for folder in getattr(sys.modules.get(root), "__path__", ()):
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _imports(module: str, source: bytes, *, is_package: bool) -> Iterator[str]:
    """Full names of what a module imports: modules, and names in them, which may be modules too."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (start, node.module) if part)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
