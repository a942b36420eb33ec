"""What the compiled CPU kernels are made of: work counters, pointers, and vectors of 16 float32.

LLVM lowers a vector of 16 to whatever the processor has: one AVX-512 register, two of AVX2, four of NEON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "Vectors", "call", "next_item", "pointer", "scratch", "statement"]

LANES = 16
"""Values in a vector."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF, _VI, _VH = (ir.VectorType(item, LANES) for item in (_F32, _I32, ir.IntType(16)))


class _BFloat16(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOAT16 = _BFloat16()
_PAIRS = ir.VectorType(_BFLOAT16, 2 * LANES)


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


Builder = Any
"""llvmlite's IRBuilder."""


def statement(emit: Callable[[Builder, list[Any]], None]) -> Any:
    """A function for compiled code that takes one tuple of int64 and runs the instructions `emit` makes for it."""

    def build(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Any:
        emit(builder, cgutils.unpack_tuple(builder, arguments[0]))
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    def typing(_context: Any, arguments: Any) -> tuple[Any, Any]:
        return types.void(arguments), build

    return intrinsic(typing)


def scratch(size: int) -> Any:
    """A function for compiled code: the address of `size` float32 on the calling thread's stack."""

    def build(_context: Any, builder: Builder, _signature: Any, _arguments: Any) -> Any:
        place = cgutils.alloca_once(builder, _F32, ir.Constant(_I32, size))
        place.align = 64
        return builder.ptrtoint(place, _I64)

    def typing(_context: Any) -> tuple[Any, Any]:
        return types.int64(), build

    return intrinsic(typing)


def _pointer(_context: Any, address: Any) -> tuple[Any, Any]:
    def build(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), build


def _next_item(_context: Any, counter: Any) -> tuple[Any, Any]:
    def build(_context: Any, builder: Builder, _signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "monotonic")

    return types.int64(counter), build


def _call(b: Builder, args: list[Any]) -> None:
    data = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [data])
    b.call(b.inttoptr(args[0], kind.as_pointer()), [b.inttoptr(args[1], data)])


call = statement(_call)
"""For compiled code, `call((function, data))`: call the `void function(void *data)` at an address."""

pointer = intrinsic(_pointer)
"""For compiled code: an address as a pointer."""

next_item = intrinsic(_next_item)
"""For compiled code: atomically fetch the int64 at a pointer and add one to it."""


class Vectors:
    """Short names for the vector instructions that the kernels are made of."""

    def __init__(self, builder: Any, dtype: str) -> None:
        self.b = builder
        self.dtype = dtype
        self.item = {"float32": _F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}[dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an item of the tensors' type."""
        return 4 if self.dtype == "float32" else 2

    def lines(self, num_items: int) -> int:
        """Cache lines that this many items fill."""
        return num_items * self.itemsize // 64

    def external(self, name: str, result: Any, *arguments: Any) -> Any:
        """The LLVM intrinsic of this name."""
        known = self.b.module.globals.get(name)
        return known or ir.Function(self.b.module, ir.FunctionType(result, arguments), name)

    def pointer(self, address: Any, kind: Any) -> Any:
        """An address as a pointer to values of this kind."""
        return self.b.inttoptr(address, kind.as_pointer())

    def at(self, base: Any, index: int) -> Any:
        """The address of base[index]."""
        return self.b.gep(base, [ir.Constant(_I64, index)])

    def load(self, base: Any, index: int) -> Any:
        """16 float32 from base[index:]."""
        value = self.b.load(self.b.bitcast(self.at(base, index), _VF.as_pointer()))
        value.align = 4
        return value

    def load_unit(self, base: Any, index: int) -> Any:
        """The float32 base[index], which may lie anywhere."""
        value = self.b.load(self.at(base, index))
        value.align = 2
        return value

    def store(self, value: Any, base: Any, index: int) -> None:
        """Store a vector at base[index:]."""
        self.b.store(value, self.b.bitcast(self.at(base, index), value.type.as_pointer())).align = 2

    def load_items(self, base: Any, index: int) -> Any:
        """16 items of the tensors' type from base[index:], as float32."""
        kind = ir.VectorType(self.item, LANES)
        value = self.b.load(self.b.bitcast(self.at(base, index), kind.as_pointer()))
        value.align = 2
        if self.dtype == "float32":
            return value
        if self.dtype == "float16":
            return self.b.fpext(value, _VF)
        return self._widened(value)

    def rounded(self, value: Any) -> Any:
        """The value as it is after being stored as the tensors' type: rounded to nearest even."""
        if self.dtype == "float32":
            return value
        if self.dtype == "float16":
            return self.b.fpext(self.b.fptrunc(value, ir.VectorType(self.item, LANES)), _VF)
        return self._widened(self._bfloat16_bits(value))

    def store_items(self, value: Any, base: Any, index: int) -> None:
        """Store 16 float32 as items of the tensors' type, rounding to nearest even."""
        if self.dtype == "float16":
            value = self.b.fptrunc(value, ir.VectorType(self.item, LANES))
        elif self.dtype == "bfloat16":
            value = self._bfloat16_bits(value)
        self.store(value, base, index)

    def splat_item(self, base: Any, index: int) -> Any:
        """base[index], a float32 or bfloat16, as float32 in every lane."""
        if self.dtype == "float32":
            return self.splat(self.b.load(self.at(base, index)))
        bits = self.b.zext(self.b.load(self.at(base, index)), _I32)
        return self.splat(self.b.bitcast(self.b.shl(bits, ir.Constant(_I32, 16)), _F32))

    def silu(self, x: Any) -> Any:
        """x / (1 + exp(-x))."""
        return self.b.fdiv(x, self.b.fadd(self.real(1.0), self.exp(self.b.fneg(x))))

    def _widened(self, bits: Any) -> Any:
        """16 bfloat16 in the bits of int16 as float32."""
        return self.b.bitcast(self.b.shl(self.b.zext(bits, _VI), self.whole(16)), _VF)

    def _bfloat16_bits(self, value: Any) -> Any:
        """16 float32 as bfloat16, rounded to nearest even, in the bits of 16 int16."""
        return self.b.bitcast(self.b.fptrunc(value, ir.VectorType(_BFLOAT16, LANES)), _VH)

    def real(self, value: float) -> Any:
        """A vector of this constant."""
        return ir.Constant(_VF, [value] * LANES)

    def whole(self, value: int) -> Any:
        """A vector of this constant."""
        return ir.Constant(_VI, [value] * LANES)

    def splat(self, scalar: Any) -> Any:
        """A vector with the scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, self.whole(0))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x · y + z, rounded once."""
        return self.b.call(self.external("llvm.fma.v16f32", _VF, _VF, _VF, _VF), [x, y, z])

    def dot(self, total: Any, x: Any, y: Any, *, native: bool) -> Any:
        """total + x · y lane by lane; in bfloat16 a lane holds a pair, total + x[1] · y[1] + x[0] · y[0].

        Products of bfloat16 are exact in float32; each addition is rounded to nearest even. native: by the processor's
        own instruction for pairs, which takes and gives denormal numbers as zero.
        """
        if self.dtype == "float32":
            return self.fma(x, y, total)
        if native:
            dot = self.external("llvm.x86.avx512bf16.dpbf16ps.512", _VF, _VF, _PAIRS, _PAIRS)
            return self.b.call(dot, [total, self.b.bitcast(x, _PAIRS), self.b.bitcast(y, _PAIRS)])
        for first, second in zip(self._split(x), self._split(y), strict=True):
            total = self.fma(first, second, total)
        return total

    def _split(self, pairs: Any) -> list[Any]:
        """The second and the first of 16 pairs of bfloat16, as float32."""
        bits = self.b.bitcast(pairs, _VI)
        parts = self.b.and_(bits, self.whole(0xFFFF0000)), self.b.shl(bits, self.whole(16))
        return [self.b.bitcast(part, _VF) for part in parts]

    def pairs(self, even: Any, odd: Any) -> Any:
        """Two vectors rounded to bfloat16, item by item in turn: 16 pairs, each in the bits of a float32."""
        order = self._lanes([lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)])
        return self.b.bitcast(
            self.b.shuffle_vector(self._bfloat16_bits(even), self._bfloat16_bits(odd), order), even.type
        )

    def halves(self, pairs: Any) -> list[Any]:
        """16 pairs of bfloat16 as the first 16 and the last 16 of 32 float32."""
        bits = self.b.bitcast(pairs, ir.VectorType(ir.IntType(16), 2 * LANES))
        parts = (self._lanes(list(range(start, start + LANES))) for start in (0, LANES))
        return [self._widened(self.b.shuffle_vector(bits, bits, part)) for part in parts]

    def transposed(self, rows: list[Any]) -> list[Any]:
        """The 16 columns of 16 vectors: pairs that differ in one bit of their number exchange halves, bit by bit."""
        rows, bit = list(rows), LANES // 2
        lanes = range(LANES)
        while bit:
            low = self._lanes([LANES + (lane ^ bit) if lane & bit else lane for lane in lanes])
            high = self._lanes([LANES + lane if lane & bit else lane ^ bit for lane in lanes])
            for i in lanes:
                if not i & bit:
                    pair = rows[i], rows[i | bit]
                    rows[i], rows[i | bit] = (self.b.shuffle_vector(*pair, order) for order in (low, high))
            bit //= 2
        return rows

    def _lanes(self, order: list[int]) -> Any:
        return ir.Constant(ir.VectorType(_I32, len(order)), order)

    def sqrt(self, x: Any) -> Any:
        """The square root."""
        return self.b.call(self.external("llvm.sqrt.v16f32", _VF, _VF), [x])

    def exp(self, x: Any) -> Any:
        """exp, to one unit in the last place or so; NaN stays NaN."""
        b = self.b
        x = b.fmul(x, self.real(_LOG2E))
        x = b.select(b.fcmp_ordered("<", x, self.real(-126.0)), self.real(-126.0), x)
        x = b.select(b.fcmp_ordered(">", x, self.real(126.0)), self.real(126.0), x)
        whole = b.call(self.external("llvm.floor.v16f32", _VF, _VF), [b.fadd(x, self.real(0.5))])
        rest = b.fsub(x, whole)
        value = self.real(_EXP2[0])
        for coefficient in _EXP2[1:]:
            value = self.fma(value, rest, self.real(coefficient))
        power = b.bitcast(b.shl(b.add(b.fptosi(whole, _VI), self.whole(127)), self.whole(23)), _VF)
        return b.fmul(value, power)

    def cap(self, x: Any, softcap: Any) -> Any:
        """softcap · tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2y) + 1)."""
        b = self.b
        doubled = b.fmul(b.fdiv(x, softcap), self.real(2.0))
        tanh = b.fsub(self.real(1.0), b.fdiv(self.real(2.0), b.fadd(self.exp(doubled), self.real(1.0))))
        return b.fmul(softcap, tanh)

    def highest(self, x: Any) -> Any:
        """The largest lane."""
        return self.fold(x, lambda p, q: self.b.select(self.b.fcmp_ordered(">", p, q), p, q))

    def sum(self, x: Any) -> Any:
        """The sum of the lanes, added in pairs."""
        return self.fold(x, self.b.fadd)

    def fold(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine the upper half of the lanes with the lower until one is left."""
        width = LANES
        while width > 1:
            width //= 2
            low, high = (
                self.b.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width))))
                for start in (0, width)
            )
            x = combine(low, high)
        return self.b.extract_element(x, ir.Constant(_I32, 0))

    def prefetch(self, address: Any, offset_bytes: int, *, level: int = 1) -> None:
        """Start reading the cache line there, into the first cache or only the second."""
        b, byte = self.b, ir.IntType(8).as_pointer()
        fetch = self.external("llvm.prefetch.p0", ir.VoidType(), byte, _I32, _I32, _I32)
        where = b.inttoptr(b.add(address, ir.Constant(_I64, offset_bytes)), byte)
        b.call(fetch, [where, ir.Constant(_I32, 0), ir.Constant(_I32, 4 - level), ir.Constant(_I32, 1)])
