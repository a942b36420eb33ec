"""Triton form of `candidates.decide`: filters, normaliser, draw, and the support with its log-probs, in one launch.

One program a row. Nothing is sorted: every filter keeps the ids above some logit, so each is a search for that logit,
by halving an interval of its keys and summing over the row's entries. Rows and cuts are the tuples of
`compaction_triton`; entries are the candidates or, for rows that these are too few for (ALL), all V logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda import draw_table
from keepmask.sampling.cuda.compaction import Cut, Supports
from keepmask.sampling.cuda.compaction_triton import entries, kept, put_support
from keepmask.sampling.cuda.draw_table import Candidates, Draws, DrawTable
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    MINUS_INFINITY_KEY,
    adjacent_columns,
    column,
    gumbel,
    jit,
    least_key_from,
    noise_of,
    value_of_key,
)

__all__ = ["decide", "decide_all"]

SOURCE, TEMPERATURE, GREEDY, TOP_K = (column(name) for name in ("source", "temperature", "greedy", "top_k"))
TOP_P, LOG_MIN_P, PROFILE = (column(name) for name in ("top_p", "log_min_p", "profile"))
BY_RANK, WHOLE = column("by_rank"), column("whole")
MASK_SLOT, LOGPROBS_SLOT = column("mask_slot"), column("logprobs_slot")
OK, TOO_MANY, UNCERTAIN, OUTSIDE = (
    tl.constexpr(code) for code in (draw_table.OK, draw_table.TOO_MANY, draw_table.UNCERTAIN, draw_table.OUTSIDE)
)
VLLM, SGLANG, SGLANG_TORCH, HF = (
    tl.constexpr(code) for code in (draw_table.VLLM, draw_table.SGLANG, draw_table.SGLANG_TORCH, draw_table.HF)
)
BAND = tl.constexpr(draw_table.BAND)
NEAR, RELATIVELY_NEAR = tl.constexpr(draw_table.NEAR), tl.constexpr(draw_table.RELATIVELY_NEAR)

CERTAIN, CLOSE, NOT_REACHED = (tl.constexpr(outcome) for outcome in range(3))
"""How a mass cut went: as it says; some sum may come out either way; the entries do not weigh enough to reach it."""


@jit
def extremes(row: tl.tuple, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tuple:
    """The lowest key above that of -inf, the highest, and how many are above it."""
    none = row[2] * 0
    low, high, possible = none + ABOVE_ALL, none + BELOW_ALL, none
    for start in range(0, row[2], TILE):
        _, key, _ = entries(row, start, ALL, TILE)
        above = key > MINUS_INFINITY_KEY
        low = tl.minimum(low, tl.min(tl.where(above, key, ABOVE_ALL), 0))
        high = tl.maximum(high, tl.max(key, 0))
        possible += tl.sum(above.to(tl.int32), 0)
    return low, high, possible


@jit
def num_from(row: tl.tuple, bound: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """How many keys are at the bound or above."""
    count = row[2] * 0
    for start in range(0, row[2], TILE):
        _, key, _ = entries(row, start, ALL, TILE)
        count += tl.sum((key >= bound).to(tl.int32), 0)
    return count


@jit
def weight_above(
    row: tl.tuple, bound: tl.tensor, highest: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr
) -> tl.tuple:
    """Sum of exp(s - highest) over the keys above the bound, which is that of -inf at least; and the keys next to it:
    the highest that is not above, the lowest that is."""
    weight, below, above = highest * 0.0, row[2] * 0 + BELOW_ALL, row[2] * 0 + ABOVE_ALL
    for start in range(0, row[2], TILE):
        s, key, _ = entries(row, start, ALL, TILE)
        weight += tl.sum(tl.where(key > bound, tl.exp(s.to(tl.float64) - highest), 0.0), 0)
        below = tl.maximum(below, tl.max(tl.where(key > bound, BELOW_ALL, key), 0))
        above = tl.minimum(above, tl.min(tl.where(key > bound, key, ABOVE_ALL), 0))
    return weight, below, above


@jit
def kth_key(
    row: tl.tuple, k: tl.tensor, low: tl.tensor, high: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The k-th highest key, which is in [low, high]."""
    least, most = low, high
    while least < most:
        middle = halfway(least, most)
        count, below, above = row[2] * 0, row[2] * 0 + BELOW_ALL, row[2] * 0 + ABOVE_ALL
        for start in range(0, row[2], TILE):
            _, key, _ = entries(row, start, ALL, TILE)
            count += tl.sum((key > middle).to(tl.int32), 0)
            below = tl.maximum(below, tl.max(tl.where(key > middle, BELOW_ALL, key), 0))
            above = tl.minimum(above, tl.min(tl.where(key > middle, key, ABOVE_ALL), 0))
        least = tl.where(count < k, least, above)
        most = tl.where(count < k, below, most)
    return least


