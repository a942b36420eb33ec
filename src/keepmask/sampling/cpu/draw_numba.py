"""CPU kernels over candidates: the filters of the three profiles, the draw, and the log-probabilities of the support.

They decide what `keepmask.sampling.semantics` and `keepmask.sampling.definition` define, or say that they cannot: where
a decision hangs on the last bits of a sum or a logarithm the row is `UNCERTAIN`, and where candidates are missing it is
`INSUFFICIENT`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.compiled.jit import jit
from keepmask.compiled.team_rows import on_team
from keepmask.sampling.cpu.contenders_numba import near
from keepmask.sampling.cpu.noise_numba import gumbel
from keepmask.sampling.cpu.rows_numba import order_key, value_of_key
from keepmask.sampling.records import (
    BAND,
    HF,
    INSUFFICIENT,
    NOT_FINITE,
    OK,
    SGLANG,
    SGLANG_TORCH,
    UNCERTAIN,
    VLLM,
    Records,
)

__all__ = ["PADDING", "decide", "encode", "run_decide", "run_encode", "settle"]

PADDING = np.int64(2**63 - 1)
"""A key after all others."""

LOWEST = np.float64(np.finfo(np.float32).min)


@jit
def encode(
    z: NDArray[np.float32],  # [M, C], logits before temperature
    ids: NDArray[np.int32],  # [M, C]
    records: Records,  # [M]
    found: Records,  # [M] of `search.FOUND`: count; in and out: status
    keys: NDArray[np.int64],  # [M, width], out
    first: int,
    end: int,
) -> None:
    """Integers that ascend as (z / temperature descending, id ascending), then `PADDING`."""
    for m in range(first, end):
        t, n = np.float32(records[m].temperature), found[m].count
        for i in range(n):
            scaled = z[m, i] / t
            if not scaled < np.inf:
                found[m].status = NOT_FINITE
                break
            # -0 becomes 0, its equal; -inf stays the lowest
            keys[m, i] = (np.int64(~order_key(scaled if scaled != 0 else np.float32(0))) << 32) | np.int64(ids[m, i])
        keys[m, n:] = PADDING


@jit
def key_value(key: np.int64) -> np.float32:
    """The scaled logit of a key."""
    return value_of_key(~np.int32(key >> 32))


@jit
def mass_cut(z: NDArray[np.float32], n: int, share: float, outside: float, inclusive: bool) -> tuple[int, bool]:
    """How many of the first n entries, sorted descending, the mass cut keeps, and whether no sum came close to it.

    Keeps an entry while the weight before it is < share * total (<= if inclusive); total has `outside` in it. Returns
    n + 1 where the entries do not weigh enough to tell that the next one goes.
    """
    inside = 0.0
    for i in range(n):
        inside += math.exp(np.float64(z[i]) - np.float64(z[0]))
    total = inside + outside
    threshold, close = share * total, BAND * total
    before, certain = 0.0, True
    for i in range(n):
        if i > 0 and abs(before - threshold) <= close:
            certain = False
        if i > 0 and (before > threshold or (before == threshold and not inclusive)):
            return i, certain
        before += math.exp(np.float64(z[i]) - np.float64(z[0]))
    if outside > 0 and not before - threshold > close:
        return n + 1, certain
    return n, certain


@jit
def first_below(z: NDArray[np.float32], n: int, bound: float) -> int:
    """How many of the first n entries, sorted descending, are >= bound."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if np.float64(z[middle]) >= bound:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def survivors(z: NDArray[np.float32], params: Any, outside: float, floor: float) -> tuple[int, int, int, int]:
    """The filters: entries [0, a) and [b, c) stay. Returns a, b, c and a status.

    z: [n], sorted descending, > -inf. outside: the weight of all other ids. floor: none of them is above it.
    """
    n, profile = z.size, params.profile
    if params.greedy:
        return 1, 1, 1, OK
    kept_k = min(params.top_k, n)
    if kept_k < n and profile not in (VLLM, SGLANG_TORCH):  # ties with the k-th stay
        kept_k = first_below(z, n, np.float64(z[kept_k - 1]))
    kept_min_p = first_below(z, n, np.float64(z[0]) + params.log_min_p)
    kept = min(kept_k, kept_min_p)
    if params.top_p >= 1:
        return kept, kept, kept, OK
    inclusive = profile in (SGLANG, SGLANG_TORCH)
    considered = n if inclusive else kept_k if profile == HF else kept
    cut, certain = mass_cut(z, considered, params.top_p, outside, inclusive)
    if cut > considered:
        if not params.by_rank:  # where top-k or min-p bounds the candidates, what they keep is all here
            return 0, 0, 0, INSUFFICIENT
        cut = considered
    if not np.float64(z[cut - 1]) > floor:
        return 0, 0, 0, INSUFFICIENT
    if not certain:
        return 0, 0, 0, UNCERTAIN
    if profile not in (SGLANG, HF):
        stay = min(cut, kept)
        return stay, stay, stay, OK
    tied_end = first_below(z, considered, np.float64(z[cut - 1]))
    if profile == SGLANG:
        stay = min(tied_end, kept)
        return stay, stay, stay, OK
    # hf drops the lowest ids of a tie first
    tied_start = cut - 1
    while tied_start > 0 and z[tied_start - 1] == z[cut - 1]:
        tied_start -= 1
    if tied_start >= kept_min_p:
        return kept_min_p, kept_min_p, kept_min_p, OK
    return tied_start, tied_end - (cut - tied_start), tied_end, OK


