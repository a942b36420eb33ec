"""Decode attention on CPUs: each key and value is read once, by explicit vector code compiled at run time by numba.

A block holds 16 tokens. Its keys are stored transposed, so that one vector holds one dimension of all 16 keys, and the
scores of a query come out as one vector with no horizontal sums. The softmax is online (Milakov and Gimelshein 2018):
keys and values of a block are read together, in one pass. The order of operations within a row depends on nothing but
the row, so neither the batch nor the number of threads changes a bit of the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from torch import Tensor

from keepmask.kernels import cpu_team
from keepmask.kernels.cpu_vectors import LANES, Vectors, next_item, pointer, scratch, statement

__all__ = ["BLOCK_SIZE", "decode", "store", "supports"]

BLOCK_SIZE = LANES
"""Tokens in a block: the lanes of one vector of float32."""

_MAX_ACCUMULATORS = 16  # vectors of output held in registers at once; AVX-512 has 32 registers

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VI = ir.VectorType(_I32, BLOCK_SIZE)


def supports(keys: Tensor) -> bool:
    """Whether a cache with keys of this device, type and shape can be served."""
    return (
        keys.device.type == "cpu"
        and keys.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and keys.shape[3] == BLOCK_SIZE
        and keys.shape[2] % BLOCK_SIZE == 0
    )


def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """keys[blocks[t], :, :, offsets[t]] = new_keys[t], and values[blocks[t], :, offsets[t]] = new_values[t].

    keys: [num_blocks, Hkv, D, 16]. values: [num_blocks, Hkv, 16, D]. new_keys, new_values: [T, Hkv, D].
    blocks, offsets: [T] int64.
    """
    new_keys, new_values = _rows(new_keys), _rows(new_values)
    T, H, D = new_keys.shape
    arguments = np.array(
        [
            0,
            T,
            H,
            keys.data_ptr(),
            values.data_ptr(),
            new_keys.data_ptr(),
            new_values.data_ptr(),
            new_keys.stride(0),
            new_values.stride(0),
            blocks.data_ptr(),
            offsets.data_ptr(),
        ],
        np.int64,
    )
    cpu_team.run(_store_kernel(D, keys.element_size()), arguments.ctypes.data, T)


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`kernels.paged_attention.decode_attention` for what `supports` admits."""
    query = _rows(query)
    S, Hq, D = query.shape
    H = keys.shape[1]
    out = torch.empty(S, Hq, D, dtype=query.dtype)
    arguments = np.array(
        [
            0,
            S,
            H,
            block_tables.stride(0),
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            out.data_ptr(),
            window or 0,
            np.float32(scale).view(np.int32),
            np.float32(softcap or 0).view(np.int32),
        ],
        np.int64,
    )
    kernel = _decode_kernel(D, Hq // H, _type_name(keys.dtype), softcap is not None)
    cpu_team.run(kernel, arguments.ctypes.data, S * H)
    return out


def _rows(x: Tensor) -> Tensor:
    """x [T, H, D] with each token's [H, D] contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_kept: list[Any] = []  # compiled functions, which live as long as the process


@cache
def _store_kernel(dim: int, itemsize: int) -> int:
    """Address of the compiled `store` for rows of this width and item size."""
    D, item = dim, {2: np.uint16, 4: np.uint32}[itemsize]

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (11,), np.int64)
        T, H = a[1], a[2]
        new_keys, new_values = carray(pointer(a[5]), (T * a[7],), item), carray(pointer(a[6]), (T * a[8],), item)
        blocks, offsets = carray(pointer(a[9]), (T,), np.int64), carray(pointer(a[10]), (T,), np.int64)
        while True:
            t = next_item(data)
            if t >= T:
                break
            offset = offsets[t]
            for h in range(H):
                at = (blocks[t] * H + h) * D * BLOCK_SIZE * itemsize
                k = carray(pointer(a[3] + at), (D, BLOCK_SIZE), item)
                v = carray(pointer(a[4] + at), (BLOCK_SIZE, D), item)
                for d in range(D):
                    k[d, offset] = new_keys[t * a[7] + h * D + d]
                    v[offset, d] = new_values[t * a[8] + h * D + d]

    _kept.append(kernel)
    return int(kernel.address)


@cache
def _decode_kernel(dim: int, groups: int, dtype: str, capped: bool) -> int:
    """Address of the compiled `decode`. groups: query heads that read one head of keys and values."""
    D, G = dim, groups
    part = max(g for g in range(1, G + 1) if G % g == 0 and (g == 1 or g * D <= _MAX_ACCUMULATORS * BLOCK_SIZE))
    itemsize = 4 if dtype == "float32" else 2
    load_query, attend_block, finish = (
        _load_query(D, part, dtype),
        _attend_block(D, part, dtype, capped),
        _finish(D, part, dtype),
    )
    block_bytes = D * BLOCK_SIZE * itemsize
    row_state = scratch(part * (2 * BLOCK_SIZE + 2 * D))  # running maximum, running sum, query, output

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (14,), np.int64)
        S, H, width, window = a[1], a[2], a[3], a[11]
        tables = carray(pointer(a[8]), (S * width,), np.int32)
        lens = carray(pointer(a[9]), (S,), np.int32)
        state = row_state()
        while True:
            w = next_item(data)
            if w >= S * H:
                break
            s, h = w // H, w % H
            stop = np.int64(lens[s])
            start = max(0, stop - window) if window > 0 else 0
            first, last = start // BLOCK_SIZE, (stop - 1) // BLOCK_SIZE
            for p in range(G // part):
                head = h * G + p * part
                load_query((state, a[4] + (s * a[5] + head * D) * itemsize, a[12]))
                for b in range(first, last + 1):
                    at = (tables[s * width + b] * H + h) * block_bytes
                    ahead = (tables[s * width + min(b + 2, last)] * H + h) * block_bytes
                    low, high = max(start - b * BLOCK_SIZE, 0), min(stop - b * BLOCK_SIZE, BLOCK_SIZE)
                    attend_block((state, a[6] + at, a[7] + at, low, high, a[6] + ahead, a[7] + ahead, a[13]))
                finish((state, a[10] + (s * H * G + head) * D * itemsize))

    _kept.append(kernel)
    return int(kernel.address)


# The state of one row: [part, 16] running maximum in every lane, [part, 16] running sum by lane, [part, D] query times
# scale, [part, D] output so far.


def _load_query(D: int, part: int, dtype: str) -> Any:
    """Set up the state: query times scale, nothing seen yet."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, query = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        scale = v.splat(b.bitcast(b.trunc(args[2], _I32), _F32))
        for g in range(part):
            v.store(v.real(-3e38), state, g * BLOCK_SIZE)
            v.store(v.real(0.0), state, (part + g) * BLOCK_SIZE)
        for at in range(0, part * D, BLOCK_SIZE):
            v.store(b.fmul(v.load_items(query, at), scale), state, part * 2 * BLOCK_SIZE + at)
            v.store(v.real(0.0), state, part * (2 * BLOCK_SIZE + D) + at)

    return statement(build)


def _attend_block(D: int, part: int, dtype: str, capped: bool) -> Any:
    """Take lanes [low, high) of one block into the state, while the block two ahead is being fetched."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, softcap = v.pointer(args[0], _F32), v.splat(b.bitcast(b.trunc(args[7], _I32), _F32))
        lane = ir.Constant(_VI, list(range(BLOCK_SIZE)))
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
        key = v.load_items(keys, d * BLOCK_SIZE)
        if d < v.lines(D * BLOCK_SIZE):
            v.prefetch(next_keys, d * 64)
        for g in range(part):
            q = v.splat(v.b.load(v.at(state, part * 2 * BLOCK_SIZE + g * D + d)))
            halves[g][d % 2] = v.fma(q, key, halves[g][d % 2])
    return [v.b.fadd(*pair) for pair in halves]


def _softmax(v: Vectors, part: int, state: Any, scores: list[Any], valid: Any) -> tuple[list[Any], list[Any]]:
    """Weights of the block's keys relative to the new running maximum, and what that shrinks earlier ones by."""
    b, weights, shrinks = v.b, [], []
    for g, score in enumerate(scores):
        score = b.select(valid, score, v.real(-3e38))
        before = v.load(state, g * BLOCK_SIZE)
        most = v.splat(v.highest(score))
        most = b.select(b.fcmp_ordered(">", most, before), most, before)
        shrink = v.exp(b.fsub(before, most))
        weight = b.select(valid, v.exp(b.fsub(score, most)), v.real(0.0))
        v.store(most, state, g * BLOCK_SIZE)
        v.store(v.fma(v.load(state, (part + g) * BLOCK_SIZE), shrink, weight), state, (part + g) * BLOCK_SIZE)
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
    b, out_at, lines = v.b, part * (2 * BLOCK_SIZE + D), v.lines(D * BLOCK_SIZE)
    outs = [
        [b.fmul(v.load(state, out_at + g * D + at), shrink) for at in range(0, D, BLOCK_SIZE)]
        for g, shrink in enumerate(shrinks)
    ]
    for j in range(BLOCK_SIZE):
        # Lanes that are not valid may hold what a freed block held, even NaN: their values count as 0.
        here = v.splat(b.extract_element(valid, ir.Constant(_I32, j)))
        row = [b.select(here, v.load_items(values, j * D + at), v.real(0.0)) for at in range(0, D, BLOCK_SIZE)]
        for line in range(j * lines // BLOCK_SIZE, (j + 1) * lines // BLOCK_SIZE):
            v.prefetch(next_values, line * 64)
        for g in range(part):
            weight = v.splat(b.extract_element(weights[g], ir.Constant(_I32, j)))
            outs[g] = [v.fma(weight, value, out) for value, out in zip(row, outs[g], strict=True)]
    for g in range(part):
        for at, out in enumerate(outs[g]):
            v.store(out, state, out_at + g * D + at * BLOCK_SIZE)


def _finish(D: int, part: int, dtype: str) -> Any:
    """Divide the output by the sum of weights and store it."""

    def build(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        state, target = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        for g in range(part):
            total = v.sum(v.load(state, (part + g) * BLOCK_SIZE))
            for at in range(0, D, BLOCK_SIZE):
                out = b.fdiv(v.load(state, part * (2 * BLOCK_SIZE + D) + g * D + at), v.splat(total))
                v.store_items(out, target, g * D + at)

    return statement(build)
