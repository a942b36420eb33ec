"""`best` and `ranks`: what logprobs entries are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling import records as codes
from keepmask.sampling.cuda.draw_records import Best, Candidates
from keepmask.sampling.cuda.ops_triton import (
    ABOVE_ALL,
    BELOW_ALL,
    DRAW_WORDS,
    RECORD_WORDS,
    adjacent_columns,
    draw_field,
    entries,
    field,
    jit,
    kept,
    launch_tile,
    order_key,
    real,
    scaled,
    value_of_key,
)

__all__ = ["best", "ranks"]

SOURCE, TEMPERATURE, WHOLE, NUM_LOGPROBS = (field(name) for name in ("source", "temperature", "whole", "num_logprobs"))
STATUS, NUM_CANDIDATES, OVER_ALL = (draw_field(name) for name in ("status", "num_candidates", "over_all"))
BOUND, FIRST, LAST = (draw_field(name) for name in ("bound", "first", "last"))
HIGHEST, LOG_WEIGHT = draw_field("highest"), draw_field("log_weight")
OK = tl.constexpr(codes.OK)


@jit
def best_rows(
    z_ptr: tl.tensor,  # [M, C] float32, candidates; or [R, V], logits
    stride: tl.tensor,
    ids_ptr: tl.tensor,  # [M, C] int32
    V: tl.tensor,
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    draws_ptr: tl.tensor,  # [M, fields] int64, of `DRAW`
    out: tl.tuple,  # `Best`: num [M], ids, s and logprobs [M, T]
    T: tl.tensor,
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The best of one row's support, one after the other, if its draw was over all ids or candidates, as ALL says."""
    m = tl.program_id(0)
    params_ptr, draw_ptr = records_ptr + m * RECORD_WORDS, draws_ptr + m * DRAW_WORDS
    other_way = (tl.load(draw_ptr + OVER_ALL) != 0) != ALL
    if (tl.load(draw_ptr + STATUS) != OK) | (tl.load(params_ptr + WHOLE) != 0) | other_way:
        return
    n = V
    if ALL:
        z_ptr += tl.load(params_ptr + SOURCE) * stride
    else:
        z_ptr += m * stride
        ids_ptr += m * stride
        n = tl.load(draw_ptr + NUM_CANDIDATES).to(tl.int32)
    row = (z_ptr, ids_ptr, n, real(tl.load(params_ptr + TEMPERATURE)).to(tl.float32))
    bound = order_key(real(tl.load(draw_ptr + BOUND)).to(tl.float32))
    cut = (bound, tl.load(draw_ptr + FIRST), tl.load(draw_ptr + LAST))
    highest, log_weight = real(tl.load(draw_ptr + HIGHEST)), real(tl.load(draw_ptr + LOG_WEIGHT))
    num_top = tl.load(params_ptr + NUM_LOGPROBS).to(tl.int32)
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
            at = m * T + found
            tl.store(out[1] + at, next_id)
            tl.store(out[2] + at, s)
            tl.store(out[3] + at, (s.to(tl.float64) - highest - log_weight).to(tl.float32))
            found += 1
        last_key = next_key
        last_id = next_id
    tl.store(out[0] + m, found)


@jit
def ranks_in_tiles(
    logits_ptr: tl.tensor,  # [R, V] float32
    stride: tl.tensor,
    V: tl.tensor,
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    num_tiles: tl.tensor,
    token_ptr: tl.tensor,  # [M] int64
    ahead_ptr: tl.tensor,  # [M, num_tiles] int32, out: ids of the tile that come before the token
    TILE: tl.constexpr,
) -> None:
    """One tile of one row."""
    tile, m = tl.program_id(0), tl.program_id(1)
    params_ptr = records_ptr + m * RECORD_WORDS
    z_ptr = logits_ptr + tl.load(params_ptr + SOURCE) * stride
    t = real(tl.load(params_ptr + TEMPERATURE)).to(tl.float32)
    token_id = tl.maximum(tl.load(token_ptr + m), 0)
    token_key = order_key(scaled(tl.load(z_ptr + token_id), t))
    _, key, ids = entries((z_ptr, z_ptr, V, t), tile * TILE, True, TILE)
    ahead = (key > token_key) | ((key == token_key) & (ids < token_id))
    tl.store(ahead_ptr + m * num_tiles + tile, tl.sum((ahead & (ids < V)).to(tl.int32), 0))


def best(logits: Tensor, found: Candidates, records: Tensor, *, max_top: int) -> Best:
    """The first num_logprobs of each support by (s descending, id ascending), in rows that are drawn and not whole.

    They are found among the candidates or, in rows drawn over all ids, among the logits [R, V]. max_top: the highest
    num_logprobs.
    """
    assert adjacent_columns(logits)
    M, V = records.shape[0], logits.shape[1]
    out = Best.none(M, max_top, logits.device)
    for over_all, z, tile, num_warps in ((False, found.z, 512, 4), (True, logits, launch_tile(V), 16)):
        meta = {"ALL": over_all, "TILE": tile, "num_warps": num_warps, "enable_fp_fusion": False}
        best_rows[(M,)](z, z.stride(0), found.ids, V, records, found.draws, tuple(out), max_top, **meta)
    return out


def ranks(logits: Tensor, records: Tensor, token_ids: Tensor) -> Tensor:
    """[M] int64: the rank of each token, from 1, by (s descending, id ascending) over all ids. token_ids: [M] int64."""
    M, V = records.shape[0], logits.shape[1]
    assert adjacent_columns(logits)
    tile = launch_tile(V)
    num_tiles = triton.cdiv(V, tile)
    ahead = torch.empty((M, num_tiles), dtype=torch.int32, device=logits.device)
    meta = {"TILE": tile, "num_warps": 8, "enable_fp_fusion": False}
    ranks_in_tiles[(num_tiles, M)](logits, logits.stride(0), V, records, num_tiles, token_ids, ahead, **meta)
    return ahead.sum(1) + 1
