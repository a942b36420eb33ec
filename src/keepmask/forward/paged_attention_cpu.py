"""Decode attention on CPUs: each key and value is read once, by explicit vector code compiled at run time by numba.

Keys are stored transposed, so that one vector holds one dimension of 16 of them, and the scores of a query come out as
one vector with no horizontal sums. A block of the cache is best 16 tokens; from blocks of other sizes, keys and values
are gathered first, 16 at a time. The softmax is online (Milakov and Gimelshein 2018):
keys and values of a block are read together, in one pass. The order of operations within a row depends on nothing but
the row, so neither the batch nor the number of threads changes a bit of the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from torch import Tensor

from keepmask.compiled.program import Program
from keepmask.compiled.team import Kernel, rows_an_item
from keepmask.compiled.vectors import LANES, Vectors, next_item, pointer, scratch, statement

__all__ = ["TOKENS", "add_attention", "decode", "heads_an_item", "store", "supports"]

TOKENS = LANES
"""Tokens whose keys and values are taken at a time: the lanes of one vector of float32."""

_AHEAD = 2  # blocks of a head that are being fetched while one is used
_ITEMS_A_THREAD = 4
_STATE_FLOATS = 4096  # of the heads of an item: a third of a core's first cache
_MAX_ACCUMULATORS = 16  # vectors of output held in registers at once; AVX-512 has 32 registers

_ITEMS = {2: np.uint16, 4: np.uint32}
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VI = ir.VectorType(_I32, TOKENS)


def supports(keys: Tensor) -> bool:
    """Whether a cache with keys of this device, type and shape can be served."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and keys.shape[2] % TOKENS == 0
    )


