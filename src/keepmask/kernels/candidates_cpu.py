"""CPU kernels that read whole rows of logits: which ids can survive the filters, and which can win an unfiltered draw.

Rows are [V] float32. Where they are a half-precision rounding of exact logits, the exact logit of r lies within
d(r) = rho * abs(r) + alpha of it, and everything returned holds for every exact row within those bounds. r - d(r) and
r + d(r) rise with r, since rho < 1, so a bound on one rounded logit bounds all below or above it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from keepmask.kernels.jit import jit, jit_reassociated
from keepmask.kernels.philox_cpu import first_words, gumbel, round_keys

__all__ = [
    "EMPTY",
    "NOT_FINITE",
    "OK",
    "TOO_MANY",
    "all_legal",
    "contenders",
    "contenders_bfloat16",
    "select",
    "select_bfloat16",
]

OK, NOT_FINITE, EMPTY, TOO_MANY = 0, 1, 2, 3
"""Status of a row: fine; holds NaN or +inf; holds nothing above -inf; has more candidates than there is room for."""

BLOCK, FINER = 64, 16
INFINITY_KEY = np.int32(0x7F800000)
MINUS_INFINITY_KEY = np.int32(-0x7F800001)
NEGLIGIBLE = 45.0
"""Weights below exp(-45) of the largest add less than 1e-14 to a sum, whatever their number up to 2**18."""
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


@jit
def least_exact(rounded: float, rho: float, alpha: float) -> float:
    """The lowest exact logit this rounded one may stand for."""
    return rounded - rho * abs(rounded) - alpha if rounded > -np.inf else rounded


@jit
def reaching(exact: float, scale: float, temperature: float, rho: float, alpha: float) -> np.float32:
    """A bound below which no rounded logit stands for one that equals or passes `exact`, both over the temperature.

    scale: the largest magnitude in the sum that gave `exact`, whose rounding the bound allows for.
    """
    if exact == -np.inf:
        return np.float32(exact)
    low = exact - alpha
    low = low / (1 + rho) if low >= 0 else low / (1 - rho)
    low -= max(abs(low), scale) * SLACK + temperature * TINY
    below = np.float32(low)
    return np.nextafter(below, np.float32(-np.inf)) if np.float64(below) > low else below


@jit
def lowered(rounded: float, temperature: float, rho: float, alpha: float) -> np.float32:
    """A bound below which no rounded logit stands for one that reaches what the logit `rounded` stands for."""
    return reaching(least_exact(rounded, rho, alpha), abs(rounded), temperature, rho, alpha)


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
    low: np.int32,
    high: np.int32,
    temperature: np.float32,
    shift: float,
    target: float,
    rho: float,
    alpha: float,
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
) -> tuple[int, float, np.float32]:
    """Collect the highest logits until their weight reaches `target`: their number, their weight and their bound."""
    n_blocks, t = block_max.size, float(temperature)
    k, first_bound = 32, np.float32(-np.inf)
    while True:
        bound = np.float32(-np.inf)
        if k < n_blocks:
            bound = lowered(float(value_of_key(reached_by(block_max, k, low, high))), t, rho, alpha)
        n = collect(row, block_max, BLOCK, bound, z, ids)
        if n > ids.size:
            return n, 0.0, bound
        weight = weight_sum(z[:n], temperature, shift)
        if k == 32:
            first_bound = bound
        if weight >= target or k >= n_blocks:
            break
        k *= 4
    if rho > 0:
        # Few more than enough, for each costs a rescoring; but a margin, for the exact order and weights may differ.
        bound = min(first_bound, lowered(tight_bound(z[:n], temperature, shift, target), t, rho, alpha))
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
    temperature: np.float32,
    k: int,
    log_min_p: float,
    top_p: float,
    weighs: bool,
    rho: float,
    alpha: float,
    tokens: NDArray[np.int64],  # [2], in: a token id or -1; out: its rank
    token_z: np.float32,
    block_max: NDArray[np.int32],  # [ceil(V / 64)], scratch
    scratch: NDArray[np.int32],  # [V], scratch
    z: NDArray[np.float32],  # [C], out
    ids: NDArray[np.int32],  # [C], out
) -> tuple[int, int, float, float, float]:
    """One row of `select`: status, count, outside, shift, floor."""
    bits = row.view(np.int32)
    low, high = scan(bits, block_max)
    if low < MINUS_INFINITY_KEY or high >= INFINITY_KEY:
        return NOT_FINITE, 0, 0.0, 0.0, 0.0
    if high == MINUS_INFINITY_KEY:
        return EMPTY, 0, 0.0, 0.0, 0.0
    top = value_of_key(high)
    shift = np.float64(top / temperature)
    if not math.isfinite(shift):
        return NOT_FINITE, 0, 0.0, 0.0, 0.0
    if tokens[0] >= 0:
        tokens[1] = rank_of(row, block_max, temperature, tokens[0], token_z)
    total = row_weight(row, block_max, temperature, shift) if weighs else 0.0
    bound, width, closed = np.float32(-np.inf), BLOCK, True
    maxima = block_max
    if k > 0:
        kth, maxima, width = top_k_bound(bits, block_max, k, low, high, scratch)
        bound = lowered(float(kth), float(temperature), rho, alpha)
    if log_min_p > -np.inf:
        exact = least_exact(float(top), rho, alpha) + float(temperature) * log_min_p
        bound = max(bound, reaching(exact, abs(float(top)), float(temperature), rho, alpha))
    if k == 0 and log_min_p == -np.inf and top_p < 1:
        n, weight, bound = grow(
            row, block_max, low, high, temperature, shift, top_p * total * (1 + 1e-9), rho, alpha, z, ids
        )
        closed = bound == -np.inf
    else:
        n = collect(row, maxima, width, bound, z, ids)
        weight = weight_sum(z[: min(n, ids.size)], temperature, shift) if weighs else 0.0
    if n > ids.size:
        return TOO_MANY, 0, 0.0, shift, 0.0
    outside = total - weight if bound > -np.inf else 0.0
    if outside < 1e-13 * total:  # nothing but the rounding of the two sums
        outside = 0.0
    above = np.float32(np.float64(bound) + rho * abs(np.float64(bound)) + alpha)
    floor = -np.inf if closed else np.float64(np.nextafter(above, np.float32(np.inf)) / temperature)
    return OK, n, outside, shift, floor


@jit
def select(
    logits: NDArray[np.float32],  # [R, V]
    x_rows: NDArray[np.int64],  # [M], the row of logits of each item
    items: NDArray[np.int64],  # [M], the entry of the parameters of each item
    temperature: NDArray[np.float32],  # [B]
    top_k: NDArray[np.int64],  # [B], 0 where off
    log_min_p: NDArray[np.float64],  # [B], -inf where off
    top_p: NDArray[np.float64],  # [B], 1 where off
    weighs: NDArray[np.bool_],  # [B]
    margin: tuple[float, float],
    tokens: NDArray[np.int64],  # [M, 2], in: token ids, or -1; out: their ranks
    token_z: NDArray[np.float32],  # [M], their logits over the temperature
    z: NDArray[np.float32],  # [M, C], out
    ids: NDArray[np.int32],  # [M, C], out
    counts: NDArray[np.int64],  # [M], out
    sums: NDArray[np.float64],  # [M, 3], out: outside, shift, floor
    status: NDArray[np.int64],  # [M], out
    first: int,
    end: int,
) -> None:
    """Candidates: every id that top-k (ties included), min-p and top-p may keep, whatever their order, and a few more.

    counts: how many, all above -inf. sums: the weight exp(z / temperature - shift) of all other ids, for rows that
    weigh; shift, the highest z / temperature; floor: no id above it is missing, in units of z / temperature.
    top_p bounds the candidates only where top-k and min-p are off, and needs `weighs`. The rank of a token is 1 + the
    number of ids before it by (z / temperature descending, id ascending).
    """
    V = logits.shape[1]
    block_max = np.empty((V + BLOCK - 1) // BLOCK, np.int32)
    scratch = np.empty(V, np.int32)
    for m in range(first, end):
        b = items[m]
        status[m], counts[m], sums[m, 0], sums[m, 1], sums[m, 2] = select_row(
            logits[x_rows[m]],
            temperature[b],
            top_k[b],
            log_min_p[b],
            top_p[b],
            weighs[b],
            margin[0],
            margin[1],
            tokens[m],
            token_z[m],
            block_max,
            scratch,
            z[m],
            ids[m],
        )


@jit
def widen(half: NDArray[np.uint16], row: NDArray[np.float32]) -> None:
    """bfloat16 bits to float32. half, row: [V]."""
    bits = row.view(np.int32)
    for i in range(half.size):
        bits[i] = np.int32(half[i]) << np.int32(16)


@jit
def select_bfloat16(
    logits: NDArray[np.uint16],  # [R, V], bits of bfloat16
    x_rows: NDArray[np.int64],
    items: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    log_min_p: NDArray[np.float64],
    top_p: NDArray[np.float64],
    weighs: NDArray[np.bool_],
    margin: tuple[float, float],
    tokens: NDArray[np.int64],
    token_z: NDArray[np.float32],
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
    counts: NDArray[np.int64],
    sums: NDArray[np.float64],
    status: NDArray[np.int64],
    first: int,
    end: int,
) -> None:
    """`select` of bfloat16 logits."""
    row, no_rows = np.empty((1, logits.shape[1]), np.float32), np.zeros(end, np.int64)
    for m in range(first, end):
        widen(logits[x_rows[m]], row[0])
        select(
            row,
            no_rows,
            items,
            temperature,
            top_k,
            log_min_p,
            top_p,
            weighs,
            margin,
            tokens,
            token_z,
            z,
            ids,
            counts,
            sums,
            status,
            m,
            m + 1,
        )


@jit
def contenders_row(
    row: NDArray[np.float32],  # [V]
    temperature: np.float32,
    position: int,
    completion: int,
    seed: int,
    rho: float,
    alpha: float,
    block_max: NDArray[np.int32],  # [ceil(V / 64)], scratch
    z: NDArray[np.float32],  # [C], out
    ids: NDArray[np.int32],  # [C], out
    upper: NDArray[np.float64],  # [C], scratch
) -> tuple[int, int, bool]:
    """One row of `contenders`: status, count, whether every logit over the temperature is above -inf."""
    low, high = scan(row.view(np.int32), block_max)
    if low < MINUS_INFINITY_KEY or high >= INFINITY_KEY:
        return NOT_FINITE, 0, False
    if high == MINUS_INFINITY_KEY:
        return EMPTY, 0, False
    if not math.isfinite(value_of_key(high) / temperature):
        return NOT_FINITE, 0, False
    full = bool(value_of_key(low) / temperature > -np.inf)
    start = 0
    while block_max[start] != high:
        start += 1
    keys, x0 = np.empty((10, 2), np.uint32), np.empty(BLOCK, np.uint32)
    round_keys(seed, keys)
    best, n = -np.inf, 0
    for turn in range(block_max.size):
        # The block of the highest logit first: the better the best score so far, the fewer ids are looked at.
        j = start if turn == 0 else turn - 1 if turn <= start else turn
        least = beating(best, value_of_key(block_max[j]), temperature, rho, alpha)
        if least < 0:
            continue
        block = row[j * BLOCK : (j + 1) * BLOCK]
        first_words(j * BLOCK, position, completion, keys, x0[: block.size])
        if any_at_least(x0[: block.size], least):
            best, n = contend(
                block, j * BLOCK, x0, least, best, n, temperature, position, completion, seed, rho, alpha, z, ids, upper
            )
            if n > ids.size:
                return TOO_MANY, 0, full
    return OK, still_contending(z, ids, upper, n, best - near(best)), full


@jit
def contend(
    block: NDArray[np.float32],
    first_id: int,
    x0: NDArray[np.uint32],
    least: int,
    best: float,
    n: int,
    temperature: np.float32,
    position: int,
    completion: int,
    seed: int,
    rho: float,
    alpha: float,
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
    upper: NDArray[np.float64],
) -> tuple[float, int]:
    """Add the ids of a block that may beat `best` to the n contenders: the new best and n, C + 1 if there is no room.

    best: the highest score that some contender is sure of. least: the lowest x0 >> 6 that may beat it.
    """
    for i in range(block.size):
        r = np.float64(block[i])
        if (x0[i] >> np.uint32(6)) < least or r == -np.inf:
            continue
        noise = gumbel(first_id + i, position, completion, seed)
        if rho > 0:
            spread = (rho * abs(r) + alpha) / temperature + abs(r / temperature) * SLACK
            lowest, highest = r / temperature - spread + noise, r / temperature + spread + noise
        else:
            lowest = np.float64(block[i] / temperature) + noise
            highest = lowest
        best = max(best, lowest)
        if highest < best - near(best):
            continue
        if n == ids.size:
            n = still_contending(z, ids, upper, n, best - near(best))
            if n == ids.size:
                return best, n + 1
        z[n], ids[n], upper[n] = block[i], first_id + i, highest
        n += 1
    return best, n


@jit
def near(score: float) -> float:
    """Scores closer than this may order either way, by the last bits of the logarithms."""
    return 1e-9 + abs(score) * 1e-12


@jit
def beating(best: float, top: np.float32, temperature: np.float32, rho: float, alpha: float) -> int:
    """The lowest x0 >> 6 with which a logit of at most `top` may reach the score `best`; -1 where none can.

    Its noise must be at least `need`, so u >= exp(-exp(-need)), and u < ((x0 >> 6) + 1) 2**-26.
    """
    if top == -np.inf:
        return -1
    reach = (np.float64(top) + rho * abs(np.float64(top)) + alpha) / temperature
    need = best - near(best) - reach - abs(reach) * SLACK if best > -np.inf else -np.inf
    if need > 36.8:  # noise never exceeds -log(-log(1 - 2**-53)) = 36.74
        return -1
    if need < -4:  # and never falls below -log(-log(2**-53)) = -3.61
        return 0
    return max(0, int(math.exp(-math.exp(-need)) * 2.0**26 * (1 - 1e-9)) - 1)


@jit
def any_at_least(x0: NDArray[np.uint32], least: int) -> bool:
    """Whether any x0 >> 6 is at least `least`."""
    bound = np.uint32(least) << np.uint32(6)
    top = np.uint32(0)
    for i in range(x0.size):
        top = max(top, x0[i])
    return bool(top >= bound)


@jit
def still_contending(
    z: NDArray[np.float32], ids: NDArray[np.int32], upper: NDArray[np.float64], n: int, least: float
) -> int:
    """Keep those of the first n whose upper score is at least `least`; their number."""
    kept = 0
    for i in range(n):
        if upper[i] >= least:
            z[kept], ids[kept], upper[kept] = z[i], ids[i], upper[i]
            kept += 1
    return kept


@jit
def contenders(
    logits: NDArray[np.float32],  # [R, V]
    x_rows: NDArray[np.int64],  # [M]
    items: NDArray[np.int64],  # [M]
    temperature: NDArray[np.float32],  # [B]
    positions: NDArray[np.int64],  # [B]
    completions: NDArray[np.int64],  # [B]
    seeds: NDArray[np.int64],  # [B]
    margin: tuple[float, float],
    z: NDArray[np.float32],  # [M, C], out
    ids: NDArray[np.int32],  # [M, C], out
    counts: NDArray[np.int64],  # [M], out
    full: NDArray[np.bool_],  # [M], out
    status: NDArray[np.int64],  # [M], out
    first: int,
    end: int,
) -> None:
    """Ids that may win the draw over a whole row, that is, have the highest z / temperature + noise; mostly one.

    full: whether every logit over the temperature is above -inf, so that the support is the whole vocabulary.
    """
    block_max = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.int32)
    upper = np.empty(ids.shape[1], np.float64)
    for m in range(first, end):
        b = items[m]
        status[m], counts[m], full[m] = contenders_row(
            logits[x_rows[m]],
            temperature[b],
            positions[b],
            completions[b],
            seeds[b],
            margin[0],
            margin[1],
            block_max,
            z[m],
            ids[m],
            upper,
        )


@jit
def contenders_bfloat16(
    logits: NDArray[np.uint16],  # [R, V], bits of bfloat16
    x_rows: NDArray[np.int64],
    items: NDArray[np.int64],
    temperature: NDArray[np.float32],
    positions: NDArray[np.int64],
    completions: NDArray[np.int64],
    seeds: NDArray[np.int64],
    margin: tuple[float, float],
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
    counts: NDArray[np.int64],
    full: NDArray[np.bool_],
    status: NDArray[np.int64],
    first: int,
    end: int,
) -> None:
    """`contenders` of bfloat16 logits."""
    row, no_rows = np.empty((1, logits.shape[1]), np.float32), np.zeros(end, np.int64)
    for m in range(first, end):
        widen(logits[x_rows[m]], row[0])
        contenders(
            row,
            no_rows,
            items,
            temperature,
            positions,
            completions,
            seeds,
            margin,
            z,
            ids,
            counts,
            full,
            status,
            m,
            m + 1,
        )


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
