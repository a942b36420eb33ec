"""The elementwise operations of a decoder layer on CPUs, compiled at run time by numba; `layer_ops` defines them.

Rows are computed one by one, always in the same order of operations, so that a row does not depend on its batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from torch import Tensor

from keepmask.compiled.program import Program
from keepmask.compiled.team import Kernel, rows_an_item
from keepmask.compiled.vectors import LANES, Vectors, next_item, scratch, statement

__all__ = [
    "add_norm",
    "add_rms_norm",
    "add_rotation",
    "head_rms_norm",
    "rms_norm",
    "rotate",
    "silu_mul",
    "supports",
]

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VOID = types.void(types.voidptr)


def supports(dtype: torch.dtype, *widths: int) -> bool:
    """Whether rows of these widths on the CPU can be served."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and all(width % (2 * LANES) == 0 for width in widths)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layer_ops.rms_norm`."""
    T, E = x.shape
    out = torch.empty(T, E, dtype=x.dtype)
    kernel = _norm_kernel(E, x.dtype, adds=False)
    _run(kernel, T, x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), E, E, 1, _bits(eps))
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layer_ops.add_rms_norm`."""
    T, E = x.shape
    out = torch.empty(T, E, dtype=x.dtype)
    kernel = _norm_kernel(E, x.dtype, adds=True)
    _run(kernel, T, x.data_ptr(), update.data_ptr(), weight.data_ptr(), out.data_ptr(), E, E, 1, _bits(eps))
    return out


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """`layer_ops.head_rms_norm`."""
    T, H, D = x.shape
    at, stride = x.data_ptr(), x.stride(0)
    kernel = _norm_kernel(D, x.dtype, adds=False)
    _run(kernel, T, at, 0, weight.data_ptr(), at, stride, stride, H, _bits(eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`layer_ops.rotate`."""
    T, H, D = x.shape
    _run(_rotate_kernel(D, x.dtype), T, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.stride(0), H)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`layer_ops.silu_mul`."""
    T, width = gate.shape
    out = torch.empty(T, width, dtype=gate.dtype)
    _run(_silu_kernel(width, gate.dtype), T, gate.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


def add_norm(
    program: Program,
    weight: Tensor,
    eps: float,
    *,
    x: int | str,
    out: int | str,
    stride: int,
    num_heads: int = 1,
) -> None:
    """Make `rms_norm` of `T` rows, or of each of some heads of them, a step of a program.

    stride: items from row to row, of x and out alike. `rows_an_item` of T is given as "rows".
    """
    kernel = _norm_kernel(len(weight), weight.dtype, adds=False)
    program.add("model", kernel, "T", "rows", x, 0, weight.data_ptr(), out, stride, stride, num_heads, _bits(eps))


def add_rotation(program: Program, x: int, *, dim: int, dtype: torch.dtype, stride: int, num_heads: int) -> None:
    """Make `rotate` of some heads of `T` rows by "cos" and "sin" a step of a program. stride: items from row to row."""
    program.add("model", _rotate_kernel(dim, dtype), "T", "rows", x, "cos", "sin", stride, num_heads)


def _run(kernel: Kernel, num_rows: int, *arguments: int) -> None:
    """Run a kernel over rows."""
    rows = rows_an_item(num_rows)
    kernel(-(-num_rows // rows), num_rows, rows, *arguments)


@cache
def _bits(eps: float) -> int:
    return int(np.float32(eps).view(np.int32))


def _names(dtype: torch.dtype) -> tuple[str, int]:
    """The type's name, and the bytes of an item."""
    return str(dtype).removeprefix("torch."), dtype.itemsize


@cache
def _norm_kernel(width: int, dtype: torch.dtype, *, adds: bool) -> Kernel:
    name, itemsize = _names(dtype)
    total, clear, accumulate = scratch(LANES), _clear(name), _accumulate(name, adds=adds)
    invert, scale = _invert(width, name), _scale(name)

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (11,), np.int64)
        sums = total()
        while True:
            start = next_item(data) * a[2]
            if start >= a[1]:
                break
            for t in range(start, min(start + a[2], a[1])):
                for h in range(a[9]):
                    x = a[3] + (t * a[7] + h * width) * itemsize
                    update = a[4] + t * width * itemsize
                    out = a[6] + (t * a[8] + h * width) * itemsize
                    clear((sums,))
                    for at in range(0, width * itemsize, LANES * itemsize):
                        accumulate((sums, x + at, update + at))
                    invert((sums, a[10]))
                    for at in range(0, width * itemsize, LANES * itemsize):
                        scale((sums, x + at, a[5] + at, out + at))

    return Kernel(kernel, 10)


def _clear(dtype: str) -> Any:
    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        v.store(v.real(0.0), v.pointer(args[0], _F32), 0)

    return statement(emit)


def _accumulate(dtype: str, *, adds: bool) -> Any:
    """x += update where it adds; sums += x²."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        sums, x = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        value = v.load_items(x, 0)
        if adds:
            value = v.rounded(b.fadd(value, v.load_items(v.pointer(args[2], v.item), 0)))
            v.store_items(value, x, 0)
        v.store(v.fma(value, value, v.load(sums, 0)), sums, 0)

    return statement(emit)


def _invert(width: int, dtype: str) -> Any:
    """sums = 1 / sqrt(sum(sums) / width + eps), in every lane."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        sums, eps = v.pointer(args[0], _F32), v.splat(b.bitcast(b.trunc(args[1], _I32), _F32))
        mean = b.fdiv(v.splat(v.sum(v.load(sums, 0))), v.real(float(width)))
        v.store(b.fdiv(v.real(1.0), v.sqrt(b.fadd(mean, eps))), sums, 0)

    return statement(emit)


def _scale(dtype: str) -> Any:
    """out = weight · x · sums."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        sums, out = v.pointer(args[0], _F32), v.pointer(args[3], v.item)
        x, weight = (v.load_items(v.pointer(arg, v.item), 0) for arg in args[1:3])
        v.store_items(b.fmul(weight, v.rounded(b.fmul(x, v.load(sums, 0)))), out, 0)

    return statement(emit)


@cache
def _rotate_kernel(width: int, dtype: torch.dtype) -> Kernel:
    name, itemsize = _names(dtype)
    turn = _turn(width // 2, name)

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (8,), np.int64)
        while True:
            start = next_item(data) * a[2]
            if start >= a[1]:
                break
            for t in range(start, min(start + a[2], a[1])):
                for h in range(a[7]):
                    x = a[3] + (t * a[6] + h * width) * itemsize
                    for at in range(0, width // 2 * itemsize, LANES * itemsize):
                        turn((x + at, a[4] + t * width * itemsize + at, a[5] + t * width * itemsize + at))

    return Kernel(kernel, 7)


def _turn(half: int, dtype: str) -> Any:
    """Rotate 16 values of the first half with their partners in the second, `half` further on."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        x = v.pointer(args[0], v.item)
        (first, second), (cos1, cos2), (sin1, sin2) = (
            (v.load_items(v.pointer(arg, v.item), 0), v.load_items(v.pointer(arg, v.item), half)) for arg in args
        )
        v.store_items(b.fsub(v.rounded(b.fmul(first, cos1)), v.rounded(b.fmul(second, sin1))), x, 0)
        v.store_items(b.fadd(v.rounded(b.fmul(second, cos2)), v.rounded(b.fmul(first, sin2))), x, half)

    return statement(emit)


@cache
def _silu_kernel(width: int, dtype: torch.dtype) -> Kernel:
    name, itemsize = _names(dtype)
    activate = _activate(name)

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (6,), np.int64)
        while True:
            start = next_item(data) * a[2]
            if start >= a[1]:
                break
            stop = min(start + a[2], a[1])
            for at in range(start * width * itemsize, stop * width * itemsize, LANES * itemsize):
                activate((a[3] + at, a[4] + at, a[5] + at))

    return Kernel(kernel, 5)


def _activate(dtype: str) -> Any:
    """silu of 16 gates times their ups."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        gate, up = (v.load_items(v.pointer(arg, v.item), 0) for arg in args[:2])
        v.store_items(b.fmul(v.rounded(v.silu(gate)), up), v.pointer(args[2], v.item), 0)

    return statement(emit)
