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
from keepmask.sampling.cpu.rows_numba import NOT_FINITE, OK, order_key, value_of_key

__all__ = ["INSUFFICIENT", "PADDING", "UNCERTAIN", "decide", "encode", "run_decide", "run_encode", "settle"]

UNCERTAIN, INSUFFICIENT = 4, 5
"""Status of a row: a decision is too close; candidates are missing. The others are those of `rows_numba`."""

PADDING = np.int64(2**63 - 1)
"""A key after all others."""

BAND = 1e-9
"""Sums of weights closer than this, relative to the whole, may compare either way. Adding 2**18 weights in any order is
off by 3e-11 at most."""

VLLM, SGLANG, HF = 0, 1, 2


@jit
def encode(
    z: NDArray[np.float32],  # [M, C], logits before temperature
    ids: NDArray[np.int32],  # [M, C]
    counts: NDArray[np.int64],  # [M]
    items: NDArray[np.int64],  # [M], the entry of the parameters of each row
    temperature: NDArray[np.float32],  # [B]
    width: int,
    keys: NDArray[np.int64],  # [M, C], out
    status: NDArray[np.int64],  # [M], in and out
    first: int,
    end: int,
) -> None:
    """keys[:, :width]: integers that ascend as (z / temperature descending, id ascending), then `PADDING`."""
    for m in range(first, end):
        t = temperature[items[m]]
        for i in range(counts[m]):
            scaled = z[m, i] / t
            if not scaled < np.inf:
                status[m] = NOT_FINITE
                break
            # -0 becomes 0, its equal; -inf stays the lowest
            keys[m, i] = (np.int64(~order_key(scaled if scaled != 0 else np.float32(0))) << 32) | np.int64(ids[m, i])
        keys[m, counts[m] : width] = PADDING


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
def survivors(
    z: NDArray[np.float32],  # [n], sorted descending, > -inf
    profile: int,
    greedy: bool,
    top_k: int,
    top_p: float,
    log_min_p: float,
    outside: float,
    floor: float,
    closed_by_rank: bool,
) -> tuple[int, int, int, int]:
    """The filters: entries [0, a) and [b, c) stay. Returns a, b, c and a status.

    closed_by_rank: every id that top-k or min-p keeps is here, so the mass cut may lie beyond the entries.
    """
    n = z.size
    if greedy:
        return 1, 1, 1, OK
    kept_k = first_below(z, n, np.float64(z[top_k - 1])) if top_k <= n else n
    kept_min_p = first_below(z, n, np.float64(z[0]) + log_min_p)
    kept = min(kept_k, kept_min_p)
    if top_p >= 1:
        return kept, kept, kept, OK
    considered = kept if profile == VLLM else kept_k if profile == HF else n
    cut, certain = mass_cut(z, considered, top_p, outside, profile == SGLANG)
    if cut > considered:
        if not closed_by_rank:
            return 0, 0, 0, INSUFFICIENT
        cut = considered
    if not np.float64(z[cut - 1]) > floor:
        return 0, 0, 0, INSUFFICIENT
    if not certain:
        return 0, 0, 0, UNCERTAIN
    if profile == VLLM:
        return cut, cut, cut, OK
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
    keys: NDArray[np.int64],  # [M, C], sorted; out: ids << 32 | bits of the log-probability, then PADDING
    counts: NDArray[np.int64],  # [M], in: candidates; out: ids in the support
    width: int,
    items: NDArray[np.int64],  # [M], the entry of the parameters of each row
    profile: NDArray[np.int64],  # [B]
    greedy: NDArray[np.bool_],  # [B]
    top_k: NDArray[np.int64],  # [B], above V where off
    top_p: NDArray[np.float64],  # [B]
    log_min_p: NDArray[np.float64],  # [B]
    by_rank: NDArray[np.bool_],  # [B], whether top-k or min-p bounded the candidates
    positions: NDArray[np.int64],  # [B]
    completions: NDArray[np.int64],  # [B]
    seeds: NDArray[np.int64],  # [B]
    sums: NDArray[np.float64],  # [M, 3]: outside, shift, floor of `candidates_numba.select`
    status: NDArray[np.int64],  # [M], in and out
    token_ids: NDArray[np.int64],  # [M], out
    ranks: NDArray[np.int64],  # [M], out, of the token within its support
    top_ids: NDArray[np.int32],  # [M, T], out, the first T of the support by (logit descending, id ascending)
    top_z: NDArray[np.float32],  # [M, T], out, their scaled logits
    top_logprobs: NDArray[np.float32],  # [M, T], out
    drawn: NDArray[np.float32],  # [M, 2], out: scaled logit and log-probability of the token
    first: int,
    end: int,
) -> None:
    """Filter and draw, for rows whose status is OK and which have candidates."""
    z_row = np.empty(width, np.float32)
    for m in range(first, end):
        n = counts[m]
        if status[m] != OK or n == 0:
            counts[m] = 0
            keys[m, :width] = PADDING
            continue
        b = items[m]
        z = z_row[:n]
        for i in range(n):
            z[i] = key_value(keys[m, i])
        while n > 1 and z[n - 1] == -np.inf:  # the temperature took them beyond float32
            n -= 1
        z = z[:n]
        highest = np.float64(z[0])
        outside = sums[m, 0] * math.exp(sums[m, 1] - highest) if sums[m, 0] > 0 else 0.0
        a, start, stop, status[m] = survivors(
            z, profile[b], greedy[b], top_k[b], top_p[b], log_min_p[b], outside, sums[m, 2], by_rank[b]
        )
        kept = a + stop - start
        total, best, second, winner = 0.0, -np.inf, -np.inf, 0
        for q in range(kept):
            i = q if q < a else start + q - a
            value, token_id = np.float64(z[i]), keys[m, i] & 0xFFFFFFFF
            total += math.exp(value - highest)
            score = value + gumbel(token_id, positions[b], completions[b], seeds[b]) if kept > 1 else value
            if score > best:
                best, second, winner = score, best, q
            elif score > second:
                second = score
        if kept > 1 and best - second < near(best):
            status[m] = UNCERTAIN
        counts[m] = kept
        log_total = math.log(total) if kept > 0 else 0.0
        for q in range(kept):
            i = q if q < a else start + q - a
            token_id = keys[m, i] & 0xFFFFFFFF
            logprob = np.float32(np.float64(z[i]) - highest - log_total)
            if q == winner:
                token_ids[m], ranks[m], drawn[m, 0], drawn[m, 1] = token_id, q + 1, z[i], logprob
            if q < top_ids.shape[1]:
                top_ids[m, q], top_z[m, q], top_logprobs[m, q] = token_id, z[i], logprob
            keys[m, q] = (token_id << 32) | (np.int64(np.float32(logprob).view(np.int32)) & 0xFFFFFFFF)
        keys[m, kept:width] = PADDING


