"""What the Triton kernels of the sampler share: compiling, ordered keys, exact division, and the noise.

Under `TRITON_INTERPRET=1`, set before Triton is first imported, the same kernels run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.draw_table import COLUMNS

__all__ = [
    "ABOVE_ALL",
    "BELOW_ALL",
    "INFINITY_KEY",
    "MINUS_INFINITY_KEY",
    "adjacent_columns",
    "column",
    "gumbel",
    "interpreted",
    "jit",
    "least_key_from",
    "near_noise",
    "noise_of",
    "order_key",
    "scaled",
    "score_bounds",
    "value_of_key",
]

INFINITY_KEY = tl.constexpr(0x7F800000)
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
ABOVE_ALL, BELOW_ALL = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)
"""Keys of no number."""


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function of Triton's language for the device of the tensors it is launched with."""
    return triton.jit(function, do_not_specialize=["M"]) if "M" in _parameters(function) else triton.jit(function)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, and so on CPU tensors."""
    return not isinstance(order_key, triton.JITFunction)


def adjacent_columns(array: Tensor) -> bool:
    """Whether the columns of [R, V] stand side by side, whatever the rows do."""
    return array.shape[1] <= 1 or array.stride(1) == 1


def column(name: str) -> Any:
    """The number of a column of `DrawTable`, for use in kernels."""
    return tl.constexpr(COLUMNS.index(name))


POSITION, COMPLETION, SEED = column("position"), column("completion"), column("seed")


@jit
def order_key(value: tl.tensor) -> tl.tensor:
    """int32 that orders as the float32 does; NaN comes before or behind everything."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of_key(key: tl.tensor) -> tl.tensor:
    """The float32 that `order_key` was given."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def scaled(z: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """float32(z / temperature), rounded as IEEE 754 has it; -0 becomes 0, so that equal numbers have equal keys."""
    s = tl.div_rn(z, temperature)
    return tl.where(s == 0.0, 0.0, s)


@jit
def least_key_from(bound: tl.tensor) -> tl.tensor:
    """The lowest key of a float32 that is >= bound, a float64 scalar."""
    nearest = bound.to(tl.float32)
    nearest = tl.where(nearest == 0.0, 0.0, nearest)
    return order_key(nearest) + (nearest.to(tl.float64) < bound).to(tl.int32)


@jit
def noise_words(ids: tl.tensor, noise: tl.tuple) -> tl.tuple:
    """The high 26 bits of x0 and x1 of Philox 4x32-10, as in `noise.uniform`. noise: as of `noise_of`."""
    position, completion, seed = noise
    c0 = ids.to(tl.uint32)
    zero = c0 & 0
    x0, x1, _, _ = tl.philox(seed, c0, zero + position.to(tl.uint32), zero + completion.to(tl.uint32), zero)
    return x0 >> 6, x1 >> 6


@jit
def noise_of(ints_ptr: tl.tensor, M: tl.tensor, m: tl.tensor) -> tl.tuple:
    """What keys the noise of row m: position, completion and seed, from the table."""
    position, completion = tl.load(ints_ptr + POSITION * M + m), tl.load(ints_ptr + COMPLETION * M + m)
    return position, completion, tl.load(ints_ptr + SEED * M + m)


@jit
def gumbel(ids: tl.tensor, noise: tl.tuple) -> tl.tensor:
    """`noise.gumbel` of ids, float64."""
    high, low = noise_words(ids, noise)
    cell = (high.to(tl.int64) << 26) | low.to(tl.int64)
    u = (cell.to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(u))


@jit
def near_noise(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """`gumbel` of these words in float32, within 1e-4: every step errs by a few units of 2**-22."""
    u = (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * 2.0**-26) * 2.0**-26
    # v = 1 - u, from the complements of the words, so that it keeps its digits where it is small
    low_rest = (low.to(tl.int32) * -1 + 2**26).to(tl.float32) - 0.5
    v = ((high.to(tl.int32) * -1 + (2**26 - 1)).to(tl.float32) + low_rest * 2.0**-26) * 2.0**-26
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(u)))


@jit
def score_bounds(s: tl.tensor, ids: tl.tensor, noise: tl.tuple) -> tl.tuple:
    """float32 below and above s + `gumbel`: cheap, and further from it than the rounding errors of either way."""
    high, low = noise_words(ids, noise)
    g = near_noise(high, low)
    spread = 1e-3 + tl.abs(s) * 2.0**-20
    possible = s > float("-inf")
    return tl.where(possible, s + g - spread, s), tl.where(possible, s + g + spread, s)
