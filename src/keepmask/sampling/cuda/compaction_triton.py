"""Triton form of `capture.compact`, and the pieces of it that the draw over candidates ends with.

A row is a tuple: where its logits start, where its ids start, how many entries it has, and its temperature. Entries are
candidates with their ids or, with ALL, the V logits of the vocabulary, whose columns are the ids. A cut is a tuple too:
a key, and the ids between which entries with this very key stay.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.compaction import Cut, Supports
from keepmask.sampling.cuda.draw_table import DrawTable
from keepmask.sampling.cuda.ops_triton import INFINITY_KEY, adjacent_columns, column, jit, order_key, scaled

__all__ = ["compact", "entries", "kept", "put_support"]

SOURCE, TEMPERATURE = column("source"), column("temperature")
MASK_SLOT, LOGPROBS_SLOT = column("mask_slot"), column("logprobs_slot")
MIN_TILE, MAX_TILE = 64, 4096
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32, for log-probs below it."""


@jit
def entries(row: tl.tuple, start: tl.tensor, ALL: tl.constexpr, TILE: tl.constexpr) -> tl.tuple:
    """s = z / temperature, its keys and ids, of TILE of the row's entries; behind the last, entries of -inf."""
    z_ptr, ids_ptr, n, temperature = row
    at = start + tl.arange(0, TILE)
    s = scaled(tl.load(z_ptr + at, mask=at < n, other=float("-inf")), temperature)
    ids = at
    if not ALL:
        ids = tl.load(ids_ptr + at, mask=at < n, other=0)
    return s, order_key(s), ids


@jit
def kept(key: tl.tensor, ids: tl.tensor, cut: tl.tuple) -> tl.tensor:
    """Whether entries are numbers above the cut's key, or at it with an id in [first, last]."""
    bound, first, last = cut
    return ((key > bound) & (key < INFINITY_KEY)) | ((key == bound) & (ids >= first) & (ids <= last))


@jit
def put_support(
    row: tl.tuple, cut: tl.tuple, norm: tl.tuple, out: tl.tuple, ALL: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Write the kept ids and, where there is a slot for them, their log-probabilities.

    norm: highest and log_weight of the cut. out: ids and logprobs of `Supports`, their width, and the two slots of the
    row. What is beyond the width is left out.
    """
    ids_ptr, logprobs_ptr, width, slot, logprobs_slot = out
    count = row[2] * 0
    for start in range(0, row[2], TILE):
        s, key, ids = entries(row, start, ALL, TILE)
        keep = kept(key, ids, cut)
        place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        fits = keep & (place < width)
        tl.store(ids_ptr + slot * width + place, ids, mask=fits)
        if logprobs_slot >= 0:
            logprobs = tl.maximum((s.to(tl.float64) - norm[0] - norm[1]).to(tl.float32), LOWEST)
            tl.store(logprobs_ptr + logprobs_slot * width + place, logprobs, mask=fits)
        count += tl.sum(keep.to(tl.int32), 0)


@jit
def put_bits(row: tl.tuple, cut: tl.tuple, bits_ptr: tl.tensor, num_words: tl.tensor, WORDS: tl.constexpr) -> None:
    """Write a bit for each of the row's V logits, 32 to a word, the lowest id in the lowest bit."""
    z_ptr, _, n, temperature = row
    lane = tl.arange(0, 32)[None, :]
    for start in range(0, num_words, WORDS):
        word = start + tl.arange(0, WORDS)
        ids = word[:, None] * 32 + lane
        key = order_key(scaled(tl.load(z_ptr + ids, mask=ids < n, other=float("-inf")), temperature))
        bits = tl.sum(kept(key, ids, cut).to(tl.uint32) << lane.to(tl.uint32), 1)
        tl.store(bits_ptr + word, bits.to(tl.int32, bitcast=True), mask=word < num_words)


@jit
def compact_rows(
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    ints_ptr: tl.tensor,  # [columns, M] int64, the table
    floats_ptr: tl.tensor,  # the same bits as float64
    M: tl.tensor,
    V: tl.tensor,
    wanted_ptr: tl.tensor,  # [M] int32, 0 where the row is left out
    bound_ptr: tl.tensor,  # [M] float32: a Cut
    first_ptr: tl.tensor,  # [M] int32
    last_ptr: tl.tensor,  # [M] int32
    highest_ptr: tl.tensor,  # [M] float64
    log_weight_ptr: tl.tensor,  # [M] float64
    counts_ptr: tl.tensor,  # [M] int32, out, of the rows that are wanted
    support_ids_ptr: tl.tensor,  # [R1, width] int32, out: `Supports`
    support_logprobs_ptr: tl.tensor,  # [R2, width] float32, out
    bits_ptr: tl.tensor,  # [R1, num_words] int32, out
    width: tl.tensor,
    num_words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The support of one row, of all V logits."""
    m = tl.program_id(0)
    if tl.load(wanted_ptr + m) == 0:
        return
    z_ptr = logits_ptr + tl.load(ints_ptr + SOURCE * M + m) * stride
    row = (z_ptr, z_ptr, V, tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32))
    cut = (order_key(tl.load(bound_ptr + m)), tl.load(first_ptr + m), tl.load(last_ptr + m))
    count = 0
    for start in range(0, V, TILE):
        _, key, ids = entries(row, start, True, TILE)
        count += tl.sum(kept(key, ids, cut).to(tl.int32), 0)
    tl.store(counts_ptr + m, tl.where(count == V, 0, count))
    slot = tl.load(ints_ptr + MASK_SLOT * M + m)
    if (slot >= 0) & (count < V):
        if count <= width:
            norm = (tl.load(highest_ptr + m), tl.load(log_weight_ptr + m))
            logprobs_slot = tl.load(ints_ptr + LOGPROBS_SLOT * M + m)
            put_support(row, cut, norm, (support_ids_ptr, support_logprobs_ptr, width, slot, logprobs_slot), True, TILE)
        else:
            put_bits(row, cut, bits_ptr + slot * num_words, num_words, TILE // 32)


def compact(logits: Tensor, table: DrawTable, cut: Cut, wanted: Tensor, counts: Tensor, out: Supports) -> None:
    """`capture.compact`."""
    M, V = table.num_rows, logits.shape[1]
    assert adjacent_columns(logits)
    tile = min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(V)))
    rows = (logits, logits.stride(0), table.ints, table.floats, M, V, wanted, *cut)
    widths = (out.ids.shape[1], out.bits.shape[1])
    compact_rows[(M,)](*rows, counts, *out, *widths, TILE=tile, num_warps=8, enable_fp_fusion=False)