@jit
def settle(
    z: NDArray[np.float32],  # [M, C], exact logits before temperature
    ids: NDArray[np.int32],  # [M, C]
    counts: NDArray[np.int64],  # [M]
    items: NDArray[np.int64],  # [M]
    temperature: NDArray[np.float32],  # [B]
    positions: NDArray[np.int64],  # [B]
    completions: NDArray[np.int64],  # [B]
    seeds: NDArray[np.int64],  # [B]
    status: NDArray[np.int64],  # [M], in and out
    token_ids: NDArray[np.int64],  # [M], out
    drawn: NDArray[np.float32],  # [M], out, the token's exact logit before temperature
    first: int,
    end: int,
) -> None:
    """Draw among the contenders of each whole row whose status is OK."""
    for m in range(first, end):
        if status[m] != OK:
            continue
        b = items[m]
        best, second = -np.inf, -np.inf
        for i in range(counts[m]):
            scaled = z[m, i] / temperature[b]
            if not scaled < np.inf:
                status[m] = NOT_FINITE
                break
            score = np.float64(scaled) + gumbel(ids[m, i], positions[b], completions[b], seeds[b])
            if score > best:
                best, second = score, best
                token_ids[m], drawn[m] = ids[m, i], z[m, i]
            elif score > second:
                second = score
        if status[m] == OK and best - second < near(best):
            status[m] = UNCERTAIN


@jit
def run_encode(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`encode` on all rows."""
    on_team(encode, args, cuts, num_threads, team)


@jit
def run_decide(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    """`decide` on all rows."""
    on_team(decide, args, cuts, num_threads, team)
