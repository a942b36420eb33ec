"""Intel's matrix tiles (AMX) for the compiled CPU kernels: registers of 16 rows of 64 bytes that multiply one another.

A sum is float32; products of two bfloat16 are added to it pair by pair along the contraction, always in the same order.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir

from keepmask.compiled.vectors import LANES, BFloat16, Vectors, statement

__all__ = ["TILE_BYTES", "Tiles", "available", "configure", "release"]

TILE_BYTES = 1024

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_POINTER = _I8.as_pointer()
_ROW_BYTES, _NUM_TILES = 64, 8
_PALETTE_BYTES = 64
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux, Documentation/arch/x86/xstate.rst


@cache
def available() -> bool:
    """Whether this process may use tiles of bfloat16. Linux gives their registers to processes that ask for them."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    features = llvmlite.binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


class Tiles(Vectors):
    """Short names for the tile instructions. Tiles are named by number, addresses are int64."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder, "bfloat16")

    def clear_tile(self, tile: int) -> None:
        """All zeros."""
        self._do("tilezero", _I8(tile))

    def load_tile(self, tile: int, address: Any, stride: Any) -> None:
        """16 rows of 64 bytes, `stride` bytes apart."""
        self._do("tileloadd64", _I8(tile), self.b.inttoptr(address, _POINTER), stride)

    def store_tile(self, tile: int, address: Any) -> None:
        """Its rows one after the other."""
        self._do("tilestored64", _I8(tile), self.b.inttoptr(address, _POINTER), _I64(_ROW_BYTES))

    def multiply(self, total: int, left: int, right: int) -> None:
        """total[i, j] += Σ_k left[i, 2k] right[k, 2j] + left[i, 2k+1] right[k, 2j+1], over 16 k."""
        self._do("tdpbf16ps", _I8(total), _I8(left), _I8(right))

    def pairs(self, even: Any, odd: Any) -> Any:
        """Two vectors rounded to bfloat16, item by item in turn: 16 pairs, each in the bits of a float32."""
        kind = ir.VectorType(BFloat16(), 2 * LANES)
        both = self.external("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, odd.type, even.type)
        halves = self.b.call(both, [odd, even])  # those of the second argument come first
        order = self._lanes([lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)])
        return self.b.bitcast(self.b.shuffle_vector(halves, halves, order), even.type)

    def halves(self, pairs: Any) -> list[Any]:
        """16 pairs of bfloat16 as the first 16 and the last 16 of 32 float32."""
        bits = self.b.bitcast(pairs, ir.VectorType(_I16, 2 * LANES))
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
        return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)

    def _do(self, name: str, *arguments: Any) -> None:
        kinds = [argument.type for argument in arguments]
        self.b.call(self.external(f"llvm.x86.{name}", ir.VoidType(), *kinds), arguments)


def _configure(b: Any, args: list[Any]) -> None:
    if not available():
        raise RuntimeError("this process has no matrix tiles")
    place = b.inttoptr(args[0], _POINTER)
    for offset in range(_PALETTE_BYTES):
        b.store(_I8(0), b.gep(place, [_I64(offset)]))
    b.store(_I8(1), place)  # the palette
    for tile in range(_NUM_TILES):
        b.store(_I16(_ROW_BYTES), b.bitcast(b.gep(place, [_I64(16 + 2 * tile)]), _I16.as_pointer()))
        b.store(_I8(LANES), b.gep(place, [_I64(48 + tile)]))
    Tiles(b)._do("ldtilecfg", place)


configure = statement(_configure)
"""For compiled code, `configure((scratch,))`: make this thread's tiles usable. scratch: address of 64 free bytes."""

release = statement(lambda b, _args: Tiles(b)._do("tilerelease"))
"""For compiled code, `release((0,))`: this thread is done with its tiles."""
