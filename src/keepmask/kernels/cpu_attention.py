"""Decode attention on CPUs: each key and value is read once, by explicit vector code compiled at run time by numba.

A block holds 16 tokens. Its keys are stored transposed, so that one vector holds one dimension of all 16 keys, and the
scores of a query come out as one vector with no horizontal sums. The softmax is online (Milakov and Gimelshein 2018):
keys and values of a block are read together, in one pass. The order of operations within a row depends on nothing but
the row, so neither the batch nor the number of threads changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from keepmask.kernels import cpu_team

__all__ = ["BLOCK_SIZE", "decode", "store", "supports"]

BLOCK_SIZE = 16
"""Tokens in a block: the lanes of one vector of float32."""

_MAX_ACCUMULATORS = 16  # vectors of output held in registers at once; AVX-512 has 32 registers

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF, _VI = ir.VectorType(_F32, BLOCK_SIZE), ir.VectorType(_I32, BLOCK_SIZE)
_VB = ir.VectorType(ir.IntType(1), BLOCK_SIZE)

# exp2 on [-0.5, 0.5] by a polynomial of degree 6 (minimax, relative error below 1e-7)
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_LOG2E = 1.4426950408889634


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

    keys: [num_blocks, Hkv, D, 16]. values: [num_blocks, Hkv, 16, D]. new_keys, new_values: [T, Hkv, D]. blocks, offsets:
    [T] int64.
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
    cpu_team.run(_store_kernel(D, keys.element_size()), arguments.ctypes.data)


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
    cpu_team.run(kernel, arguments.ctypes.data)
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
        new_keys, new_values = carray(_pointer(a[5]), (T * a[7],), item), carray(_pointer(a[6]), (T * a[8],), item)
        blocks, offsets = carray(_pointer(a[9]), (T,), np.int64), carray(_pointer(a[10]), (T,), np.int64)
        while True:
            t = _next(data)
            if t >= T:
                break
            offset = offsets[t]
            for h in range(H):
                at = (blocks[t] * H + h) * D * BLOCK_SIZE * itemsize
                k = carray(_pointer(a[3] + at), (D, BLOCK_SIZE), item)
                v = carray(_pointer(a[4] + at), (BLOCK_SIZE, D), item)
                for d in range(D):
                    k[d, offset] = new_keys[t * a[7] + h * D + d]
                    v[offset, d] = new_values[t * a[8] + h * D + d]

    _kept.append(kernel)
    return int(kernel.address)


@cache
def _decode_kernel(dim: int, groups: int, dtype: str, capped: bool) -> int:
    """Address of the compiled `decode`. groups: query heads that read one head of keys and values."""
    D, G = dim, groups
    part = max(g for g in range(1, G + 1) if G % g == 0 and g * D <= _MAX_ACCUMULATORS * BLOCK_SIZE or g == 1)
    itemsize = 4 if dtype == "float32" else 2
    load_query, attend_block, finish = (
        _load_query(D, part, dtype),
        _attend_block(D, part, dtype, capped),
        _finish(D, part, dtype),
    )
    block_bytes = D * BLOCK_SIZE * itemsize
    scratch = _scratch(part * (2 * BLOCK_SIZE + 2 * D))  # running maximum, running sum, query, output

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (14,), np.int64)
        S, H, width, window = a[1], a[2], a[3], a[11]
        tables = carray(_pointer(a[8]), (S * width,), np.int32)
        lens = carray(_pointer(a[9]), (S,), np.int32)
        state = scratch()
        while True:
            w = _next(data)
            if w >= S * H:
                break
            s, h = w // H, w % H
            stop = np.int64(lens[s])
            start = max(0, stop - window) if window > 0 else 0
            first, last = start // BLOCK_SIZE, (stop - 1) // BLOCK_SIZE
            for p in range(G // part):
                head = h * G + p * part
                load_query(a[4] + (s * a[5] + head * D) * itemsize, state, a[12])
                for b in range(first, last + 1):
                    at = (tables[s * width + b] * H + h) * block_bytes
                    ahead = (tables[s * width + min(b + 2, last)] * H + h) * block_bytes
                    attend_block(
                        state,
                        a[6] + at,
                        a[7] + at,
                        max(start - b * BLOCK_SIZE, 0),
                        min(stop - b * BLOCK_SIZE, BLOCK_SIZE),
                        a[6] + ahead,
                        a[7] + ahead,
                        a[13],
                    )
                finish(state, a[10] + (s * H * G + head) * D * itemsize)

    _kept.append(kernel)
    return int(kernel.address)


@intrinsic
def _pointer(context, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """An address as a pointer."""
    return types.voidptr(address), lambda _c, b, _s, args: b.inttoptr(args[0], ir.IntType(8).as_pointer())


def _scratch(size: int) -> Any:
    """Address of `size` float32 on the calling thread's stack."""

    def build(context: Any, b: Any, _signature: Any, _args: Any) -> Any:
        place = cgutils.alloca_once(b, _F32, ir.Constant(_I32, size))
        place.align = 64
        return b.ptrtoint(place, _I64)

    @intrinsic
    def scratch(context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
        return types.int64(), build

    return scratch


@intrinsic
def _next(context, counter):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    """Atomically fetch the int64 at the pointer and add one to it."""

    def build(_context, b, _signature, args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return b.atomic_rmw("add", b.bitcast(args[0], _I64.as_pointer()), ir.Constant(_I64, 1), "monotonic")

    return types.int64(counter), build


class _Vectors:
    """Short names for the vector instructions that the kernels are made of."""

    def __init__(self, builder: Any, dtype: str) -> None:
        self.b = builder
        self.dtype = dtype
        self.item = {"float32": _F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}[dtype]

    def external(self, name: str, result: Any, *arguments: Any) -> Any:
        """The LLVM intrinsic of this name."""
        known = self.b.module.globals.get(name)
        return known or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.b.inttoptr(address, kind.as_pointer())

    def at(self, base: Any, index: int) -> Any:
        return self.b.gep(base, [ir.Constant(_I64, index)])

    def load(self, base: Any, index: int) -> Any:
        """16 float32 from base[index:]."""
        value = self.b.load(self.b.bitcast(self.at(base, index), _VF.as_pointer()))
        value.align = 4
        return value

    def store(self, value: Any, base: Any, index: int) -> None:
        self.b.store(value, self.b.bitcast(self.at(base, index), value.type.as_pointer())).align = 2

    def load_items(self, base: Any, index: int) -> Any:
        """16 items of the cache's type from base[index:], as float32."""
        kind = ir.VectorType(self.item, BLOCK_SIZE)
        value = self.b.load(self.b.bitcast(self.at(base, index), kind.as_pointer()))
        value.align = 2
        if self.dtype == "float32":
            return value
        if self.dtype == "float16":
            return self.b.fpext(value, _VF)
        return self.b.bitcast(self.b.shl(self.b.zext(value, _VI), self.int(16)), _VF)

    def store_items(self, value: Any, base: Any, index: int) -> None:
        """Store 16 float32 as items of the cache's type, rounding to nearest even."""
        if self.dtype == "float16":
            value = self.b.fptrunc(value, ir.VectorType(self.item, BLOCK_SIZE))
        elif self.dtype == "bfloat16":
            bits = self.b.bitcast(value, _VI)
            odd = self.b.and_(self.b.lshr(bits, self.int(16)), self.int(1))
            rounded = self.b.lshr(self.b.add(bits, self.b.add(odd, self.int(0x7FFF))), self.int(16))
            quiet = self.b.or_(self.b.lshr(bits, self.int(16)), self.int(0x40))  # rounding could turn a NaN into inf
            nan = self.b.fcmp_unordered("uno", value, value)
            value = self.b.trunc(self.b.select(nan, quiet, rounded), ir.VectorType(self.item, BLOCK_SIZE))
        self.store(value, base, index)

    def float(self, value: float) -> Any:
        return ir.Constant(_VF, [value] * BLOCK_SIZE)

    def int(self, value: int) -> Any:
        return ir.Constant(_VI, [value] * BLOCK_SIZE)

    def splat(self, scalar: Any) -> Any:
        """A vector with the scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, BLOCK_SIZE), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, self.int(0))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.b.call(self.external("llvm.fma.v16f32", _VF, _VF, _VF, _VF), [x, y, z])

    def exp(self, x: Any) -> Any:
        """exp, to one unit in the last place or so; NaN stays NaN."""
        b = self.b
        x = b.fmul(x, self.float(_LOG2E))
        x = b.select(b.fcmp_ordered("<", x, self.float(-126.0)), self.float(-126.0), x)
        x = b.select(b.fcmp_ordered(">", x, self.float(126.0)), self.float(126.0), x)
        whole = b.call(self.external("llvm.floor.v16f32", _VF, _VF), [b.fadd(x, self.float(0.5))])
        rest = b.fsub(x, whole)
        value = self.float(_EXP2[0])
        for coefficient in _EXP2[1:]:
            value = self.fma(value, rest, self.float(coefficient))
        power = b.bitcast(b.shl(b.add(b.fptosi(whole, _VI), self.int(127)), self.int(23)), _VF)
        return b.fmul(value, power)

    def cap(self, x: Any, softcap: Any) -> Any:
        """softcap · tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2y) + 1)."""
        b = self.b
        doubled = b.fmul(b.fdiv(x, softcap), self.float(2.0))
        tanh = b.fsub(self.float(1.0), b.fdiv(self.float(2.0), b.fadd(self.exp(doubled), self.float(1.0))))
        return b.fmul(softcap, tanh)

    def highest(self, x: Any) -> Any:
        """The largest lane."""
        return self.fold(x, lambda p, q: self.b.select(self.b.fcmp_ordered(">", p, q), p, q))

    def sum(self, x: Any) -> Any:
        """The sum of the lanes, added in pairs."""
        return self.fold(x, self.b.fadd)

    def fold(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine the upper half of the lanes with the lower until one is left."""
        width = BLOCK_SIZE
        while width > 1:
            width //= 2
            low, high = (
                self.b.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width))))
                for start in (0, width)
            )
            x = combine(low, high)
        return self.b.extract_element(x, ir.Constant(_I32, 0))

    def prefetch(self, address: Any, offset_bytes: int) -> None:
        """Start reading the cache line there."""
        b, byte = self.b, ir.IntType(8).as_pointer()
        fetch = self.external("llvm.prefetch.p0", ir.VoidType(), byte, _I32, _I32, _I32)
        where = b.inttoptr(b.add(address, ir.Constant(_I64, offset_bytes)), byte)
        b.call(fetch, [where, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])


