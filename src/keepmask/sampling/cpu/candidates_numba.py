"""CPU kernels that select candidates: the ids of a row that its filters may keep."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.compiled.jit import jit, jit_reassociated
from keepmask.compiled.team_rows import on_team
from keepmask.sampling.cpu.rows_numba import (
    BLOCK,
    INFINITY_KEY,
    MINUS_INFINITY_KEY,
    least_exact,
    lowered,
    reaching,
    scan,
    value_of_key,
    widen,
)
from keepmask.sampling.records import BAND, EMPTY, NOT_FINITE, OK, TOO_MANY, Records

__all__ = ["run_bfloat16", "run_float32", "select", "select_bfloat16"]

FINER = 16
NEGLIGIBLE = 45.0
"""Weights below exp(-45) of the largest add less than 1e-14 to a sum, whatever their number up to 2**18."""


@jit
def finer_maxima(bits: NDArray[np.int32], group_max: NDArray[np.int32]) -> None:
    """Maxima of the order keys over groups of 16: group g of n holds ids g, g + n, g + 2 n and so on.

    group_max: [n], out, n = ceil(V / 16).
    """
    n = group_max.size
    group_max[:] = np.int32(-0x7FFFFFFF)
    for start in range(0, bits.size, n):
        part = bits[start : start + n]
        for g in range(part.size):
            key = part[g] ^ ((part[g] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            group_max[g] = max(group_max[g], key)


@jit
def reached_by(values: NDArray[np.int32], k: int, low: np.int32, high: np.int32) -> np.int32:
    """A value that at least k of the values reach, 1 <= k <= N, and an eighth more at most unless they are equal.

    low, high: bounds on the values. Halves the range until its middle is such a value.
    """
    least, most = np.int64(low), np.int64(high)
    while least < most:
        middle = (least + most + 1) >> 1
        bound, count = np.int32(middle), np.int32(0)
        for i in range(values.size):
            count += np.int32(values[i] >= bound)
        if count < k:
            most = middle - 1
        elif count <= k + k // 8:
            return bound
        else:
            least = middle
    return np.int32(least)


@jit_reassociated
def weight_sum(row: NDArray[np.float32], temperature: np.float32, shift: float) -> float:
    """Sum of exp(float32(z / temperature) - shift), relative error below 1e-11. Every z is finite or -inf."""
    total = 0.0
    for i in range(row.size):
        d = max(np.float64(row[i] / temperature) - shift, -700.0)
        # exp(d) = 2**k exp(r), abs(r) <= ln(2) / 2; Taylor's series to the tenth power
        k = np.rint(d * 1.4426950408889634)
        r = (d - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10
        p = 1 / 362880 + r * (1 / 3628800)
        p = 1 / 5040 + r * (1 / 40320 + r * p)
        p = 1 / 120 + r * (1 / 720 + r * p)
        p = 1 / 6 + r * (1 / 24 + r * p)
        p = 1 + r * (1 + r * (0.5 + r * p))
        total += p * np.int64((np.int64(k) + 1023) << 52).view(np.float64)
    return total


@jit
def row_weight(row: NDArray[np.float32], block_max: NDArray[np.int32], temperature: np.float32, shift: float) -> float:
    """`weight_sum` over the row without its negligible blocks. block_max: of blocks of 64."""
    total = 0.0
    for j in range(block_max.size):
        if np.float64(value_of_key(block_max[j]) / temperature) >= shift - NEGLIGIBLE:
            total += weight_sum(row[j * BLOCK : (j + 1) * BLOCK], temperature, shift)
    return total


@jit
def collect(
    row: NDArray[np.float32],
    group_max: NDArray[np.int32],
    width: int,
    bound: np.float32,
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
) -> int:
    """Put the logits >= bound (never -inf) and their ids into z and ids; their number, or C + 1 if more.

    group_max: maxima over blocks of 64 ids side by side if width is 64, else over the groups of `finer_maxima`, or of
    one id each.
    """
    n = 0
    first, step = (BLOCK, 1) if width == BLOCK else (1, group_max.size)
    for j in range(group_max.size):
        if value_of_key(group_max[j]) < bound:
            continue
        for i in range(j * first, min(row.size, j * first + width * step), step):
            if row[i] >= bound and row[i] > -np.inf:
                if n == ids.size:
                    return n + 1
                z[n] = row[i]
                ids[n] = i
                n += 1
    return n


@jit
def top_k_bound(
    bits: NDArray[np.int32],
    block_max: NDArray[np.int32],
    k: int,
    low: np.int32,
    high: np.int32,
    scratch: NDArray[np.int32],
) -> tuple[np.float32, NDArray[np.int32], int]:
    """A value that at least k logits reach, and not many more; the maxima that show it, and the width of their groups.

    If the maxima of k groups reach it, k logits do. low, high: lowest and highest order key of the row. scratch: [V].
    """
    if k == 1:
        return value_of_key(high), block_max, BLOCK
    width, maxima = BLOCK, block_max
    if 2 * k > block_max.size:
        width, maxima = FINER, scratch[: (bits.size + FINER - 1) // FINER]
        if 2 * k > maxima.size:
            width, maxima = 1, scratch[: bits.size]
            for i in range(bits.size):
                maxima[i] = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        else:
            finer_maxima(bits, maxima)
    return value_of_key(reached_by(maxima, min(k, bits.size), low, high)), maxima, width


@jit
def rank_of(
    row: NDArray[np.float32],
    block_max: NDArray[np.int32],
    temperature: np.float32,
    token_id: int,
    token_z: np.float32,
) -> int:
    """1 + how many ids come before the token by (z / temperature descending, id ascending).

    token_z: its logit over the temperature. block_max: of blocks of 64.
    """
    before = 0
    for j in range(block_max.size):
        if value_of_key(block_max[j]) / temperature < token_z:
            continue
        for i in range(j * BLOCK, min(row.size, (j + 1) * BLOCK)):
            z = row[i] / temperature
            before += z > token_z or (z == token_z and i < token_id)
    return 1 + before


@jit
def grow(
    row: NDArray[np.float32],
    block_max: NDArray[np.int32],
    extremes: tuple[np.int32, np.int32],
    params: Any,
    shift: float,
    target: float,
    margin: tuple[float, float],
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
) -> tuple[int, float, np.float32]:
    """Collect the highest logits until their weight reaches `target`: their number, their weight and their bound.

    extremes: the lowest and highest order key of the row.
    """
    n_blocks, t, (low, high) = block_max.size, float(params.temperature), extremes
    temperature = np.float32(t)
    k, first_bound = 32, np.float32(-np.inf)
    while True:
        bound = np.float32(-np.inf)
        if k < n_blocks:
            bound = lowered(float(value_of_key(reached_by(block_max, k, low, high))), t, margin)
        n = collect(row, block_max, BLOCK, bound, z, ids)
        if n > ids.size:
            return n, 0.0, bound
        weight = weight_sum(z[:n], temperature, shift)
        if k == 32:
            first_bound = bound
        if weight >= target or k >= n_blocks:
            break
        k *= 4
    if margin[0] > 0:
        # Few more than enough, for each costs a rescoring; but a margin, for the exact order and weights may differ.
        bound = min(first_bound, lowered(tight_bound(z[:n], temperature, shift, target), t, margin))
        n = collect(row, block_max, BLOCK, bound, z, ids)
        weight = weight_sum(z[: min(n, ids.size)], temperature, shift)
    return n, weight, bound


@jit
def tight_bound(z: NDArray[np.float32], temperature: np.float32, shift: float, target: float) -> float:
    """About the highest value such that the logits that reach it weigh `target`; z: [n], which weigh it together."""
    low, high = float(z.min()), float(z.max())
    for _ in range(24):
        middle, weight = 0.5 * (low + high), 0.0
        for i in range(z.size):
            if z[i] >= middle:
                weight += math.exp(max(np.float64(z[i] / temperature) - shift, -700.0))
        if weight >= target:
            low = middle
        else:
            high = middle
    return low


@jit
def select_row(
    row: NDArray[np.float32],  # [V]
    params: Any,
    margin: tuple[float, float],
    found: Any,
    block_max: NDArray[np.int32],  # [ceil(V / 64)], scratch
    scratch: NDArray[np.int32],  # [V], scratch
    z: NDArray[np.float32],  # [C], out
    ids: NDArray[np.int32],  # [C], out
) -> int:
    """One row of `select`: its status."""
    found.count, found.outside, found.shift, found.floor = 0, 0.0, 0.0, 0.0
    bits = row.view(np.int32)
    low, high = scan(bits, block_max)
    if low < MINUS_INFINITY_KEY or high >= INFINITY_KEY:
        return NOT_FINITE
    if high == MINUS_INFINITY_KEY:
        return EMPTY
    temperature, t, top = np.float32(params.temperature), float(params.temperature), value_of_key(high)
    shift = np.float64(top / temperature)
    if not math.isfinite(shift):
        return NOT_FINITE
    if found.token_id >= 0:
        found.rank = rank_of(row, block_max, temperature, found.token_id, found.token_s)
    total = row_weight(row, block_max, temperature, shift) if params.weighs else 0.0
    bound, width, closed = np.float32(-np.inf), BLOCK, True
    maxima = block_max
    if params.select_k > 0:
        kth, maxima, width = top_k_bound(bits, block_max, params.select_k, low, high, scratch)
        bound = lowered(float(kth), t, margin)
    if params.select_log_min_p > -np.inf:
        exact = least_exact(float(top), margin) + t * params.select_log_min_p
        bound = max(bound, reaching(exact, abs(float(top)), t, margin))
    if params.select_k == 0 and params.select_log_min_p == -np.inf and params.select_top_p < 1:
        target = params.select_top_p * total * (1 + BAND)
        n, weight, bound = grow(row, block_max, (low, high), params, shift, target, margin, z, ids)
        closed = bound == -np.inf
    else:
        n = collect(row, maxima, width, bound, z, ids)
        weight = weight_sum(z[: min(n, ids.size)], temperature, shift) if params.weighs else 0.0
    found.shift = shift
    if n > ids.size:
        return TOO_MANY
    outside = total - weight if bound > -np.inf else 0.0
    if outside > 1e-13 * total:  # more than the rounding of the two sums
        found.outside = outside
    above = np.float32(np.float64(bound) + margin[0] * abs(np.float64(bound)) + margin[1])
    found.count = n
    found.floor = -np.inf if closed else np.float64(np.nextafter(above, np.float32(np.inf)) / temperature)
    return OK


@jit
def select(
    logits: NDArray[np.float32],  # [R, V]
    records: Records,  # [M]
    margin: tuple[float, float],
    found: Records,  # [M] of `search.FOUND`, in: tokens and their s; out: their ranks, and the rest
    z: NDArray[np.float32],  # [M, C], out
    ids: NDArray[np.int32],  # [M, C], out
    first: int,
    end: int,
) -> None:
    """Candidates: every id that top-k (ties included), min-p and top-p may keep, whatever their order, and a few more.

    select_top_p bounds the candidates only where select_k and select_log_min_p are off, and needs `weighs`. The rank of
    a token is 1 + the number of ids before it by (z / temperature descending, id ascending).
    """
    V = logits.shape[1]
    block_max = np.empty((V + BLOCK - 1) // BLOCK, np.int32)
    scratch = np.empty(V, np.int32)
    for m in range(first, end):
        row = logits[records[m].source]
        found[m].status = select_row(row, records[m], margin, found[m], block_max, scratch, z[m], ids[m])


@jit
def select_bfloat16(
    logits: NDArray[np.uint16],  # [R, V], bits of bfloat16
    records: Records,
    margin: tuple[float, float],
    found: Records,
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
    first: int,
    end: int,
) -> None:
    """`select` of bfloat16 logits."""
    V = logits.shape[1]
    row, block_max = np.empty(V, np.float32), np.empty((V + BLOCK - 1) // BLOCK, np.int32)
    scratch = np.empty(V, np.int32)
    for m in range(first, end):
        widen(logits[records[m].source], row)
        found[m].status = select_row(row, records[m], margin, found[m], block_max, scratch, z[m], ids[m])


@jit
def run_float32(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`select` on all rows."""
    on_team(select, args, cuts, num_threads, team)


@jit
def run_bfloat16(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`select_bfloat16` on all rows."""
    on_team(select_bfloat16, args, cuts, num_threads, team)
