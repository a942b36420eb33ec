"""`decide`: filters, normaliser and draw, in one launch.

One program a row. Nothing is sorted: every filter keeps the ids above some logit, so each is a search for that logit,
by halving an interval of its keys and summing over the row's entries. Rows and cuts are the tuples of `ops_triton`;
entries are the candidates or, for rows that these are too few for (ALL), all V logits.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from keepmask.sampling import records as codes
from keepmask.sampling.cuda.draw_records import Candidates
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    DRAW_WORDS,
    MINUS_INFINITY_KEY,
    RECORD_WORDS,
    adjacent_columns,
    draw_field,
    entries,
    field,
    gumbel,
    jit,
    kept,
    launch_tile,
    least_key_from,
    noise_of,
    order_key,
    real,
    value_of_key,
    word,
)

__all__ = ["decide", "decide_all"]

SOURCE, TEMPERATURE, GREEDY, TOP_K = (field(name) for name in ("source", "temperature", "greedy", "top_k"))
TOP_P, LOG_MIN_P, PROFILE = (field(name) for name in ("top_p", "log_min_p", "profile"))
BY_RANK, WHOLE = field("by_rank"), field("whole")
STATUS, NUM_CANDIDATES, NUM_POSSIBLE = (draw_field(name) for name in ("status", "num_candidates", "num_possible"))
HIGHEST, TOTAL, WEIGHT, LOG_WEIGHT = (draw_field(name) for name in ("highest", "total", "weight", "log_weight"))
TOKEN_ID, TOKEN_S, TOKEN_LOGPROB = (draw_field("token_" + name) for name in ("id", "s", "logprob"))
COUNT, OVER_ALL, RANK = (draw_field(name) for name in ("count", "over_all", "rank"))
BOUND, FIRST, LAST = (draw_field(name) for name in ("bound", "first", "last"))
OK, TOO_MANY = tl.constexpr(codes.OK), tl.constexpr(codes.TOO_MANY)
UNCERTAIN, OUTSIDE = tl.constexpr(codes.UNCERTAIN), tl.constexpr(codes.OUTSIDE)
VLLM, HF = tl.constexpr(codes.VLLM), tl.constexpr(codes.HF)
SGLANG, SGLANG_TORCH = tl.constexpr(codes.SGLANG), tl.constexpr(codes.SGLANG_TORCH)
BAND = tl.constexpr(codes.BAND)
NEAR, RELATIVELY_NEAR = tl.constexpr(codes.NEAR), tl.constexpr(codes.RELATIVELY_NEAR)

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
    highest: tl.tensor,
    outside: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """The cut by mass among the keys >= considered, and how it went.

    num_dropped: how many of the ids at that very key, the highest ones, top-k has dropped.
    """
    high = order_key(highest.to(tl.float32))
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
    params_ptr: tl.tensor,
    highest: tl.tensor,
    outside: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """The cut of a row by its filters: bound, first, last; and the outcome of the mass cut in it."""
    low, high, num = extremes(row, ALL, TILE)
    bound, first, last, outcome = low, row[2] * 0, row[2] * 0 + ABOVE_ALL, row[2] * 0 + CERTAIN
    if tl.load(params_ptr + GREEDY) != 0:
        bound = high
        first = tied_id(row, high, row[2] * 0 + 1, ALL, TILE)
        last = first
    else:
        if tl.load(params_ptr + WHOLE) == 0:
            profile, top_k = tl.load(params_ptr + PROFILE), tl.load(params_ptr + TOP_K)
            top_p = real(tl.load(params_ptr + TOP_P))
            inclusive = (profile == SGLANG) | (profile == SGLANG_TORCH)
            at_k, num_dropped = low, row[2] * 0
            if top_k < num:
                at_k = kth_key(row, top_k, low, high, ALL, TILE)
                if (profile == VLLM) | (profile == SGLANG_TORCH):  # exactly k stay
                    num_dropped += num_from(row, at_k, ALL, TILE) - top_k.to(tl.int32)
            bound = tl.maximum(at_k, least_key_from(highest + real(tl.load(params_ptr + LOG_MIN_P))))
            num_dropped = tl.where(bound == at_k, num_dropped, 0)
            if num_dropped > 0:
                num_above = num_from(row, at_k + 1, ALL, TILE)
                last = tied_id(row, at_k, top_k.to(tl.int32) - num_above, ALL, TILE)
            if top_p < 1:
                considered = tl.where(inclusive, low, tl.where(profile == HF, at_k, bound))
                num_dropped = tl.where(inclusive, 0, num_dropped)
                cut, from_id, to_id, outcome = mass_cut(
                    row, profile, top_p, considered, num_dropped, highest, outside, ALL, TILE
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
def put_draw(draw_ptr: tl.tensor, cut: tl.tuple, token: tl.tuple, highest: tl.tensor, log_weight: tl.tensor) -> None:
    """Store a cut, as s and ids; and a token: its id, s and rank."""
    tl.store(draw_ptr + BOUND, word(cut[0]))
    tl.store(draw_ptr + FIRST, cut[1].to(tl.int64))
    tl.store(draw_ptr + LAST, cut[2].to(tl.int64))
    tl.store(draw_ptr + LOG_WEIGHT, word(log_weight))
    tl.store(draw_ptr + TOKEN_ID, token[0].to(tl.int64))
    tl.store(draw_ptr + TOKEN_S, word(token[1]))
    tl.store(draw_ptr + TOKEN_LOGPROB, word(token[1].to(tl.float64) - highest - log_weight))
    tl.store(draw_ptr + RANK, token[2].to(tl.int64))


@jit
def decide_rows(
    z_ptr: tl.tensor,  # [M, C] float32, candidates; or [R, V], logits
    stride: tl.tensor,
    ids_ptr: tl.tensor,  # [M, C] int32
    V: tl.tensor,
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    draws_ptr: tl.tensor,  # [M, fields] int64, of `DRAW`, in: the fields of selection; out: the others, and the status
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Filter and draw in one row."""
    m = tl.program_id(0)
    params_ptr, draw_ptr = records_ptr + m * RECORD_WORDS, draws_ptr + m * DRAW_WORDS
    status = tl.load(draw_ptr + STATUS)
    n = V
    highest = real(tl.load(draw_ptr + HIGHEST))
    outside = highest * 0.0
    if ALL:
        if status != TOO_MANY:
            return
        z_ptr += tl.load(params_ptr + SOURCE) * stride
    else:
        tl.store(draw_ptr + TOKEN_ID, tl.full((), -1, tl.int64))
        tl.store(draw_ptr + COUNT, tl.full((), 0, tl.int64))
        tl.store(draw_ptr + OVER_ALL, tl.full((), 0, tl.int64))
        if status != OK:
            return
        z_ptr += m * stride
        ids_ptr += m * stride
        n = tl.load(draw_ptr + NUM_CANDIDATES).to(tl.int32)
        outside = tl.maximum(real(tl.load(draw_ptr + TOTAL)) - real(tl.load(draw_ptr + WEIGHT)), 0.0)
    row = (z_ptr, ids_ptr, n, real(tl.load(params_ptr + TEMPERATURE)).to(tl.float32))
    whole = tl.load(params_ptr + WHOLE)

    bound, first, last, outcome = filtered(row, params_ptr, highest, outside, ALL, TILE)
    cut = (bound, first, last)
    count, weight, token_id, best, second = draw(row, cut, highest, noise_of(params_ptr), ALL, TILE)
    inside, token_key, rank = place_of(token_id, row, cut, ALL, TILE)
    token_s, bound_s = value_of_key(token_key), value_of_key(bound)
    over_all = n * 0
    if ALL:
        over_all += 1
    else:
        if whole != 0:  # the contenders are not all that could be drawn
            count = tl.load(draw_ptr + NUM_POSSIBLE).to(tl.int32)
            weight = real(tl.load(draw_ptr + TOTAL))
            over_all += (count < V).to(tl.int32)
            bound_s = tl.full((), float("-inf"), tl.float32)
            first, last = first * 0 + 1, last * 0
    log_weight = tl.log(weight)

    status = tl.where(best - second < NEAR + tl.abs(best) * RELATIVELY_NEAR, UNCERTAIN, OK)
    status = tl.where(outcome == CLOSE, UNCERTAIN, tl.where(inside == 1, status, OUTSIDE))
    if not ALL:
        too_few = (outcome == NOT_REACHED) & (tl.load(params_ptr + BY_RANK) == 0)
        status = tl.where(too_few, TOO_MANY, status)
    tl.store(draw_ptr + STATUS, status.to(tl.int64))
    tl.store(draw_ptr + COUNT, tl.where(count == V, 0, count).to(tl.int64))
    tl.store(draw_ptr + OVER_ALL, over_all.to(tl.int64))
    put_draw(draw_ptr, (bound_s, first, last), (token_id, token_s, rank), highest, log_weight)


