"""Triton form of `candidates.best` and `candidates.ranks`: what logprobs entries are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.compaction import Cut
from keepmask.sampling.cuda.compaction_triton import entries, kept
from keepmask.sampling.cuda.draw_table import Best, DrawTable
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    adjacent_columns,
    column,
    jit,
    order_key,
    scaled,
    value_of_key,
)

__all__ = ["best", "ranks"]

SOURCE, TEMPERATURE, NUM_TOP = column("source"), column("temperature"), column("num_top")


@jit
def best_rows(
    z_ptr: tl.tensor,  # [M, C] float32, candidates; or [R, V], logits
    stride: tl.tensor,
    ids_ptr: tl.tensor,  # [M, C] int32
    num_ptr: tl.tensor,  # [M] int32, how many candidates
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
    num_top_ptr: tl.tensor,  # [M] int32, out: `Best`
    top_ids_ptr: tl.tensor,  # [M, T] int32, out
    top_s_ptr: tl.tensor,  # [M, T] float32, out
    top_logprobs_ptr: tl.tensor,  # [M, T] float32, out
    T: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The best of one row's support, one after the other."""
    m = tl.program_id(0)
    if tl.load(wanted_ptr + m) == 0:
        return
    n = V
    if ALL:
        z_ptr += tl.load(ints_ptr + SOURCE * M + m) * stride
    else:
        z_ptr += m * stride
        ids_ptr += m * stride
        n = tl.load(num_ptr + m)
    row = (z_ptr, ids_ptr, n, tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32))
    cut = (order_key(tl.load(bound_ptr + m)), tl.load(first_ptr + m), tl.load(last_ptr + m))
    highest, log_weight = tl.load(highest_ptr + m), tl.load(log_weight_ptr + m)
    num_top = tl.load(ints_ptr + NUM_TOP * M + m).to(tl.int32)
    found, left = n * 0, n * 0 + 1
    last_key, last_id = n * 0 + ABOVE_ALL, n * 0
    while (found < num_top) & (left != 0):
        next_key, next_id = n * 0 + BELOW_ALL, n * 0
        for start in range(0, n, TILE):
            _, key, ids = entries(row, start, ALL, TILE)
            behind = (key < last_key) | ((key == last_key) & (ids > last_id))
            behind = behind & kept(key, ids, cut)
            here = tl.max(tl.where(behind, key, BELOW_ALL), 0)
            lowest = tl.min(tl.where(behind & (key == here), ids, ABOVE_ALL), 0)
            if here > next_key:
                next_key = here
                next_id = lowest
        left = (next_key != BELOW_ALL).to(tl.int32)
        if left != 0:
            s = value_of_key(next_key)
            out = m * T + found
            tl.store(top_ids_ptr + out, next_id)
            tl.store(top_s_ptr + out, s)
            tl.store(top_logprobs_ptr + out, (s.to(tl.float64) - highest - log_weight).to(tl.float32))
            found += 1
        last_key = next_key
        last_id = next_id
    tl.store(num_top_ptr + m, found)


@jit
def ranks_in_tiles(
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    ints_ptr: tl.tensor,  # [columns, M] int64, the table
    floats_ptr: tl.tensor,  # the same bits as float64
    M: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    token_ptr: tl.tensor,  # [M] int64
    ahead_ptr: tl.tensor,  # [M, num_tiles] int32, out: ids of the tile that come before the token
    TILE: tl.constexpr,
) -> None:
    """One tile of one row."""
    tile, m = tl.program_id(0), tl.program_id(1)
    z_ptr = logits_ptr + tl.load(ints_ptr + SOURCE * M + m) * stride
    t = tl.load(floats_ptr + TEMPERATURE * M + m).to(tl.float32)
    token_id = tl.maximum(tl.load(token_ptr + m), 0)
    token_key = order_key(scaled(tl.load(z_ptr + token_id), t))
    _, key, ids = entries((z_ptr, z_ptr, V, t), tile * TILE, True, TILE)
    ahead = (key > token_key) | ((key == token_key) & (ids < token_id))
    tl.store(ahead_ptr + m * num_tiles + tile, tl.sum((ahead & (ids < V)).to(tl.int32), 0))


def best(
    z: Tensor, ids: Tensor | None, num: Tensor | None, table: DrawTable, cut: Cut, wanted: Tensor, out: Best
) -> None:
    """`candidates.best`."""
    M, V = table.num_rows, z.shape[1]
    assert adjacent_columns(z)
    rows = (z, z.stride(0), z if ids is None else ids, wanted if num is None else num, table.ints, table.floats, M, V)
    tile, num_warps = (_tile(V), 16) if ids is None else (512, 4)
    meta = {"ALL": ids is None, "TILE": tile, "num_warps": num_warps, "enable_fp_fusion": False}
    best_rows[(M,)](*rows, wanted, *cut, *out, out.ids.shape[1], **meta)


def ranks(logits: Tensor, table: DrawTable, token_ids: Tensor) -> Tensor:
    """`candidates.ranks`."""
    M, V = table.num_rows, logits.shape[1]
    assert adjacent_columns(logits)
    tile = _tile(V)
    num_tiles = triton.cdiv(V, tile)
    ahead = torch.empty((M, num_tiles), dtype=torch.int32, device=logits.device)
    shape = (logits, logits.stride(0), table.ints, table.floats, M, V, num_tiles)
    ranks_in_tiles[(num_tiles, M)](*shape, token_ids, ahead, TILE=tile, num_warps=8, enable_fp_fusion=False)
    return ahead.sum(1) + 1


def _tile(V: int) -> int:
    return min(4096, max(64, int(triton.next_power_of_2(V))))
