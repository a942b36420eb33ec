"""CPU kernels over one row of logits: what it holds, and how far a rounded logit may be from the exact one.

Rows are [V] float32. Where they are a half-precision rounding of exact logits, the exact logit of r lies within
d(r) = rho * abs(r) + alpha of it, and bounds hold for every exact row within these. r - d(r) and r + d(r) rise with r,
since rho < 1, so a bound on one rounded logit bounds all below or above it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.compiled.jit import jit
from keepmask.compiled.team_rows import on_team

__all__ = ["BLOCK", "all_legal", "run_all_legal", "scan"]

BLOCK = 64
INFINITY_KEY = np.int32(0x7F800000)
MINUS_INFINITY_KEY = np.int32(-0x7F800001)
SLACK = 2.0**-21
TINY = 2.0**-125
"""Division by the temperature rounds; ids it may tie with a bound lie within these of it."""


@jit
def order_key(value: np.float32) -> np.int32:
    """An integer that orders as the float does; -0 before +0, NaN at either end."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@jit
def value_of_key(key: np.int32) -> np.float32:
    """The float `order_key` was given."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@jit
def scan(bits: NDArray[np.int32], block_max: NDArray[np.int32]) -> tuple[np.int32, np.int32]:
    """Maxima of the order keys over blocks of 64, and their lowest and highest over the row.

    bits: [V], a float32 row's bits. block_max: [ceil(V / 64)], out.
    """
    low, high = INFINITY_KEY, np.int32(-0x7FFFFFFF)
    for j in range(block_max.size):
        block = bits[j * BLOCK : (j + 1) * BLOCK]
        top = np.int32(-0x7FFFFFFF)
        if block.size == BLOCK:
            for i in range(BLOCK):
                key = block[i] ^ ((block[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
                top = max(top, key)
                low = min(low, key)
        else:
            for i in range(block.size):
                key = block[i] ^ ((block[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
                top = max(top, key)
                low = min(low, key)
        block_max[j] = top
        high = max(high, top)
    return low, high


@jit
def all_legal(
    logits: NDArray[np.float32],  # [R, V]
    legal: NDArray[np.bool_],  # [R], out
    first: int,
    end: int,
) -> None:
    """Whether a row holds neither NaN nor +inf."""
    block_max = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.int32)
    for m in range(first, end):
        low, high = scan(logits[m].view(np.int32), block_max)
        legal[m] = low >= MINUS_INFINITY_KEY and high < INFINITY_KEY


@jit
def widen(half: NDArray[np.uint16], row: NDArray[np.float32]) -> None:
    """bfloat16 bits to float32. half, row: [V]."""
    bits = row.view(np.int32)
    for i in range(half.size):
        bits[i] = np.int32(half[i]) << np.int32(16)


@jit
def least_exact(rounded: float, margin: tuple[float, float]) -> float:
    """The lowest exact logit this rounded one may stand for. margin: (rho, alpha)."""
    rho, alpha = margin
    return rounded - rho * abs(rounded) - alpha if rounded > -np.inf else rounded


@jit
def reaching(exact: float, scale: float, temperature: float, margin: tuple[float, float]) -> np.float32:
    """A bound below which no rounded logit stands for one that equals or passes `exact`, both over the temperature.

    scale: the largest magnitude in the sum that gave `exact`, whose rounding the bound allows for.
    """
    rho, alpha = margin
    if exact == -np.inf:
        return np.float32(exact)
    low = exact - alpha
    low = low / (1 + rho) if low >= 0 else low / (1 - rho)
    low -= max(abs(low), scale) * SLACK + temperature * TINY
    below = np.float32(low)
    return np.nextafter(below, np.float32(-np.inf)) if np.float64(below) > low else below


@jit
def lowered(rounded: float, temperature: float, margin: tuple[float, float]) -> np.float32:
    """A bound below which no rounded logit stands for one that reaches what the logit `rounded` stands for."""
    return reaching(least_exact(rounded, margin), abs(rounded), temperature, margin)


@jit
def run_all_legal(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`all_legal` on all rows."""
    on_team(all_legal, args, cuts, num_threads, team)