# The state of one row: [part, 16] running maximum in every lane, [part, 16] running sum by lane, [part, D] query times
# scale, [part, D] output so far.


def _load_query(D: int, part: int, dtype: str) -> Any:
    """Set up the state: query times scale, nothing seen yet."""

    def build(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        v = _Vectors(b, dtype)
        query, state = v.pointer(args[0], v.item), v.pointer(args[1], _F32)
        scale = v.splat(b.bitcast(b.trunc(args[2], _I32), _F32))
        for g in range(part):
            v.store(v.float(-3e38), state, g * BLOCK_SIZE)
            v.store(v.float(0.0), state, (part + g) * BLOCK_SIZE)
        for at in range(0, part * D, BLOCK_SIZE):
            v.store(b.fmul(v.load_items(query, at), scale), state, part * 2 * BLOCK_SIZE + at)
            v.store(v.float(0.0), state, part * (2 * BLOCK_SIZE + D) + at)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    @intrinsic
    def load_query(context, query, state, scale):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
        return types.void(query, state, scale), build

    return load_query


def _attend_block(D: int, part: int, dtype: str, capped: bool) -> Any:
    """Take lanes [low, high) of one block into the state, while the block two ahead is being fetched."""
    itemsize = 4 if dtype == "float32" else 2
    lines = D * BLOCK_SIZE * itemsize // 64  # cache lines in a block's keys, and in its values

    def build(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        v = _Vectors(b, dtype)
        state = v.pointer(args[0], _F32)
        keys, values = v.pointer(args[1], v.item), v.pointer(args[2], v.item)
        lane = ir.Constant(_VI, list(range(BLOCK_SIZE)))
        low, high = (v.splat(b.trunc(arg, _I32)) for arg in args[3:5])
        valid = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
        query_at, out_at = part * 2 * BLOCK_SIZE, part * (2 * BLOCK_SIZE + D)

        halves = [[v.float(0.0), v.float(0.0)] for _ in range(part)]  # even and odd d: shorter chains of additions
        for d in range(D):
            key = v.load_items(keys, d * BLOCK_SIZE)
            if d < lines:
                v.prefetch(args[5], d * 64)
            for g in range(part):
                q = v.splat(b.load(v.at(state, query_at + g * D + d)))
                halves[g][d % 2] = v.fma(q, key, halves[g][d % 2])

        weights, outs = [], []
        for g in range(part):
            score = b.fadd(*halves[g])
            if capped:
                score = v.cap(score, v.splat(b.bitcast(b.trunc(args[7], _I32), _F32)))
            score = b.select(valid, score, v.float(-3e38))
            before = v.load(state, g * BLOCK_SIZE)
            most = v.splat(v.highest(score))
            most = b.select(b.fcmp_ordered(">", most, before), most, before)
            shrink = v.exp(b.fsub(before, most))
            weight = b.select(valid, v.exp(b.fsub(score, most)), v.float(0.0))
            total = v.fma(v.load(state, (part + g) * BLOCK_SIZE), shrink, weight)
            v.store(most, state, g * BLOCK_SIZE)
            v.store(total, state, (part + g) * BLOCK_SIZE)
            weights.append(weight)
            outs.append([b.fmul(v.load(state, out_at + g * D + at), shrink) for at in range(0, D, BLOCK_SIZE)])
        for j in range(BLOCK_SIZE):
            # Lanes that are not valid may hold what a freed block held, even NaN: their values count as 0.
            here = v.splat(b.extract_element(valid, ir.Constant(_I32, j)))
            row = [b.select(here, v.load_items(values, j * D + at), v.float(0.0)) for at in range(0, D, BLOCK_SIZE)]
            for line in range(j * lines // BLOCK_SIZE, (j + 1) * lines // BLOCK_SIZE):
                v.prefetch(args[6], line * 64)
            for g in range(part):
                weight = v.splat(b.extract_element(weights[g], ir.Constant(_I32, j)))
                outs[g] = [v.fma(weight, value, out) for value, out in zip(row, outs[g], strict=True)]
        for g in range(part):
            for at, out in enumerate(outs[g]):
                v.store(out, state, out_at + g * D + at * BLOCK_SIZE)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    @intrinsic
    def attend_block(context, state, keys, values, low, high, next_keys, next_values, softcap):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001, E501
        return types.void(state, keys, values, low, high, next_keys, next_values, softcap), build

    return attend_block


def _finish(D: int, part: int, dtype: str) -> Any:
    """Divide the output by the sum of weights and store it."""

    def build(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        v = _Vectors(b, dtype)
        state, target = v.pointer(args[0], _F32), v.pointer(args[1], v.item)
        for g in range(part):
            total = v.sum(v.load(state, (part + g) * BLOCK_SIZE))
            for at in range(0, D, BLOCK_SIZE):
                out = b.fdiv(v.load(state, part * (2 * BLOCK_SIZE + D) + g * D + at), v.splat(total))
                v.store_items(out, target, g * D + at)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    @intrinsic
    def finish(context, state, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
        return types.void(state, target), build

    return finish
