"""`capture`: the supports of rows, as CSR on the device."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.draw_records import Candidates
from keepmask.sampling.cuda.ops_triton import (
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
)

__all__ = ["capture"]

SOURCE, TEMPERATURE, WITH_LOGPROBS = field("source"), field("temperature"), field("returns_mask_logprobs")
NUM_CANDIDATES, OVER_ALL = draw_field("num_candidates"), draw_field("over_all")
BOUND, FIRST, LAST = (draw_field(name) for name in ("bound", "first", "last"))
HIGHEST, LOG_WEIGHT = draw_field("highest"), draw_field("log_weight")
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest float32, for log-probs below it."""


@jit
def capture_rows(
    z_ptr: tl.tensor,  # [M, C] float32, candidates; or [R, V], logits
    stride: tl.tensor,
    ids_ptr: tl.tensor,  # [M, C] int32
    V: tl.tensor,
    records_ptr: tl.tensor,  # [M, fields] int64, of `RECORD`
    draws_ptr: tl.tensor,  # [M, fields] int64, of `DRAW`
    offsets_ptr: tl.tensor,  # [M+1] int64
    out: tl.tuple,  # ids [N] int32 and log-probs [N] float32, out
    ALL: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The support of one row, if it has a place and its draw was over all ids or over candidates, as ALL says."""
    m = tl.program_id(0)
    params_ptr, draw_ptr = records_ptr + m * RECORD_WORDS, draws_ptr + m * DRAW_WORDS
    place = tl.load(offsets_ptr + m)
    if (place == tl.load(offsets_ptr + m + 1)) | ((tl.load(draw_ptr + OVER_ALL) != 0) != ALL):
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
    with_logprobs = tl.load(params_ptr + WITH_LOGPROBS) != 0
    for start in range(0, n, TILE):
        s, key, ids = entries(row, start, ALL, TILE)
        keep = kept(key, ids, cut)
        at = place + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out[0] + at, ids, mask=keep)
        if with_logprobs:
            logprobs = tl.maximum((s.to(tl.float64) - highest - log_weight).to(tl.float32), LOWEST)
            tl.store(out[1] + at, logprobs, mask=keep)
        place += tl.sum(keep.to(tl.int32), 0)


def capture(
    logits: Tensor,
    found: Candidates,
    records: Tensor,
    offsets: Tensor,
    out: tuple[Tensor, Tensor],
    *,
    over_all: bool,
) -> None:
    """Write the supports of the rows drawn over candidates, or over all V ids.

    offsets: [M+1] int64; a row whose offsets are equal is left out, any other has its count of them. out: ids [N]
    int32, ascending within a row, and log-probs [N] float32, finite, which are written in rows that return them.
    """
    assert adjacent_columns(logits)
    M, V = records.shape[0], logits.shape[1]
    z, ids = (logits, found.ids) if over_all else (found.z, found.ids)
    tile, num_warps = (launch_tile(V), 8) if over_all else (512, 4)
    meta = {"ALL": over_all, "TILE": tile, "num_warps": num_warps, "enable_fp_fusion": False}
    capture_rows[(M,)](z, z.stride(0), ids, V, records, found.draws, offsets, out, **meta)
