"""The elementwise operations of a decoder layer on CPUs, compiled at run time by numba; `decoder_ops` defines them.

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

from keepmask.kernels import cpu_team
from keepmask.kernels.cpu_vectors import LANES, Vectors, next_item, scratch, statement

__all__ = ["add_rms_norm", "head_rms_norm", "rms_norm", "rotate", "silu_mul", "supports"]

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VOID = types.void(types.voidptr)


def supports(x: Tensor) -> bool:
    """Whether rows of this width, type and device can be served."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.shape[-1] % (2 * LANES) == 0
        and x.stride(-1) == 1
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`decoder_ops.rms_norm`."""
    return _normed(x, None, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`decoder_ops.add_rms_norm`."""
    return _normed(x, update.contiguous(), weight, eps)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """`decoder_ops.head_rms_norm`."""
    T, H, D = x.shape
    _launch(_norm_kernel(D, _name(x), adds=False), T, x, None, weight, x, x.stride(0), x.stride(0), H, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`decoder_ops.rotate`."""
    T, H, D = x.shape
    _launch(_rotate_kernel(D, _name(x)), T, x, cos, sin, None, x.stride(0), 0, H)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`decoder_ops.silu_mul`."""
    T, width = gate_up.shape
    out = torch.empty(T, width // 2, dtype=gate_up.dtype)
    _launch(_silu_kernel(width // 2, _name(gate_up)), T, gate_up, None, None, out, gate_up.stride(0), 0, 1)
    return out


def _normed(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    kernel = _norm_kernel(x.shape[1], _name(x), adds=update is not None)
    _launch(kernel, x.shape[0], x, update, weight, out, x.stride(0), x.shape[1], 1, eps)
    return out


def _launch(
    kernel: Any,
    num_rows: int,
    x: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    out: Tensor | None,
    x_stride: int,
    out_stride: int,
    num_heads: int,
    eps: float = 0.0,
) -> None:
    """Run a kernel over the rows."""
    tensors = [0 if tensor is None else tensor.data_ptr() for tensor in (x, second, third, out)]
    data = np.array([0, num_rows, *tensors, x_stride, out_stride, num_heads, np.float32(eps).view(np.int32)], np.int64)
    cpu_team.run(kernel.address, data.ctypes.data, num_rows)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _size(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


@cache
def _norm_kernel(width: int, dtype: str, *, adds: bool) -> Any:
    itemsize, total = _size(dtype), scratch(LANES)
    clear, accumulate, invert, scale = (
        _clear(dtype),
        _accumulate(dtype, adds=adds),
        _invert(width, dtype),
        _scale(dtype),
    )

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (10,), np.int64)
        sums = total()
        while True:
            t = next_item(data)
            if t >= a[1]:
                break
            for h in range(a[8]):
                x = a[2] + (t * a[6] + h * width) * itemsize
                update = a[3] + t * width * itemsize
                out = a[5] + (t * a[7] + h * width) * itemsize
                clear((sums,))
                for at in range(0, width * itemsize, LANES * itemsize):
                    accumulate((sums, x + at, update + at))
                invert((sums, a[9]))
                for at in range(0, width * itemsize, LANES * itemsize):
                    scale((sums, x + at, a[4] + at, out + at))

    return kernel


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
def _rotate_kernel(width: int, dtype: str) -> Any:
    itemsize, turn = _size(dtype), _turn(width // 2, dtype)

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (10,), np.int64)
        while True:
            t = next_item(data)
            if t >= a[1]:
                break
            for h in range(a[8]):
                x = a[2] + (t * a[6] + h * width) * itemsize
                for at in range(0, width // 2 * itemsize, LANES * itemsize):
                    turn((x + at, a[3] + t * width * itemsize + at, a[4] + t * width * itemsize + at))

    return kernel


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
def _silu_kernel(width: int, dtype: str) -> Any:
    itemsize, activate = _size(dtype), _activate(width, dtype)

    @cfunc(_VOID, nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (10,), np.int64)
        while True:
            t = next_item(data)
            if t >= a[1]:
                break
            for at in range(0, width * itemsize, LANES * itemsize):
                activate((a[2] + t * a[6] * itemsize + at, a[5] + t * width * itemsize + at))

    return kernel


def _activate(width: int, dtype: str) -> Any:
    """silu of 16 gates times their ups, which lie `width` further on."""

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        gate_up, out = (v.pointer(arg, v.item) for arg in args)
        gate, up = v.load_items(gate_up, 0), v.load_items(gate_up, width)
        silu = b.fdiv(gate, b.fadd(v.real(1.0), v.exp(b.fneg(gate))))
        v.store_items(b.fmul(v.rounded(silu), up), out, 0)

    return statement(emit)
