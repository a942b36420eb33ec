"""CPU kernels that select contenders: the ids of a row that may win a draw over all of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.compiled.jit import jit
from keepmask.compiled.team_rows import on_team
from keepmask.sampling.cpu.noise_numba import first_words, gumbel, round_keys
from keepmask.sampling.cpu.rows_numba import (
    BLOCK,
    INFINITY_KEY,
    MINUS_INFINITY_KEY,
    SLACK,
    scan,
    value_of_key,
    widen,
)
from keepmask.sampling.records import EMPTY, NEAR, NOT_FINITE, OK, RELATIVELY_NEAR, TOO_MANY, Records

__all__ = ["contenders", "contenders_bfloat16", "near", "run_bfloat16", "run_float32"]


@jit
def contenders_row(
    row: NDArray[np.float32],  # [V]
    params: Any,
    margin: tuple[float, float],
    block_max: NDArray[np.int32],  # [ceil(V / 64)], scratch
    room: tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float64]],  # z, ids: [C], out; upper: [C], scratch
) -> tuple[int, int, bool]:
    """One row of `contenders`: status, count, whether every logit over the temperature is above -inf."""
    temperature = np.float32(params.temperature)
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
    round_keys(params.seed, keys)
    best, n = -np.inf, 0
    for turn in range(block_max.size):
        # The block of the highest logit first: the better the best score so far, the fewer ids are looked at.
        j = start if turn == 0 else turn - 1 if turn <= start else turn
        least = beating(best, value_of_key(block_max[j]), temperature, margin)
        if least < 0:
            continue
        block = row[j * BLOCK : (j + 1) * BLOCK]
        first_words(j * BLOCK, params, keys, x0[: block.size])
        if any_at_least(x0[: block.size], least):
            best, n = contend(block, j * BLOCK, x0, least, (best, n), params, margin, room)
            if n > room[1].size:
                return TOO_MANY, 0, full
    return OK, still_contending(room, n, best - near(best)), full


@jit
def contend(
    block: NDArray[np.float32],
    first_id: int,
    x0: NDArray[np.uint32],
    least: int,
    so_far: tuple[float, int],
    params: Any,
    margin: tuple[float, float],
    room: tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float64]],
) -> tuple[float, int]:
    """Add the ids of a block that may beat the best score to the contenders.

    so_far: the highest score that some contender is sure of, and how many there are. Returns the new ones, C + 1 of
    them if there is no room. least: the lowest x0 >> 6 that may beat the best.
    """
    (best, n), (rho, alpha), (z, ids, upper) = so_far, margin, room
    temperature = np.float32(params.temperature)
    for i in range(block.size):
        r = np.float64(block[i])
        if (x0[i] >> np.uint32(6)) < least or r == -np.inf:
            continue
        noise = gumbel(first_id + i, params)
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
            n = still_contending(room, n, best - near(best))
            if n == ids.size:
                return best, n + 1
        z[n], ids[n], upper[n] = block[i], first_id + i, highest
        n += 1
    return best, n


@jit
def near(score: float) -> float:
    """Scores closer than this may order either way, by the last bits of the logarithms."""
    return NEAR + abs(score) * RELATIVELY_NEAR


@jit
def beating(best: float, top: np.float32, temperature: np.float32, margin: tuple[float, float]) -> int:
    """The lowest x0 >> 6 with which a logit of at most `top` may reach the score `best`; -1 where none can.

    Its noise must be at least `need`, so u >= exp(-exp(-need)), and u < ((x0 >> 6) + 1) 2**-26.
    """
    if top == -np.inf:
        return -1
    rho, alpha = margin
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
    room: tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float64]], n: int, least: float
) -> int:
    """Keep those of the first n whose upper score is at least `least`; their number."""
    z, ids, upper = room
    kept = 0
    for i in range(n):
        if upper[i] >= least:
            z[kept], ids[kept], upper[kept] = z[i], ids[i], upper[i]
            kept += 1
    return kept


@jit
def contenders(
    logits: NDArray[np.float32],  # [R, V]
    records: Records,  # [M]
    margin: tuple[float, float],
    rows: Records,  # [M], out: status, count, full
    z: NDArray[np.float32],  # [M, C], out
    ids: NDArray[np.int32],  # [M, C], out
    first: int,
    end: int,
) -> None:
    """Ids that may win the draw over a whole row, that is, have the highest z / temperature + noise; mostly one.

    full: whether every logit over the temperature is above -inf, so that the support is the whole vocabulary.
    """
    block_max = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.int32)
    upper = np.empty(ids.shape[1], np.float64)
    for m in range(first, end):
        found = contenders_row(logits[records[m].source], records[m], margin, block_max, (z[m], ids[m], upper))
        rows[m].status, rows[m].count, rows[m].full = found


@jit
def contenders_bfloat16(
    logits: NDArray[np.uint16],  # [R, V], bits of bfloat16
    records: Records,
    margin: tuple[float, float],
    rows: Records,
    z: NDArray[np.float32],
    ids: NDArray[np.int32],
    first: int,
    end: int,
) -> None:
    """`contenders` of bfloat16 logits."""
    row = np.empty(logits.shape[1], np.float32)
    block_max = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, np.int32)
    upper = np.empty(ids.shape[1], np.float64)
    for m in range(first, end):
        widen(logits[records[m].source], row)
        found = contenders_row(row, records[m], margin, block_max, (z[m], ids[m], upper))
        rows[m].status, rows[m].count, rows[m].full = found


@jit
def run_float32(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`contenders` on all rows."""
    on_team(contenders, args, cuts, num_threads, team)


@jit
def run_bfloat16(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`contenders_bfloat16` on all rows."""
    on_team(contenders_bfloat16, args, cuts, num_threads, team)