@jit
def decide(
    keys: NDArray[np.int64],  # [M, width], sorted; out: ids << 32 | bits of the log-probability, then PADDING
    records: Records,  # [M]
    found: Records,  # [M] of `search.FOUND`, in: of `candidates_numba.select`; out: the draw, and ids in the support
    top_ids: NDArray[np.int32],  # [M, T], out, the first T of the support by (logit descending, id ascending)
    top_s: NDArray[np.float32],  # [M, T], out, their scaled logits
    top_logprobs: NDArray[np.float32],  # [M, T], out
    first: int,
    end: int,
) -> None:
    """Filter and draw, for rows whose status is OK and which have candidates."""
    z_row = np.empty(keys.shape[1], np.float32)
    for m in range(first, end):
        params, row = records[m], found[m]
        n = row.count
        if row.status != OK or n == 0:
            row.count = 0
            keys[m] = PADDING
            continue
        for i in range(n):
            z_row[i] = key_value(keys[m, i])
        while n > 1 and z_row[n - 1] == -np.inf:  # the temperature took them beyond float32
            n -= 1
        z = z_row[:n]
        highest = np.float64(z[0])
        outside = row.outside * math.exp(row.shift - highest) if row.outside > 0 else 0.0
        a, start, stop, row.status = survivors(z, params, outside, row.floor)
        kept = a + stop - start
        total, best, second, winner = 0.0, -np.inf, -np.inf, 0
        for q in range(kept):
            i = q if q < a else start + q - a
            value = np.float64(z[i])
            total += math.exp(value - highest)
            score = value + gumbel(keys[m, i] & 0xFFFFFFFF, params) if kept > 1 else value
            if score > best:
                best, second, winner = score, best, q
            elif score > second:
                second = score
        if kept > 1 and best - second < near(best):
            row.status = UNCERTAIN
        row.count = kept
        log_total = math.log(total) if kept > 0 else 0.0
        for q in range(kept):
            i = q if q < a else start + q - a
            token_id = keys[m, i] & 0xFFFFFFFF
            logprob = np.float32(max(np.float64(z[i]) - highest - log_total, LOWEST))
            if q == winner:
                row.token_id, row.rank, row.token_s, row.token_logprob = token_id, q + 1, z[i], logprob
            if q < top_ids.shape[1]:
                top_ids[m, q], top_s[m, q], top_logprobs[m, q] = token_id, z[i], logprob
            keys[m, q] = (token_id << 32) | (np.int64(np.float32(logprob).view(np.int32)) & 0xFFFFFFFF)
        keys[m, kept:] = PADDING


@jit
def settle(
    z: NDArray[np.float32],  # [M, C], exact logits before temperature
    ids: NDArray[np.int32],  # [M, C]
    records: Records,  # [M]
    found: Records,  # [M] of `search.FOUND`, in: count; in and out: status; out: token_id, token_s
) -> None:
    """Draw among the contenders of each whole row whose status is OK."""
    for m in range(found.size):
        params, row = records[m], found[m]
        if row.status != OK:
            continue
        best, second = -np.inf, -np.inf
        for i in range(row.count):
            scaled = z[m, i] / np.float32(params.temperature)
            if not scaled < np.inf:
                row.status = NOT_FINITE
                break
            score = np.float64(scaled) + gumbel(ids[m, i], params)
            if score > best:
                best, second = score, best
                row.token_id, row.token_s = ids[m, i], scaled
            elif score > second:
                second = score
        if row.status == OK and best - second < near(best):
            row.status = UNCERTAIN


@jit
def run_encode(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`encode` on all rows."""
    on_team(encode, args, cuts, num_threads, team)


@jit
def run_decide(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`decide` on all rows."""
    on_team(decide, args, cuts, num_threads, team)
