"""What the Triton kernels of the sampler share: compiling, ordered keys, exact division, and the noise.

Under `TRITON_INTERPRET=1`, set before Triton is first imported, the same kernels run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.draw_records import DRAW
from keepmask.sampling.records import RECORD

__all__ = [
    "ABOVE_ALL",
    "BELOW_ALL",
    "DRAW_WORDS",
    "INFINITY_KEY",
    "MINUS_INFINITY_KEY",
    "RECORD_WORDS",
    "adjacent_columns",
    "draw_field",
    "entries",
    "field",
    "gumbel",
    "interpreted",
    "jit",
    "kept",
    "launch_tile",
    "least_key_from",
    "near_noise",
    "noise_of",
    "order_key",
    "real",
    "scaled",
    "score_bounds",
    "value_of_key",
    "word",
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


def field(name: str) -> Any:
    """The place of a field in the words of `RECORD`, for use in kernels."""
    return tl.constexpr((RECORD.names or ()).index(name))


def draw_field(name: str) -> Any:
    """The place of a field in the words of `DRAW`, for use in kernels."""
    return tl.constexpr((DRAW.names or ()).index(name))


def launch_tile(V: int) -> int:
    """How many of V logits a program looks at together."""
    return min(4096, max(64, int(triton.next_power_of_2(V))))


RECORD_WORDS, DRAW_WORDS = tl.constexpr(RECORD.itemsize // 8), tl.constexpr(DRAW.itemsize // 8)
POSITION, COMPLETION, SEED = field("position"), field("completion"), field("seed")


@jit
def real(bits: tl.tensor) -> tl.tensor:
    """The float64 in a word."""
    return bits.to(tl.float64, bitcast=True)


@jit
def word(value: tl.tensor) -> tl.tensor:
    """The word that holds a number, as float64."""
    return value.to(tl.float64).to(tl.int64, bitcast=True)


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
def noise_of(params_ptr: tl.tensor) -> tl.tuple:
    """What keys the noise of a row: position, completion and seed of its record."""
    return tl.load(params_ptr + POSITION), tl.load(params_ptr + COMPLETION), tl.load(params_ptr + SEED)


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


@jit
def entries(row: tl.tuple, start: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tuple:
    """s = z / temperature, its keys and ids, of TILE of the row's entries; behind the last, entries of -inf.

    row: where its logits start, where its ids start, how many entries it has, and its temperature. Entries are
    candidates with their ids or, with ALL, the V logits of the vocabulary, whose columns are the ids.
    """
    z_ptr, ids_ptr, n, temperature = row
    at = start + tl.arange(0, TILE)
    s = scaled(tl.load(z_ptr + at, mask=at < n, other=float("-inf")), temperature)
    ids = at
    if not ALL:
        ids = tl.load(ids_ptr + at, mask=at < n, other=0)
    return s, order_key(s), ids


@jit
def kept(key: tl.tensor, ids: tl.tensor, cut: tl.tuple) -> tl.tensor:
    """Whether entries are numbers above the cut's key, or at it with an id in [first, last]. cut: these three."""
    bound, first, last = cut
    return ((key > bound) & (key < INFINITY_KEY)) | ((key == bound) & (ids >= first) & (ids <= last))
