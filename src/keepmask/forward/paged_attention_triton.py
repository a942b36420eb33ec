"""Attention of single queries to paged keys and values in Triton: `paged_attention.decode_attention` for GPUs.

A program takes one token and one head of keys and values with all query heads that read it, and goes over the blocks of
its sequence once, with an online softmax (Milakov and Gimelshein 2018). All arithmetic is float32: products of queries
and keys of half precision are exact in it. The cache's bytes, not the products, are what a token's attention takes.

Under `TRITON_INTERPRET=1`, set before Triton is first imported, this runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.ops_triton import interpreted, jit

__all__ = ["decode", "supports"]

_KEYS = 64  # taken at a time
_LEAST_ROWS = 16  # of a matrix product


def supports(keys: Tensor) -> bool:
    """Whether a cache with keys of this device, type and shape can be served."""
    D, block_size = keys.shape[2:]
    return (
        (keys.is_cuda or (interpreted() and keys.device.type == "cpu"))
        and keys.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and D >= _LEAST_ROWS
        and not D & (D - 1)
        and _KEYS % block_size == 0
    )


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    """`paged_attention.decode_attention` for what `supports` admits."""
    query = query if query.stride(2) == 1 else query.contiguous()
    T, Hq, D = query.shape
    H, block_size = keys.shape[1], keys.shape[3]
    attend[(T, H)](
        query,
        keys,
        values,
        block_tables,
        rows,
        context_lens,
        out,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        H,
        window or 0,
        float(scale),
        float(softcap or 0.0),
        GROUPS=Hq // H,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(Hq // H)),
        D=D,
        BLOCK=block_size,
        KEYS=_KEYS,
        CAPPED=softcap is not None,
        WIDENS=interpreted(),  # which multiplies no bfloat16
        num_warps=4,
    )


@jit
def attend(
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    H: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    """One token and one head of keys and values; KEYS positions at a time, of several blocks."""
    t, h = tl.program_id(0), tl.program_id(1)
    group, d, lane = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, KEYS)
    head = h * GROUPS + group
    real = (group < GROUPS)[:, None]
    query_at = query_ptr + t * query_stride + head[:, None] * head_stride + d[None, :]
    query = tl.load(query_at, mask=real, other=0.0)
    if WIDENS:
        query = query.to(tl.float32)
    table_ptr = tables_ptr + tl.load(rows_ptr + t).to(tl.int64) * table_stride
    stop = tl.load(lens_ptr + t)
    first = stop * 0
    if window > 0:
        first = tl.maximum(stop - window, 0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(first // KEYS * KEYS, stop, KEYS):
        position = start + lane
        seen = (position >= first) & (position < stop)
        block = tl.load(table_ptr + position // BLOCK, mask=seen, other=0).to(tl.int64)
        base, slot = (block * H + h) * D * BLOCK, position % BLOCK
        # Slots that are not seen may hold what a freed block held, even NaN: they count as 0.
        key = tl.load(keys_ptr + base[None, :] + d[:, None] * BLOCK + slot[None, :], mask=seen[None, :], other=0.0)
        if WIDENS:
            key = key.to(tl.float32)
        score = tl.dot(query, key, input_precision="ieee") * scale
        if CAPPED:
            # tanh(y) = 1 - 2 / (exp(2 y) + 1)
            score = softcap * (1 - 2 / (tl.exp(2 * score / softcap) + 1))
        score = tl.where(seen[None, :], score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        weight = tl.where(seen[None, :], tl.exp(score - highest[:, None]), 0.0)
        shrink = tl.where(most > float("-inf"), tl.exp(most - highest), 0.0)
        value = tl.load(values_ptr + base[:, None] + slot[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight, value.to(tl.float32), input_precision="ieee")
        most = highest
    result = acc / total[:, None]
    out_at = out_ptr + t * out_stride + head[:, None] * out_head_stride + d[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=real)