@jit
def mass_key(
    row: tl.tuple,
    threshold: tl.tensor,
    inclusive: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The lowest key with a weight above it of < threshold (<= if inclusive), which is in [low, high]."""
    least, most = low, high
    while least < most:
        middle = halfway(least, most)
        weight, below, above = weight_above(row, middle, highest, ALL, TILE)
        short = (weight < threshold) | (inclusive & (weight == threshold))
        least = tl.where(short, least, above)
        most = tl.where(short, below, most)
    return least


@jit
def halfway(least: tl.tensor, most: tl.tensor) -> tl.tensor:
    """The middle of two keys, rounded down."""
    return ((least.to(tl.int64) + most) >> 1).to(tl.int32)


@jit
def tied_id(row: tl.tuple, tied: tl.tensor, rank: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The rank-th id, from 1, of those with this key."""
    before, found = row[2] * 0, row[2] * 0
    for start in range(0, row[2], TILE):
        _, key, ids = entries(row, start, ALL, TILE)
        hits = (key == tied).to(tl.int32)
        here = (hits == 1) & (before + tl.cumsum(hits, 0) == rank)
        found += tl.sum(tl.where(here, ids, 0), 0)
        before += tl.sum(hits, 0)
    return found


@jit
def mass_cut(
    row: tl.tuple,
    profile: tl.tensor,
    top_p: tl.tensor,
    considered: tl.tensor,
    num_dropped: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    outside: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """The cut by mass among the keys >= considered, and how it went.

    num_dropped: how many of the ids at that very key, the highest ones, top-k has dropped.
    """
    ties_stay = profile == SGLANG
    inclusive = ties_stay | (profile == SGLANG_TORCH)
    inside, _, lowest = weight_above(row, considered - 1, highest, ALL, TILE)
    inside -= num_dropped.to(tl.float64) * tl.exp(value_of_key(considered).to(tl.float64) - highest)
    total = inside + outside
    threshold = top_p * total
    first, last, bound = row[2] * 0, row[2] * 0 + ABOVE_ALL, considered
    outcome = row[2] * 0 + NOT_REACHED
    if (inside > threshold) | ((inside == threshold) & (inclusive == 0)):
        bound = mass_key(row, threshold, inclusive, lowest, high, highest, ALL, TILE)
        above, _, _ = weight_above(row, bound, highest, ALL, TILE)
        num_tied = num_from(row, bound, ALL, TILE) - num_from(row, bound + 1, ALL, TILE)
        num_tied -= tl.where(bound == considered, num_dropped, 0)
        weight = tl.exp(value_of_key(bound).to(tl.float64) - highest)
        # Equal logits alone have weights of 1, and sums without rounding. hf counts them from the other end.
        flat = (bound == high) & (outside == 0) & (num_tied + num_dropped == num_from(row, considered, ALL, TILE))
        # Of tied ids one stays while the weight before it is short of the threshold; in sglang all do.
        room = (threshold - above) / weight
        staying = tl.minimum(tl.where(inclusive, tl.floor(room) + 1, tl.ceil(room)), num_tied.to(tl.float64))
        staying = tl.where(flat & (profile == HF), total - tl.floor((1.0 - top_p) * total), staying)
        num_staying = tl.where(ties_stay, num_tied, tl.maximum(staying.to(tl.int32), 1))
        before_next = above + num_staying.to(tl.float64) * weight
        before_last = tl.where(ties_stay, above, before_next - weight)
        always_stays = (bound == high) & (ties_stay | (num_staying == 1))
        close = tl.abs(before_next - threshold) <= BAND * total
        close = close | ((tl.abs(before_last - threshold) <= BAND * total) & (always_stays == 0))
        outcome = tl.where(close & (flat == 0), CLOSE, CERTAIN)
        if num_staying < num_tied:
            if profile == HF:  # drops the lowest ids of a tie first
                first = tied_id(row, bound, num_tied - num_staying + 1, ALL, TILE)
            else:
                last = tied_id(row, bound, num_staying, ALL, TILE)
    return bound, first, last, outcome


@jit
def filtered(
    row: tl.tuple,
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    M: tl.tensor,
    m: tl.tensor,
    highest: tl.tensor,
    outside: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """The cut of row m by its filters: bound, first, last; and the outcome of the mass cut in it."""
    low, high, num = extremes(row, ALL, TILE)
    bound, first, last, outcome = low, row[2] * 0, row[2] * 0 + ABOVE_ALL, row[2] * 0 + CERTAIN
    if tl.load(ints_ptr + GREEDY * M + m) != 0:
        bound = high
        first = tied_id(row, high, row[2] * 0 + 1, ALL, TILE)
        last = first
    else:
        if tl.load(ints_ptr + WHOLE * M + m) == 0:
            profile, top_k = tl.load(ints_ptr + PROFILE * M + m), tl.load(ints_ptr + TOP_K * M + m)
            top_p = tl.load(floats_ptr + TOP_P * M + m)
            inclusive = (profile == SGLANG) | (profile == SGLANG_TORCH)
            at_k, num_dropped = low, row[2] * 0
            if top_k < num:
                at_k = kth_key(row, top_k, low, high, ALL, TILE)
                if (profile == VLLM) | (profile == SGLANG_TORCH):  # exactly k stay
                    num_dropped += num_from(row, at_k, ALL, TILE) - top_k.to(tl.int32)
            bound = tl.maximum(at_k, least_key_from(highest + tl.load(floats_ptr + LOG_MIN_P * M + m)))
            num_dropped = tl.where(bound == at_k, num_dropped, 0)
            if num_dropped > 0:
                num_above = num_from(row, at_k + 1, ALL, TILE)
                last = tied_id(row, at_k, top_k.to(tl.int32) - num_above, ALL, TILE)
            if top_p < 1:
                considered = tl.where(inclusive, low, tl.where(profile == HF, at_k, bound))
                num_dropped = tl.where(inclusive, 0, num_dropped)
                cut, from_id, to_id, outcome = mass_cut(
                    row, profile, top_p, considered, num_dropped, high, highest, outside, ALL, TILE
                )
                if cut >= bound:
                    last = tl.where(cut == bound, tl.minimum(last, to_id), to_id)
                    bound = cut
                    first = from_id
    return bound, first, last, outcome


@jit
def draw(
    row: tl.tuple, cut: tl.tuple, highest: tl.tensor, noise: tl.tuple, ALL: tl.constexpr, TILE: tl.constexpr
) -> tl.tuple:
    """Number and weight of what is kept, and of those the id with the highest s + noise, its score, and the second."""
    count, weight, token_id = row[2] * 0, highest * 0.0, row[2] * 0 - 1
    best, second = highest * 0.0 + float("-inf"), highest * 0.0 + float("-inf")
    for start in range(0, row[2], TILE):
        s, key, ids = entries(row, start, ALL, TILE)
        keep = kept(key, ids, cut)
        num_kept = tl.sum(keep.to(tl.int32), 0)
        if num_kept > 0:
            count += num_kept
            weight += tl.sum(tl.where(keep, tl.exp(s.to(tl.float64) - highest), 0.0), 0)
            score = tl.where(keep, s.to(tl.float64) + gumbel(ids, noise), float("-inf"))
            here = tl.max(score, 0)
            winner = tl.min(tl.where(keep & (score == here), ids, ABOVE_ALL), 0)
            next_best = tl.max(tl.where(ids == winner, float("-inf"), score), 0)
            if here > best:
                second = tl.maximum(best, next_best)
                best = here
                token_id = winner
            else:
                second = tl.maximum(second, here)
    return count, weight, token_id, best, second


@jit
def place_of(token_id: tl.tensor, row: tl.tuple, cut: tl.tuple, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tuple:
    """Whether the id is kept, its key, and its rank from 1 by (key descending, id ascending) among what is kept."""
    inside, token_key, before = row[2] * 0, row[2] * 0 + BELOW_ALL, row[2] * 0
    for start in range(0, row[2], TILE):
        _, key, ids = entries(row, start, ALL, TILE)
        found = kept(key, ids, cut) & (ids == token_id)
        inside += tl.sum(found.to(tl.int32), 0)
        token_key = tl.maximum(token_key, tl.max(tl.where(found, key, BELOW_ALL), 0))
    for start in range(0, row[2], TILE):
        _, key, ids = entries(row, start, ALL, TILE)
        ahead = (key > token_key) | ((key == token_key) & (ids < token_id))
        before += tl.sum((kept(key, ids, cut) & ahead).to(tl.int32), 0)
    return inside, token_key, before + 1


@jit
def decide_rows(
    z_ptr: tl.tensor,  # [M, C] float32, candidates; or [R, V], logits
    stride: tl.tensor,
    ids_ptr: tl.tensor,  # [M, C] int32
    num_ptr: tl.tensor,  # [M] int32, how many candidates
    sums_ptr: tl.tensor,  # [3, M] float64, of `Candidates`
    num_possible_ptr: tl.tensor,  # [M] int32
    ints_ptr: tl.tensor,  # [columns, M] int64, the table
    floats_ptr: tl.tensor,  # the same bits as float64
    M: tl.tensor,
    V: tl.tensor,
    status_ptr: tl.tensor,  # [M] int32, in and out
    bound_ptr: tl.tensor,  # [M] float32, out: a Cut
    first_ptr: tl.tensor,  # [M] int32, out
    last_ptr: tl.tensor,  # [M] int32, out
    highest_ptr: tl.tensor,  # [M] float64, out
    log_weight_ptr: tl.tensor,  # [M] float64, out
    token_ptr: tl.tensor,  # [M] int64, out: `Draws`
    counts_ptr: tl.tensor,  # [M] int32, out
    over_all_ptr: tl.tensor,  # [M] int32, out
    token_s_ptr: tl.tensor,  # [M] float32, out
    token_logprob_ptr: tl.tensor,  # [M] float32, out
    rank_ptr: tl.tensor,  # [M] int32, out
    support_ids_ptr: tl.tensor,  # [R1, width] int32, out: `Supports`
    support_logprobs_ptr: tl.tensor,  # [R2, width] float32, out
    width: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Filter and draw in one row."""
    m = tl.program_id(0)
    status = tl.load(status_ptr + m)
    n = V
    highest = tl.load(sums_ptr + m)
    outside = highest * 0.0
    if ALL:
        if status != TOO_MANY:
            return
        z_ptr += tl.load(ints_ptr + SOURCE * M + m) * stride
    else:
        tl.store(token_ptr + m, tl.full((), -1, tl.int64))
        tl.store(counts_ptr + m, 0)
        tl.store(over_all_ptr + m, 0)
        if status != OK:
            return
        z_ptr += m * stride
        ids_ptr += m * stride
        n = tl.load(num_ptr + m)
        outside = tl.maximum(tl.load(sums_ptr + M + m) - tl.load(sums_ptr + 2 * M + m), 0.0)
    row = (z_ptr, ids_ptr, n, tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32))
    whole = tl.load(ints_ptr + WHOLE * M + m)

    bound, first, last, outcome = filtered(row, ints_ptr, floats_ptr, M, m, highest, outside, ALL, TILE)
    cut = (bound, first, last)
    count, weight, token_id, best, second = draw(row, cut, highest, noise_of(ints_ptr, M, m), ALL, TILE)
    inside, token_key, rank = place_of(token_id, row, cut, ALL, TILE)
    token_s, bound_s = value_of_key(token_key), value_of_key(bound)
    over_all = n * 0
    if ALL:
        over_all += 1
    else:
        if whole != 0:  # the contenders are not all that could be drawn
            count = tl.load(num_possible_ptr + m)
            weight = tl.load(sums_ptr + M + m)
            over_all += (count < V).to(tl.int32)
            bound_s = tl.full((), float("-inf"), tl.float32)
            first, last = first * 0 + 1, last * 0
    log_weight = tl.log(weight)

    status = tl.where(best - second < NEAR + tl.abs(best) * RELATIVELY_NEAR, UNCERTAIN, OK)
    status = tl.where(outcome == CLOSE, UNCERTAIN, tl.where(inside == 1, status, OUTSIDE))
    if not ALL:
        too_few = (outcome == NOT_REACHED) & (tl.load(ints_ptr + BY_RANK * M + m) == 0)
        too_many = (count > width) & (whole == 0)
        status = tl.where(too_few | too_many, TOO_MANY, status)
    tl.store(status_ptr + m, status)
    tl.store(bound_ptr + m, bound_s)
    tl.store(first_ptr + m, first)
    tl.store(last_ptr + m, last)
    tl.store(highest_ptr + m, highest)
    tl.store(log_weight_ptr + m, log_weight)
    tl.store(token_ptr + m, token_id.to(tl.int64))
    tl.store(counts_ptr + m, tl.where(count == V, 0, count))
    tl.store(over_all_ptr + m, over_all)
    tl.store(token_s_ptr + m, token_s)
    tl.store(token_logprob_ptr + m, (token_s.to(tl.float64) - highest - log_weight).to(tl.float32))
    tl.store(rank_ptr + m, rank)
    if not ALL:
        slot = tl.load(ints_ptr + MASK_SLOT * M + m)
        if (slot >= 0) & (whole == 0) & (status == OK):
            logprobs_slot = tl.load(ints_ptr + LOGPROBS_SLOT * M + m)
            out = (support_ids_ptr, support_logprobs_ptr, width, slot, logprobs_slot)
            put_support(row, cut, (highest, log_weight), out, ALL, TILE)


def decide(found: Candidates, table: DrawTable, V: int, out: Supports) -> tuple[Draws, Cut]:
    """`candidates.decide`."""
    draws, cut = Draws.empty(table.num_rows, found.z.device), Cut.empty(table.num_rows, found.z.device)
    _launch(found.z, found, table, V, draws, cut, out, ALL=False, TILE=512, num_warps=4)
    return draws, cut


def decide_all(logits: Tensor, found: Candidates, table: DrawTable, draws: Draws, cut: Cut, out: Supports) -> None:
    """`candidates.decide_all`."""
    assert adjacent_columns(logits)
    tile = min(4096, max(64, triton.next_power_of_2(logits.shape[1])))
    _launch(logits, found, table, logits.shape[1], draws, cut, out, ALL=True, TILE=tile, num_warps=16)


def _launch(
    z: Tensor, found: Candidates, table: DrawTable, V: int, draws: Draws, cut: Cut, out: Supports, **meta: int
) -> None:
    rows = (z, z.stride(0), found.ids, found.counts, found.sums, found.num_possible, table.ints, table.floats)
    supports = (out.ids, out.logprobs, out.ids.shape[1])
    decide_rows[(table.num_rows,)](
        *rows, table.num_rows, V, found.status, *cut, *draws, *supports, **meta, enable_fp_fusion=False
    )
