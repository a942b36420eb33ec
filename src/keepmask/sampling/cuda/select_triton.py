"""`select`: the ids that a row's filters may keep. One pass over the logits, then one over its maxima.

`scan` reads every logit once, one program a tile of a row, and leaves the maxima of up to 4096 groups of ids.
`collect`, one program a row, finds a bound among the maxima and gathers the ids that reach it. Ids come out ascending.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling import records as codes
from keepmask.sampling.cuda import draw_records
from keepmask.sampling.cuda.draw_records import Candidates
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    DRAW_WORDS,
    INFINITY_KEY,
    MINUS_INFINITY_KEY,
    RECORD_WORDS,
    adjacent_columns,
    draw_field,
    field,
    jit,
    launch_tile,
    least_key_from,
    noise_of,
    order_key,
    real,
    scaled,
    score_bounds,
    value_of_key,
    word,
)

__all__ = ["select"]

FIRST_GROUPS = tl.constexpr(32)
"""Groups whose maxima bound the first try of a mass cut; each further try takes twice as many."""
STEP, RELATIVE_STEP = tl.constexpr(0.5), tl.constexpr(2.0**-12)
"""Where that takes most groups, how far further tries lower the bound, in nats and by its own size."""
REACHED = tl.constexpr(draw_records.REACHED)
MIN_GROUP, MAX_GROUPS, COLLECTED_AT_ONCE = 4, 4096, 1024

SOURCE, TEMPERATURE, WHOLE, WEIGHS = (field(name) for name in ("source", "temperature", "whole", "weighs"))
SELECT_K, SELECT_LOG_MIN_P, SELECT_TOP_P = (field("select_" + name) for name in ("k", "log_min_p", "top_p"))
OK, NOT_FINITE, EMPTY, TOO_MANY = (
    tl.constexpr(code) for code in (codes.OK, codes.NOT_FINITE, codes.EMPTY, codes.TOO_MANY)
)
STATUS, NUM_CANDIDATES, NUM_POSSIBLE = (draw_field(name) for name in ("status", "num_candidates", "num_possible"))
HIGHEST, TOTAL, WEIGHT = (draw_field(name) for name in ("highest", "total", "weight"))

TOP, LOW, POSSIBLE, TILE_WEIGHT, SCORE, TILE_FIELDS = (tl.constexpr(place) for place in range(6))
"""What `scan` leaves of each tile, in words: its highest and lowest key; how many logits are above -inf; the sum of
exp(s - the tile's highest), where the row weighs; the highest lower score, in whole rows."""


@jit
def scan(
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    V: tl.tensor,
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    num_groups: tl.tensor,
    num_tiles: tl.tensor,
    reach_ptr: tl.tensor,  # [M, num_groups] int32, out: highest keys, or upper scores in whole rows
    tiles_ptr: tl.tensor,  # [M, TILE_FIELDS, num_tiles] int64, out
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Maxima and sums of one tile of one row."""
    tile, m = tl.program_id(0), tl.program_id(1)
    params_ptr = records_ptr + m * RECORD_WORDS
    temperature = real(tl.load(params_ptr + TEMPERATURE)).to(tl.float32)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = tl.load(logits_ptr + tl.load(params_ptr + SOURCE) * stride + ids, mask=ids < V, other=float("-inf"))
    s = scaled(z, temperature)
    key = order_key(s)
    top = tl.max(tl.max(key, 1), 0)
    out = tiles_ptr + m * TILE_FIELDS * num_tiles + tile
    tl.store(out + TOP * num_tiles, top.to(tl.int64))
    tl.store(out + LOW * num_tiles, tl.min(tl.min(tl.where(ids < V, key, ABOVE_ALL), 1), 0).to(tl.int64))
    possible = tl.sum(tl.sum((key > MINUS_INFINITY_KEY).to(tl.int32), 1), 0)
    tl.store(out + POSSIBLE * num_tiles, possible.to(tl.int64))
    reach = key
    if tl.load(params_ptr + WHOLE) != 0:
        below, above = score_bounds(s, ids, noise_of(params_ptr))
        reach = order_key(above)
        tl.store(out + SCORE * num_tiles, word(tl.max(tl.max(below, 1), 0)))
    tl.store(reach_ptr + m * num_groups + group, tl.max(reach, 1), mask=group < num_groups)
    if tl.load(params_ptr + WEIGHS) != 0:
        highest = value_of_key(top).to(tl.float64)
        weights = tl.where(key > MINUS_INFINITY_KEY, tl.exp(s.to(tl.float64) - highest), 0.0)
        tl.store(out + TILE_WEIGHT * num_tiles, word(tl.sum(tl.sum(weights, 1), 0)))


@jit
def kth_reach(
    reach_ptr: tl.tensor, num_groups: tl.tensor, k: tl.tensor, low: tl.tensor, high: tl.tensor, GROUPS: tl.constexpr
) -> tl.tensor:
    """A key that at least k of the maxima reach, and an eighth more at most unless they are equal; k <= num_groups."""
    least, most = low, high
    while least < most:
        middle = ((least.to(tl.int64) + most + 1) >> 1).to(tl.int32)
        count = 0
        for start in range(0, num_groups, GROUPS):
            g = start + tl.arange(0, GROUPS)
            reach = tl.load(reach_ptr + g, mask=g < num_groups, other=BELOW_ALL)
            count += tl.sum((reach >= middle).to(tl.int32), 0)
        if count < k:
            most = middle - 1
        else:
            least = middle
            if count <= k + k // 8:
                most = middle
    return least


@jit
def reaching_groups(
    reach_ptr: tl.tensor, num_groups: tl.tensor, bound: tl.tensor, list_ptr: tl.tensor, GROUPS: tl.constexpr
) -> tl.tensor:
    """Put the numbers of the groups that reach the bound into the list, ascending; how many there are."""
    count = 0
    for start in range(0, num_groups, GROUPS):
        g = start + tl.arange(0, GROUPS)
        reaches = (g < num_groups) & (tl.load(reach_ptr + g, mask=g < num_groups, other=BELOW_ALL) >= bound)
        place = count + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(list_ptr + place, g, mask=reaches)
        count += tl.sum(reaches.to(tl.int32), 0)
    return count


@jit
def gather(
    row: tl.tuple,
    whole: tl.tensor,
    noise: tl.tuple,
    bound: tl.tensor,
    highest: tl.tensor,
    groups: tl.tuple,
    out: tl.tuple,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """Put the possible ids that reach the bound, and their logits, into out: how many, and their weight.

    row: where its logits start, V, temperature. groups: their maxima, how many, and room for a list of them. out: where
    logits and ids go, and for how many there is room; stops where there is no more, with a number above that.
    """
    row_ptr, V, temperature = row
    reach_ptr, num_groups, list_ptr = groups
    z_ptr, ids_ptr, capacity = out
    tl.debug_barrier()  # the list may still be read, for a bound tried before
    num_entries = reaching_groups(reach_ptr, num_groups, bound, list_ptr, GROUPS) * GROUP
    tl.debug_barrier()  # the list was written by other threads of this program
    count, weight, start = V * 0, highest * 0.0, V * 0
    while (start < num_entries) & (count <= capacity):
        at = start + tl.arange(0, TILE)
        ids = tl.load(list_ptr + at // GROUP, mask=at < num_entries, other=0) * GROUP + at % GROUP
        z = tl.load(row_ptr + ids, mask=(at < num_entries) & (ids < V), other=float("-inf"))
        s = scaled(z, temperature)
        key = order_key(s)
        reach = key
        if whole != 0:
            _, above = score_bounds(s, ids, noise)
            reach = order_key(above)
        chosen = (reach >= bound) & (key > MINUS_INFINITY_KEY)
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(z_ptr + place, z, mask=chosen & (place < capacity))
        tl.store(ids_ptr + place, ids, mask=chosen & (place < capacity))
        count += tl.sum(chosen.to(tl.int32), 0)
        weight += tl.sum(tl.where(chosen, tl.exp(s.to(tl.float64) - highest), 0.0), 0)
        start += TILE
    return count, weight


@jit
def first_bound(
    params_ptr: tl.tensor,
    groups: tl.tuple,
    low: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    GROUPS: tl.constexpr,
) -> tl.tuple:
    """The bound that the filters of a row put on its keys, how many groups gave it, and the weight it has to reach."""
    reach_ptr, num_groups, _ = groups
    top_k, top_p = tl.load(params_ptr + SELECT_K).to(tl.int32), real(tl.load(params_ptr + SELECT_TOP_P))
    log_min_p = real(tl.load(params_ptr + SELECT_LOG_MIN_P))
    bound, tried, target = high * 0 + MINUS_INFINITY_KEY, top_k * 0 + num_groups, total * 0.0
    if top_k == 1:
        bound = high
    else:
        if (top_k > 0) & (top_k <= num_groups):
            bound = kth_reach(reach_ptr, num_groups, top_k, low, high, GROUPS)
    if log_min_p > float("-inf"):
        bound = tl.maximum(bound, least_key_from(value_of_key(high).to(tl.float64) + log_min_p))
    if (top_k == 0) & (log_min_p == float("-inf")) & (top_p < 1):
        target = top_p * total * REACHED
        tried = top_k * 0 + FIRST_GROUPS
        if tried < num_groups:
            bound = kth_reach(reach_ptr, num_groups, tried, low, high, GROUPS)
    return bound, tried, target


@jit
def collect(
    source: tl.tuple,  # logits [R, V] float32, their stride, V
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    groups: tl.tuple,  # maxima [M, num_groups] int32 of `scan`, num_groups, [M, num_groups] int32 of scratch
    tiles: tl.tuple,  # [M, TILE_FIELDS, num_tiles] int64 of `scan`, num_tiles
    out: tl.tuple,  # z [M, C] float32 and ids [M, C] int32, out, and C
    draws_ptr: tl.tensor,  # [M, fields] int64, out, of `DRAW`: the fields of selection
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Candidates of one row."""
    m = tl.program_id(0)
    (tiles_ptr, num_tiles), draw_ptr, params_ptr = tiles, draws_ptr + m * DRAW_WORDS, records_ptr + m * RECORD_WORDS
    at, real_tile = tiles_ptr + m * TILE_FIELDS * num_tiles + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles
    tops = tl.load(at + TOP * num_tiles, mask=real_tile, other=BELOW_ALL).to(tl.int32)
    high = tl.max(tops, 0)
    low = tl.min(tl.load(at + LOW * num_tiles, mask=real_tile, other=ABOVE_ALL).to(tl.int32), 0)
    highest = value_of_key(high).to(tl.float64)
    tl.store(draw_ptr + NUM_POSSIBLE, tl.sum(tl.load(at + POSSIBLE * num_tiles, mask=real_tile, other=0), 0))
    tl.store(draw_ptr + HIGHEST, word(highest))
    tl.store(draw_ptr + NUM_CANDIDATES, tl.full((), 0, tl.int64))
    illegal = (low < MINUS_INFINITY_KEY) | (high >= INFINITY_KEY)
    if illegal | (high == MINUS_INFINITY_KEY):
        tl.store(draw_ptr + STATUS, tl.where(illegal, NOT_FINITE, EMPTY).to(tl.int64))
        return

    total = highest * 0.0
    if tl.load(params_ptr + WEIGHS) != 0:
        parts = real(tl.load(at + TILE_WEIGHT * num_tiles, mask=real_tile, other=0))
        total = tl.sum(tl.where(parts > 0, parts * tl.exp(value_of_key(tops).to(tl.float64) - highest), 0.0), 0)
    (logits_ptr, stride, V), (reach_ptr, num_groups, list_ptr), (z_ptr, ids_ptr, capacity) = source, groups, out
    whole, noise = tl.load(params_ptr + WHOLE), noise_of(params_ptr)
    row = (
        logits_ptr + tl.load(params_ptr + SOURCE) * stride,
        V,
        real(tl.load(params_ptr + TEMPERATURE)).to(tl.float32),
    )
    mine = (reach_ptr + m * num_groups, num_groups, list_ptr + m * num_groups)
    room = (z_ptr + m * capacity, ids_ptr + m * capacity, capacity)
    bound, tried, target = first_bound(params_ptr, mine, low, high, total, GROUPS)
    if whole != 0:
        scores = tl.load(at + SCORE * num_tiles, mask=real_tile, other=0)
        bound = order_key(tl.max(tl.where(real_tile, real(scores), float("-inf")), 0).to(tl.float32))
    count, weight = gather(row, whole, noise, bound, highest, mine, room, GROUP, GROUPS, TILE)
    while (weight < target) & (count <= capacity) & (bound > low):
        tried = tried * 2
        if tried <= num_groups // 2:
            bound = kth_reach(mine[0], num_groups, tried, low, high, GROUPS)
        else:  # most groups reach it already: maxima no longer tell how many ids will
            s = value_of_key(bound)
            bound = order_key(s - STEP - tl.abs(s) * RELATIVE_STEP)
        count, weight = gather(row, whole, noise, bound, highest, mine, room, GROUP, GROUPS, TILE)
    if (bound <= low) & (whole == 0):
        total = weight  # nothing is left out
    tl.store(draw_ptr + TOTAL, word(total))
    tl.store(draw_ptr + WEIGHT, word(weight))
    tl.store(draw_ptr + NUM_CANDIDATES, tl.where(count > capacity, 0, count).to(tl.int64))
    tl.store(draw_ptr + STATUS, tl.where(count > capacity, TOO_MANY, OK).to(tl.int64))


def select(logits: Tensor, records: Tensor, *, capacity: int) -> Candidates:
    """Candidates: every id that may be drawn from the row of logits that each record names, and perhaps some more.

    In a whole row those are the ids with the highest s + noise, in any other the ids that all of these hold:
    s >= the select_k-th highest s; s >= the highest + select_log_min_p; and, where neither bounds them and
    select_top_p < 1, the highest s, ties included, whose weights exceed that share of the weight of all by a billionth.
    TOO_MANY where there are more than `capacity`.

    logits: [R, V] float32, columns adjacent; s = float32(z / temperature). records: [M, fields] int64, of `RECORD`.
    """
    M, V = records.shape[0], logits.shape[1]
    assert adjacent_columns(logits)
    group = max(MIN_GROUP, triton.next_power_of_2(triton.cdiv(V, MAX_GROUPS)))
    tile = launch_tile(V)
    num_groups, num_tiles = triton.cdiv(V, group), triton.cdiv(V, tile)
    reach, listed = torch.empty((2, M, num_groups), dtype=torch.int32, device=logits.device)
    tiles = torch.empty((M, TILE_FIELDS.value, num_tiles), dtype=torch.int64, device=logits.device)
    found = Candidates.empty(M, capacity, logits.device)
    source = (logits, logits.stride(0), V)
    meta = {"num_warps": 8, "enable_fp_fusion": False}
    sizes = (num_groups, num_tiles)
    scan[(num_tiles, M)](*source, records, *sizes, reach, tiles, GROUP=group, TILE=tile, **meta)
    meta |= {
        "TILES": triton.next_power_of_2(num_tiles),
        "GROUP": group,
        "GROUPS": min(MAX_GROUPS, triton.next_power_of_2(num_groups)),
        "TILE": COLLECTED_AT_ONCE,
    }
    groups, out = (reach, num_groups, listed), (found.z, found.ids, capacity)
    collect[(M,)](source, records, groups, (tiles, num_tiles), out, found.draws, **meta)
    return found
