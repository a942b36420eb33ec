"""Attention of single queries to paged keys and values in Triton: `paged_attention.decode_attention` for GPUs.

A program takes one token and one head of keys and values with all query heads that read it, and goes over the blocks of
its sequence once, with an online softmax (Milakov and Gimelshein 2018). All arithmetic is float32: products of queries
and keys of half precision are exact in it. The cache's bytes, not the products, are what a token's attention takes.

Under `TRITON_INTERPRET=1`, set before Triton is first imported, this runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.sampling.cuda.ops_triton import interpreted, jit

__all__ = ["decode", "supports"]

_KEYS = 64  # taken at a time
_LEAST_ROWS = 16  # of a matrix product


class _Heads(NamedTuple):
    """[T, Hq, D], the last dimension contiguous."""

    data: Any
    stride: Any
    head_stride: Any


class _Cache(NamedTuple):
    k: Any
    v: Any
    H: Any


class _Places(NamedTuple):
    """Where tokens find their sequence's blocks, and how many tokens each sees."""

    tables: Any
    stride: Any
    rows: Any
    context_lens: Any


class _Shape(NamedTuple):
    GROUPS: int
    """Query heads of a head of keys and values."""
    ROWS: int
    """Rows of the product that holds them."""
    D: int
    BLOCK: int
    """Tokens of a block."""
    KEYS: int
    """Positions taken at a time."""


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
    groups = Hq // H
    attend[(T, H)](
        _Heads(query, query.stride(0), query.stride(1)),
        _Cache(keys, values, H),
        _Places(block_tables, block_tables.stride(0), rows, context_lens),
        _Heads(out, out.stride(0), out.stride(1)),
        (window or 0, float(scale), float(softcap or 0.0)),
        SHAPE=_Shape(groups, max(_LEAST_ROWS, triton.next_power_of_2(groups)), D, block_size, _KEYS),
        CAPPED=softcap is not None,
        WIDENS=interpreted(),  # which multiplies no bfloat16
        num_warps=4,
    )


@jit
def attend(
    queries: tl.tuple,  # _Heads [T, Hq, D]
    cache: tl.tuple,  # a _Cache
    places: tl.tuple,  # _Places
    out: tl.tuple,  # _Heads [T, Hq, D]
    options: tl.tuple,  # window, 0 where there is none; scale; softcap
    SHAPE: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    """One token and one head of keys and values; SHAPE.KEYS positions at a time, of several blocks."""
    t, h = tl.program_id(0), tl.program_id(1)
    group, d, lane = tl.arange(0, SHAPE.ROWS), tl.arange(0, SHAPE.D), tl.arange(0, SHAPE.KEYS)
    head = h * SHAPE.GROUPS + group
    real = (group < SHAPE.GROUPS)[:, None]
    at = queries.data + t * queries.stride + head[:, None] * queries.head_stride + d[None, :]
    query = tl.load(at, mask=real, other=0.0)
    if WIDENS:
        query = query.to(tl.float32)
    window, scale, softcap = options
    table = places.tables + tl.load(places.rows + t).to(tl.int64) * places.stride
    stop = tl.load(places.context_lens + t)
    first = stop * 0
    if window > 0:
        first = tl.maximum(stop - window, 0)
    most = tl.full((SHAPE.ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((SHAPE.ROWS,), tl.float32)
    acc = tl.zeros((SHAPE.ROWS, SHAPE.D), tl.float32)
    for start in range(first // SHAPE.KEYS * SHAPE.KEYS, stop, SHAPE.KEYS):
        position = start + lane
        seen = (position >= first) & (position < stop)
        block = tl.load(table + position // SHAPE.BLOCK, mask=seen, other=0).to(tl.int64)
        base, slot = (block * cache.H + h) * SHAPE.D * SHAPE.BLOCK, position % SHAPE.BLOCK
        # Slots that are not seen may hold what a freed block held, even NaN: they count as 0.
        key_at = cache.k + base[None, :] + d[:, None] * SHAPE.BLOCK + slot[None, :]
        key = tl.load(key_at, mask=seen[None, :], other=0.0)
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
        value_at = cache.v + base[:, None] + slot[:, None] * SHAPE.D + d[None, :]
        value = tl.load(value_at, mask=seen[:, None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight, value.to(tl.float32), input_precision="ieee")
        most = highest
    result = acc / total[:, None]
    at = out.data + t * out.stride + head[:, None] * out.head_stride + d[None, :]
    tl.store(at, result.to(out.data.dtype.element_ty), mask=real)
