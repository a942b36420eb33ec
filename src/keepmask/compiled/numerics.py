"""What compiled CPU kernels share: bfloat16 as raw bits, and an exponential that vectorises.

Importing this module loads numba, so it is imported on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["array", "exp", "narrow", "widen"]

_I16, _I32 = ir.IntType(16), ir.IntType(32)


class _Memory:
    """A tensor's memory as NumPy looks at it. `Tensor.numpy()` would fix the storage's size, but sharded data
    parallelism frees and fills it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # which the array keeps alive
        kind = _KINDS[tensor.dtype]
        strides = None if tensor.is_contiguous() else tuple(step * tensor.itemsize for step in tensor.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": kind,
        }


_KINDS = {torch.float32: "<f4", torch.bfloat16: "<u2"}


def array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor, float32 or bfloat16; the latter as uint16 bits."""
    return np.asarray(_Memory(tensor.detach()))


def _inlined(function: Callable[..., Any]) -> Any:
    return intrinsic(function)  # numba calls it without the typing context


@_inlined
def widen(typing_context: Any, x: Any) -> Any:
    """A float32 as it is; a uint16 as the bfloat16 whose bits it holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        upper = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(upper, ir.FloatType())

    return types.float32(x), generate


@_inlined
def narrow(typing_context: Any, x: Any, like: Any) -> Any:
    """The inverse of `widen`, in the type of `like`: rounded to the nearest bfloat16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1] == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        upper = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, ir.Constant(_I16, 0x7FC0), upper)

    return like(types.float32, like), generate


@_inlined
def _from_bits(typing_context: Any, x: Any) -> Any:
    """The float32 whose bits an int32 holds."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@numba.njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e**x in float32, within 2 units in the last place, for x in [-80, 80]; NaN for NaN."""
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # ln 2 in two parts (Cody and Waite), so that the remainder is exact.
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = _from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + np.float32(1)) * power
