"""Triton form of `candidates.select`: one pass over the logits, then one over its maxima and the groups they point to.

`scan` reads every logit once, one program a tile of a row, and leaves the maxima of up to 4096 groups of ids.
`collect`, one program a row, finds a bound among the maxima and gathers the ids that reach it. Ids come out ascending.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda import draw_table
from keepmask.sampling.cuda.draw_table import Candidates, DrawTable
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    INFINITY_KEY,
    MINUS_INFINITY_KEY,
    adjacent_columns,
    column,
    jit,
    least_key_from,
    noise_of,
    order_key,
    scaled,
    score_bounds,
    value_of_key,
)

__all__ = ["select"]

FIRST_GROUPS = tl.constexpr(32)
"""Groups whose maxima bound the first try of a mass cut; each further try takes twice as many."""
STEP, RELATIVE_STEP = tl.constexpr(0.5), tl.constexpr(2.0**-12)
"""Where that takes most groups, how far further tries lower the bound, in nats and by its own size."""
REACHED = tl.constexpr(draw_table.REACHED)
MIN_GROUP, MAX_GROUPS = 4, 4096
MIN_TILE, MAX_TILE, COLLECTED_AT_ONCE = 64, 4096, 1024

SOURCE, TEMPERATURE, WHOLE, WEIGHS = (column(name) for name in ("source", "temperature", "whole", "weighs"))
SELECT_K, SELECT_LOG_MIN_P, SELECT_TOP_P = (column("select_" + name) for name in ("k", "log_min_p", "top_p"))
OK, NOT_FINITE, EMPTY, TOO_MANY = (
    tl.constexpr(code) for code in (draw_table.OK, draw_table.NOT_FINITE, draw_table.EMPTY, draw_table.TOO_MANY)
)


@jit
def scan(
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    ints_ptr: tl.tensor,  # [columns, M] int64, the table
    floats_ptr: tl.tensor,  # the same bits as float64
    M: tl.tensor,
    V: tl.tensor,
    num_groups: tl.tensor,
    num_tiles: tl.tensor,
    reach_ptr: tl.tensor,  # [M, num_groups] int32, out: highest keys, or upper scores in whole rows
    top_ptr: tl.tensor,  # [M, num_tiles] int32, out: highest key of the tile
    low_ptr: tl.tensor,  # [M, num_tiles] int32, out: lowest key
    possible_ptr: tl.tensor,  # [M, num_tiles] int32, out: how many logits are above -inf
    weight_ptr: tl.tensor,  # [M, num_tiles] float64, out: sum of exp(s - the tile's highest), where the row weighs
    score_ptr: tl.tensor,  # [M, num_tiles] float32, out: highest lower score, in whole rows
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Maxima and sums of one tile of one row."""
    tile, m = tl.program_id(0), tl.program_id(1)
    source = tl.load(ints_ptr + SOURCE * M + m)
    temperature = tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = tl.load(logits_ptr + source * stride + ids, mask=ids < V, other=float("-inf"))
    s = scaled(z, temperature)
    key = order_key(s)
    top = tl.max(tl.max(key, 1), 0)
    out = m * num_tiles + tile
    tl.store(top_ptr + out, top)
    tl.store(low_ptr + out, tl.min(tl.min(tl.where(ids < V, key, ABOVE_ALL), 1), 0))
    tl.store(possible_ptr + out, tl.sum(tl.sum((key > MINUS_INFINITY_KEY).to(tl.int32), 1), 0))
    reach = key
    if tl.load(ints_ptr + WHOLE * M + m) != 0:
        below, above = score_bounds(s, ids, noise_of(ints_ptr, M, m))
        reach = order_key(above)
        tl.store(score_ptr + out, tl.max(tl.max(below, 1), 0))
    tl.store(reach_ptr + m * num_groups + group, tl.max(reach, 1), mask=group < num_groups)
    if tl.load(ints_ptr + WEIGHS * M + m) != 0:
        highest = value_of_key(top).to(tl.float64)
        weights = tl.where(key > MINUS_INFINITY_KEY, tl.exp(s.to(tl.float64) - highest), 0.0)
        tl.store(weight_ptr + out, tl.sum(tl.sum(weights, 1), 0))


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
    ints_ptr: tl.tensor,
    floats_ptr: tl.tensor,
    M: tl.tensor,
    m: tl.tensor,
    groups: tl.tuple,
    low: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    GROUPS: tl.constexpr,
) -> tl.tuple:
    """The bound that the filters of row m put on its keys, how many groups gave it, and the weight it has to reach."""
    reach_ptr, num_groups, _ = groups
    top_k, top_p = tl.load(ints_ptr + SELECT_K * M + m), tl.load(floats_ptr + SELECT_TOP_P * M + m)
    log_min_p = tl.load(floats_ptr + SELECT_LOG_MIN_P * M + m)
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
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    ints_ptr: tl.tensor,  # [columns, M] int64, the table
    floats_ptr: tl.tensor,  # the same bits as float64
    M: tl.tensor,
    V: tl.tensor,
    num_groups: tl.tensor,
    num_tiles: tl.tensor,
    reach_ptr: tl.tensor,  # [M, num_groups] int32, and [M, num_tiles] each: what `scan` wrote
    top_ptr: tl.tensor,
    low_ptr: tl.tensor,
    possible_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    score_ptr: tl.tensor,
    list_ptr: tl.tensor,  # [M, num_groups] int32, scratch
    capacity: tl.tensor,
    z_ptr: tl.tensor,  # [M, capacity] float32, out: `Candidates`
    ids_ptr: tl.tensor,  # [M, capacity] int32, out
    counts_ptr: tl.tensor,  # [M] int32, out
    sums_ptr: tl.tensor,  # [3, M] float64, out
    num_possible_ptr: tl.tensor,  # [M] int32, out
    status_ptr: tl.tensor,  # [M] int32, out
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Candidates of one row."""
    m = tl.program_id(0)
    at, real = m * num_tiles + tl.arange(0, TILES), tl.arange(0, TILES) < num_tiles
    tops = tl.load(top_ptr + at, mask=real, other=BELOW_ALL)
    high = tl.max(tops, 0)
    low = tl.min(tl.load(low_ptr + at, mask=real, other=ABOVE_ALL), 0)
    highest = value_of_key(high).to(tl.float64)
    tl.store(num_possible_ptr + m, tl.sum(tl.load(possible_ptr + at, mask=real, other=0), 0))
    tl.store(sums_ptr + m, highest)
    tl.store(counts_ptr + m, 0)
    if (low < MINUS_INFINITY_KEY) | (high >= INFINITY_KEY):
        tl.store(status_ptr + m, NOT_FINITE)
        return
    if high == MINUS_INFINITY_KEY:
        tl.store(status_ptr + m, EMPTY)
        return

    total = highest * 0.0
    if tl.load(ints_ptr + WEIGHS * M + m) != 0:
        parts = tl.load(weight_ptr + at, mask=real, other=0.0)
        total = tl.sum(tl.where(parts > 0, parts * tl.exp(value_of_key(tops).to(tl.float64) - highest), 0.0), 0)

    whole, noise = tl.load(ints_ptr + WHOLE * M + m), noise_of(ints_ptr, M, m)
    temperature = tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32)
    row = (logits_ptr + tl.load(ints_ptr + SOURCE * M + m) * stride, V, temperature)
    groups = (reach_ptr + m * num_groups, num_groups, list_ptr + m * num_groups)
    out = (z_ptr + m * capacity, ids_ptr + m * capacity, capacity)
    bound, tried, target = first_bound(ints_ptr, floats_ptr, M, m, groups, low, high, total, GROUPS)
    if whole != 0:
        bound = order_key(tl.max(tl.load(score_ptr + at, mask=real, other=float("-inf")), 0))
    count, weight = gather(row, whole, noise, bound, highest, groups, out, GROUP, GROUPS, TILE)
    while (weight < target) & (count <= capacity) & (bound > low):
        tried = tried * 2
        if tried <= num_groups // 2:
            bound = kth_reach(groups[0], num_groups, tried, low, high, GROUPS)
        else:  # most groups reach it already: maxima no longer tell how many ids will
            s = value_of_key(bound)
            bound = order_key(s - STEP - tl.abs(s) * RELATIVE_STEP)
        count, weight = gather(row, whole, noise, bound, highest, groups, out, GROUP, GROUPS, TILE)
    if (bound <= low) & (whole == 0):
        total = weight  # nothing is left out
    tl.store(sums_ptr + M + m, total)
    tl.store(sums_ptr + 2 * M + m, weight)
    tl.store(counts_ptr + m, tl.where(count > capacity, 0, count))
    tl.store(status_ptr + m, tl.where(count > capacity, TOO_MANY, OK))


def select(logits: Tensor, table: DrawTable, *, capacity: int) -> Candidates:
    """`candidates.select`."""
    M, V = table.num_rows, logits.shape[1]
    assert adjacent_columns(logits)
    group = max(MIN_GROUP, triton.next_power_of_2(triton.cdiv(V, MAX_GROUPS)))
    tile = min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(V)))
    num_groups, num_tiles = triton.cdiv(V, group), triton.cdiv(V, tile)
    new = partial(torch.empty, device=logits.device)
    reach, listed = new((2, M, num_groups), dtype=torch.int32)
    tops, lows, possible = new((3, M, num_tiles), dtype=torch.int32)
    weights, scores = new((M, num_tiles), dtype=torch.float64), new((M, num_tiles), dtype=torch.float32)
    found = Candidates.empty(M, capacity, logits.device)
    rows = (logits, logits.stride(0), table.ints, table.floats, M, V, num_groups, num_tiles)
    scanned = (reach, tops, lows, possible, weights, scores)
    scan[(num_tiles, M)](*rows, *scanned, GROUP=group, TILE=tile, num_warps=8, enable_fp_fusion=False)
    meta = {
        "TILES": triton.next_power_of_2(num_tiles),
        "GROUP": group,
        "GROUPS": min(MAX_GROUPS, triton.next_power_of_2(num_groups)),
        "TILE": COLLECTED_AT_ONCE,
        "num_warps": 8,
        "enable_fp_fusion": False,
    }
    collect[(M,)](*rows, *scanned, listed, capacity, *found, **meta)
    return found
