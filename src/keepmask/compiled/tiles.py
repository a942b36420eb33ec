"""Intel's matrix tiles (AMX) for the compiled CPU kernels: registers of 16 rows of 64 bytes that multiply one another.

A sum is float32; products of two bfloat16 are added to it pair by pair along the contraction, always in the same order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from keepmask.compiled.processor import available
from keepmask.compiled.vectors import LANES, Vectors, statement

__all__ = ["TILE_BYTES", "Tiles", "configure", "release"]

TILE_BYTES = 1024

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_POINTER = _I8.as_pointer()
_ROW_BYTES, _NUM_TILES = 64, 8
_PALETTE_BYTES = 64


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

    def _do(self, name: str, *arguments: Any) -> None:
        kinds = [argument.type for argument in arguments]
        self.b.call(self.external(f"llvm.x86.{name}", ir.VoidType(), *kinds), arguments)


def _configure(b: Any, args: list[Any]) -> None:
    if "tiles" not in available():
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