def decide(found: Candidates, records: Tensor, V: int) -> None:
    """Filter the candidates of each row by its profile and draw one: the fields of `DRAW` behind those of selection.

    For rows whose status is OK, with the filters of `keepmask.sampling.semantics` over all ids, of which the weight
    that is not among the candidates lies below them: token = argmax of s + noise over the support, ties to the lowest
    id; log-probabilities are a log-softmax of s over the support. Changes the status: TOO_MANY where the candidates do
    not reach the mass cut; UNCERTAIN where sums or scores are too close to tell; OUTSIDE where the token is not kept.
    """
    meta = {"ALL": False, "TILE": 512, "num_warps": 4, "enable_fp_fusion": False}
    decide_rows[(records.shape[0],)](found.z, found.z.stride(0), found.ids, V, records, found.draws, **meta)


def decide_all(logits: Tensor, found: Candidates, records: Tensor) -> None:
    """`decide` for the rows whose status is TOO_MANY, with all ids as their candidates."""
    assert adjacent_columns(logits)
    V = logits.shape[1]
    meta = {"ALL": True, "TILE": launch_tile(V), "num_warps": 16, "enable_fp_fusion": False}
    decide_rows[(records.shape[0],)](logits, logits.stride(0), found.ids, V, records, found.draws, **meta)