def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """`paged_attention.store_tokens` for what `supports` admits."""
    new_keys, new_values = _rows(new_keys), _rows(new_values)
    T, H, D = new_keys.shape
    tokens = rows_an_item(T)  # where there are many, those of a block are stored by one thread
    _store_kernel(keys.shape[3], D, keys.element_size())(
        -(-T // tokens),
        T,
        tokens,
        H,
        keys.data_ptr(),
        values.data_ptr(),
        new_keys.data_ptr(),
        new_values.data_ptr(),
        new_keys.stride(0),
        new_values.stride(0),
        blocks.data_ptr(),
        offsets.data_ptr(),
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
    query = _rows(query)
    T, Hq, D = query.shape
    H = keys.shape[1]
    kernel, most = _decode_kernel(keys.shape[3], D, Hq // H, _type_name(keys.dtype), softcap is not None)
    heads = _fitting_heads(H, most, T, torch.get_num_threads())
    kernel(
        T * (H // heads),
        T,
        H,
        heads,
        block_tables.stride(0),
        query.data_ptr(),
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        block_tables.data_ptr(),
        rows.data_ptr(),
        context_lens.data_ptr(),
        out.data_ptr(),
        window or 0,
        _bits(scale),
        _bits(softcap or 0.0),
    )


def add_attention(
    program: Program,
    keys: Tensor,
    values: Tensor,
    *,
    merged: int,
    num_heads: int,
    scale: float,
    window: int | None,
    out: int,
) -> None:
    """Make `store` and `decode` of `T` tokens steps of a program.

    merged: address of the heads of queries, keys and values of each token, [T, num_heads + 2 Hkv, D]. out: address of
    [T, num_heads, D]. What the batch decides is given at each run: the addresses "blocks", "offsets", "tables",
    "chunks" and "lens", "width" (blocks in a row of the tables), "rows" (`rows_an_item` of T) and "heads"
    (`heads_an_item`).
    """
    H, D, itemsize = keys.shape[1], keys.shape[2], keys.element_size()
    stride, cache = (num_heads + 2 * H) * D, (keys.data_ptr(), values.data_ptr())
    new_keys = merged + num_heads * D * itemsize
    new = (new_keys, new_keys + H * D * itemsize, stride, stride)
    block_size = keys.shape[3]
    program.add("attention", _store_kernel(block_size, D, itemsize), "T", "rows", H, *cache, *new, "blocks", "offsets")
    kernel, _ = _decode_kernel(block_size, D, num_heads // H, _type_name(keys.dtype), False)
    shape = ("T", H, "heads", "width", merged, stride)
    batch = ("tables", "chunks", "lens")
    program.add("attention", kernel, *shape, *cache, *batch, out, window or 0, _bits(scale), _bits(0.0))


def heads_an_item(keys: Tensor, num_heads: int, num_rows: int) -> int:
    """Heads of keys and values that a thread takes at a time: many, which lie together, if enough items are left."""
    H, D = keys.shape[1], keys.shape[2]
    _, most = _decode_kernel(keys.shape[3], D, num_heads // H, _type_name(keys.dtype), False)
    return _fitting_heads(H, most, num_rows, torch.get_num_threads())


@cache
def _fitting_heads(num_heads: int, most: int, num_rows: int, num_threads: int) -> int:
    fitting = [n for n in range(1, min(most, num_heads) + 1) if num_heads % n == 0]
    return max((n for n in fitting if num_rows * (num_heads // n) >= _ITEMS_A_THREAD * num_threads), default=1)


@cache
def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _rows(x: Tensor) -> Tensor:
    """x [T, H, D] with each token's [H, D] contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _store_kernel(block_size: int, dim: int, itemsize: int) -> Kernel:
    """The compiled `store` for blocks and rows of this size and items of this many bytes."""
    D, item = dim, _ITEMS[itemsize]

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (12,), np.int64)
        T, tokens, H = a[1], a[2], a[3]
        new_keys, new_values = carray(pointer(a[6]), (T * a[8],), item), carray(pointer(a[7]), (T * a[9],), item)
        blocks, offsets = carray(pointer(a[10]), (T,), np.int64), carray(pointer(a[11]), (T,), np.int64)
        while True:
            start = next_item(data) * tokens
            if start >= T:
                break
            for t in range(start, min(start + tokens, T)):
                offset = offsets[t]
                for h in range(H):
                    at = (blocks[t] * H + h) * D * block_size * itemsize
                    k = carray(pointer(a[4] + at), (D, block_size), item)
                    v = carray(pointer(a[5] + at), (block_size, D), item)
                    for d in range(D):
                        k[d, offset] = new_keys[t * a[8] + h * D + d]
                    for d in range(D):
                        v[offset, d] = new_values[t * a[9] + h * D + d]

    return Kernel(kernel, 11)


@cache
def _decode_kernel(block_size: int, dim: int, groups: int, dtype: str, capped: bool) -> tuple[Kernel, int]:
    """The compiled `decode` for `groups` query heads a head of keys and values, and how many of those an item takes."""
    D, G = dim, groups
    part = max(g for g in range(1, G + 1) if G % g == 0 and (g == 1 or g * D <= _MAX_ACCUMULATORS * TOKENS))
    parts, itemsize = G // part, 4 if dtype == "float32" else 2
    load_query, attend_block = _load_query(D, part, dtype), _attend_block(D, part, dtype, capped)
    finish = _finish(D, part, dtype)
    block_bytes, part_bytes = D * TOKENS * itemsize, part * D * itemsize
    part_state = part * (2 * TOKENS + 2 * D)  # running maximum, running sum, query, output
    most = max(1, _STATE_FLOATS // (parts * part_state))
    item_state, state_bytes = scratch(most * parts * part_state), 4 * part_state
    gathered, gather = scratch(2 * D * TOKENS), _gather(block_size, D, itemsize)

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (16,), np.int64)
        T, H, heads, width, window = a[1], a[2], a[3], a[4], a[13]
        rows, lens = carray(pointer(a[10]), (T,), np.int32), carray(pointer(a[11]), (T,), np.int32)
        state, space = item_state(), gathered()
        items = T * (H // heads)
        item = next_item(data)
        while item < items:
            after = next_item(data)  # taken early, so that its first blocks are fetched while this one's last are used
            t, h0 = item // (H // heads), item % (H // heads) * heads
            later = after if after < items else item
            t2, h2 = later // (H // heads), later % (H // heads) * heads
            table = carray(pointer(a[9] + rows[t] * width * 4), (width,), np.int32)
            table2 = carray(pointer(a[9] + rows[t2] * width * 4), (width,), np.int32)
            stop = np.int64(lens[t])
            start = max(0, stop - window) if window > 0 else 0
            first, last = start // TOKENS, (stop - 1) // TOKENS
            stop2 = np.int64(lens[t2])
            first2, last2 = (max(0, stop2 - window) if window > 0 else 0) // TOKENS, (stop2 - 1) // TOKENS
            query = a[5] + (t * a[6] + h0 * G * D) * itemsize
            for p in range(heads * parts):
                load_query((state + p * state_bytes, query + p * part_bytes, a[14]))
            for b in range(first, last + 1):
                low, high = max(start - b * TOKENS, 0), min(stop - b * TOKENS, TOKENS)
                for h in range(heads):
                    if block_size == TOKENS:
                        at = (table[b] * H + h0 + h) * block_bytes
                        coming = h + _AHEAD
                        b3, h3 = b + coming // heads, coming % heads
                        if b3 <= last:
                            ahead = (table[b3] * H + h0 + h3) * block_bytes
                        else:
                            ahead = (table2[min(first2 + b3 - last - 1, last2)] * H + h2 + h3) * block_bytes
                        keys, values = a[7] + at, a[8] + at
                    else:
                        keys, values, ahead = space, space + block_bytes, 0
                        gather(a[7], a[8], table, H, h0 + h, b * TOKENS, low, high, space)
                    for p in range(h * parts, (h + 1) * parts):
                        mine = state + p * state_bytes
                        attend_block((mine, keys, values, low, high, a[7] + ahead, a[8] + ahead, a[15]))
            out = a[12] + (t * H + h0) * G * D * itemsize
            for p in range(heads * parts):
                finish((state + p * state_bytes, out + p * part_bytes))
            item = after

    return Kernel(kernel, 15), most


def _gather(block_size: int, dim: int, itemsize: int) -> Any:
    """A function for compiled code that copies keys and values of positions `start` + [low, high) to one place."""
    D, item = dim, _ITEMS[itemsize]

    @njit
    def gather(keys, values, table, H, h, start, low, high, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        k, v = carray(pointer(out), (D, TOKENS), item), carray(pointer(out + D * TOKENS * itemsize), (TOKENS, D), item)
        for lane in range(low, high):
            block, offset = table[(start + lane) // block_size], (start + lane) % block_size
            at = (block * H + h) * D * block_size * itemsize
            key = carray(pointer(keys + at), (D, block_size), item)
            value = carray(pointer(values + at), (block_size, D), item)
            for d in range(D):
                k[d, lane] = key[d, offset]
                v[lane, d] = value[offset, d]

    return gather


# The state of the query heads of a part: [part, 16] running maximum in every lane, [part, 16] running sum by lane,
# [part, D] query times scale, [part, D] output so far.


def _load_query(D: int, part: int, dtype: str) -> Any:
    """Set up the state: query times scale, nothing seen yet."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, query = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        scale = v.splat(b.bitcast(b.trunc(args[2], _I32), _F32))
        for g in range(part):
            v.store(v.real(-3e38), state, g * TOKENS)
            v.store(v.real(0.0), state, (part + g) * TOKENS)
        for at in range(0, part * D, TOKENS):
            v.store(b.fmul(v.load_items(query, at), scale), state, part * 2 * TOKENS + at)
            v.store(v.real(0.0), state, part * (2 * TOKENS + D) + at)

    return statement(build)


def _attend_block(D: int, part: int, dtype: str, capped: bool) -> Any:
    """Take lanes [low, high) of one block into the state, while the block two ahead is being fetched."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, softcap = v.pointer(args[0], _F32), v.splat(b.bitcast(b.trunc(args[7], _I32), _F32))
        lane = ir.Constant(_VI, list(range(TOKENS)))
        low, high = (v.splat(b.trunc(arg, _I32)) for arg in args[3:5])
        valid = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
        scores = _scores(v, D, part, state, v.pointer(args[1], v.item), args[5])
        if capped:
            scores = [v.cap(score, softcap) for score in scores]
        weights, shrinks = _softmax(v, part, state, scores, valid)
        _add_values(v, D, part, state, weights, shrinks, valid, v.pointer(args[2], v.item), args[6])

    return statement(build)


def _scores(v: Vectors, D: int, part: int, state: Any, keys: Any, next_keys: Any) -> list[Any]:
    """Products of each query of the part with the block's 16 keys."""
    halves = [[v.real(0.0), v.real(0.0)] for _ in range(part)]  # even and odd d: shorter chains of additions
    for d in range(D):
        key = v.load_items(keys, d * TOKENS)
        if d < v.lines(D * TOKENS):
            v.prefetch(next_keys, d * 64)
        for g in range(part):
            q = v.splat(v.b.load(v.at(state, part * 2 * TOKENS + g * D + d)))
            halves[g][d % 2] = v.fma(q, key, halves[g][d % 2])
    return [v.b.fadd(*pair) for pair in halves]


def _softmax(v: Vectors, part: int, state: Any, scores: list[Any], valid: Any) -> tuple[list[Any], list[Any]]:
    """Weights of the block's keys relative to the new running maximum, and what that shrinks earlier ones by."""
    b, weights, shrinks = v.b, [], []
    for g, score in enumerate(scores):
        score = b.select(valid, score, v.real(-3e38))
        before = v.load(state, g * TOKENS)
        most = v.splat(v.highest(score))
        most = b.select(b.fcmp_ordered(">", most, before), most, before)
        shrink = v.exp(b.fsub(before, most))
        weight = b.select(valid, v.exp(b.fsub(score, most)), v.real(0.0))
        v.store(most, state, g * TOKENS)
        v.store(v.fma(v.load(state, (part + g) * TOKENS), shrink, weight), state, (part + g) * TOKENS)
        weights.append(weight)
        shrinks.append(shrink)
    return weights, shrinks


def _add_values(
    v: Vectors,
    D: int,
    part: int,
    state: Any,
    weights: list[Any],
    shrinks: list[Any],
    valid: Any,
    values: Any,
    next_values: Any,
) -> None:
    """Add the block's weighted values to the shrunk output so far."""
    b, out_at, lines = v.b, part * (2 * TOKENS + D), v.lines(D * TOKENS)
    outs = [
        [b.fmul(v.load(state, out_at + g * D + at), shrink) for at in range(0, D, TOKENS)]
        for g, shrink in enumerate(shrinks)
    ]
    for j in range(TOKENS):
        # Lanes that are not valid may hold what a freed block held, even NaN: their values count as 0.
        here = v.splat(b.extract_element(valid, ir.Constant(_I32, j)))
        row = [b.select(here, v.load_items(values, j * D + at), v.real(0.0)) for at in range(0, D, TOKENS)]
        for line in range(j * lines // TOKENS, (j + 1) * lines // TOKENS):
            v.prefetch(next_values, line * 64)
        for g in range(part):
            weight = v.splat(b.extract_element(weights[g], ir.Constant(_I32, j)))
            outs[g] = [v.fma(weight, value, out) for value, out in zip(row, outs[g], strict=True)]
    for g in range(part):
        for at, out in enumerate(outs[g]):
            v.store(out, state, out_at + g * D + at * TOKENS)


def _finish(D: int, part: int, dtype: str) -> Any:
    """Divide the output by the sum of weights and store it."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, target = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        for g in range(part):
            total = v.sum(v.load(state, (part + g) * TOKENS))
            for at in range(0, D, TOKENS):
                out = b.fdiv(v.load(state, part * (2 * TOKENS + D) + g * D + at), v.splat(total))
                v.store_items(out, target, g * D + at)

    return statement(build)
