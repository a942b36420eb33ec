"""The inner loops of the compiled linear layers: sums of products of 32 rows of weights with tiles of 16 tokens.

Weights are read as they lie, tokens as [tile, K, 16] with K in units of 4 bytes: a float32, or a pair of bfloat16. A
sum takes these units one after the other, from the first to the last, whatever else is computed with it: on the same
instructions, every function here gives the same bits for the same token and row of weights.

All take these int64: the addresses of the first and the last 16 rows of weights, bytes from row to row of them, the
address of the tokens, bytes from tile to tile of them, units to take, where the sums are, [tile, 32, 16] float32, and
whether there are any already; then what to have in the cache afterwards, as the addresses of twice 16 rows of weights,
and how far to go there from line to line: 64 or, if there is nothing to fetch, 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from keepmask.compiled.tiles import TILE_BYTES, Tiles
from keepmask.compiled.vectors import LANES, Vectors

__all__ = ["STEP", "by_broadcast", "by_tiles", "by_transposing"]

STEP = 16
"""Units, 64 bytes of a row of weights: what `count` is a multiple of."""

_UNROLLED = 4
_UNIT_BYTES, _LINE_BYTES = 4, 64
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VF = ir.VectorType(_F32, LANES)

Emit = Callable[[Any, list[Any]], None]


def by_broadcast(dtype: str, num_tiles: int, *, native: bool) -> Emit:
    """For 1, 2 or 4 tiles: a vector of 16 tokens meets one row of weights after the other. See `Vectors.dot`."""
    num_rows = LANES // num_tiles  # together as many sums as the processor needs in flight
    lines = num_rows // _UNROLLED  # to fetch in a turn, so that 16 rows are fetched when 16 were used

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        first, second, row_bytes, tokens, tile_bytes, count, sums, resumes, ahead, ahead2, fetch = args
        totals = [[cgutils.alloca_once(b, _VF) for _ in range(num_rows)] for _ in range(num_tiles)]
        turns = b.sdiv(count, _I64(_UNROLLED))
        with cgutils.for_range(b, _I64(2 * num_tiles)) as part:
            is_first = b.icmp_signed("<", part.index, _I64(num_tiles))
            within = b.srem(part.index, _I64(num_tiles))
            weights = b.add(b.select(is_first, first, second), b.mul(b.mul(within, _I64(num_rows)), row_bytes))
            here = b.add(sums, b.mul(part.index, _I64(num_rows * _LINE_BYTES)))
            places = [
                [
                    v.pointer(b.add(here, _I64(2 * tile * TILE_BYTES + row * _LINE_BYTES)), _F32)
                    for row in range(num_rows)
                ]
                for tile in range(num_tiles)
            ]
            _begin(v, places, totals, resumes)
            with cgutils.for_range(b, turns) as turn:
                for unit in range(_UNROLLED):
                    at = b.add(b.mul(turn.index, _I64(_UNROLLED)), _I64(unit))
                    _add_unit(v, weights, row_bytes, tokens, tile_bytes, at, totals, native=native)
                line = b.mul(b.add(b.mul(within, turns), turn.index), _I64(lines))
                where = b.add(b.select(is_first, ahead, ahead2), b.mul(line, fetch))
                for _ in range(lines):
                    v.prefetch(where, 0, level=2)
                    where = b.add(where, fetch)
            for tile, row in _pairs(num_tiles, num_rows):
                v.store(b.load(totals[tile][row]), places[tile][row], 0)

    return emit


def _begin(v: Vectors, places: list[list[Any]], totals: list[list[Any]], resumes: Any) -> None:
    """The sums there are, or zeros."""
    resumed = v.b.icmp_signed("!=", resumes, _I64(0))
    for tile, row in _pairs(len(totals), len(totals[0])):
        v.b.store(v.b.select(resumed, v.load(places[tile][row], 0), v.real(0.0)), totals[tile][row])


def _add_unit(
    v: Vectors,
    weights: Any,
    row_bytes: Any,
    tokens: Any,
    tile_bytes: Any,
    at: Any,
    totals: list[list[Any]],
    *,
    native: bool,
) -> None:
    """Add the products of one unit of the rows of weights with that of the tokens."""
    b = v.b
    token = b.add(tokens, b.mul(at, _I64(_LINE_BYTES)))
    xs = [v.load(v.pointer(b.add(token, b.mul(_I64(tile), tile_bytes)), _F32), 0) for tile in range(len(totals))]
    along = b.mul(at, _I64(_UNIT_BYTES))
    for row in range(len(totals[0])):
        place = v.pointer(b.add(b.add(weights, b.mul(_I64(row), row_bytes)), along), _F32)
        weight = v.splat(v.load_unit(place, 0))
        for x, total in zip(xs, totals, strict=True):
            b.store(v.dot(b.load(total[row]), x, weight, native=native), total[row])


def by_transposing(dtype: str, num_tokens: int, *, native: bool) -> Emit:
    """For the first few tokens of one tile: these meet a vector of 16 rows of weights. Never resumes.

    With few tokens most lanes of a vector of tokens would be idle; turning the weights around takes less.
    """

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        first, second, row_bytes, tokens, _, count, sums, _, ahead, ahead2, fetch = args
        halves: list[tuple[Any, Any, list[Any]]] = [(first, ahead, []), (second, ahead2, [])]
        for _, _, totals in halves:
            totals += [cgutils.alloca_once(b, _VF) for _ in range(num_tokens)]
            for total in totals:
                b.store(v.real(0.0), total)
        with cgutils.for_range(b, b.sdiv(count, _I64(STEP))) as step:
            along = b.mul(step.index, _I64(_LINE_BYTES))
            token = v.pointer(b.add(tokens, b.mul(along, _I64(STEP))), _F32)
            for weights, coming, totals in halves:
                start = b.add(weights, along)
                rows = [v.load(v.pointer(b.add(start, b.mul(_I64(i), row_bytes)), _F32), 0) for i in range(LANES)]
                for unit, column in enumerate(v.transposed(rows)):
                    for at, total in enumerate(totals):
                        x = v.splat(v.load_unit(token, unit * LANES + at))
                        b.store(v.dot(b.load(total), x, column, native=native), total)
                where = b.add(coming, b.mul(step.index, b.mul(fetch, _I64(LANES))))
                for _ in range(LANES):
                    v.prefetch(where, 0)
                    where = b.add(where, fetch)
        for half, (_, _, totals) in enumerate(halves):
            columns = [b.load(total) for total in totals] + [v.real(0.0)] * (LANES - num_tokens)
            place = v.pointer(b.add(sums, _I64(half * TILE_BYTES)), _F32)
            for row, values in enumerate(v.transposed(columns)):
                v.store(values, place, row * LANES)

    return emit


def by_tiles(num_tiles: int) -> Emit:
    """For 1 or 2 tiles of tokens in bfloat16, on the processor's own tiles: two of weights stay for all tokens."""

    def emit(b: Any, args: list[Any]) -> None:
        t = Tiles(b)
        first, second, row_bytes, tokens, tile_bytes, count, sums, resumes, ahead, ahead2, fetch = args
        with b.if_else(b.icmp_signed("!=", resumes, _I64(0))) as (resumed, begun):
            with resumed:
                for at in range(2 * num_tiles):
                    t.load_tile(at, b.add(sums, _I64(at * TILE_BYTES)), _I64(_LINE_BYTES))
            with begun:
                for at in range(2 * num_tiles):
                    t.clear_tile(at)
        with cgutils.for_range(b, b.sdiv(count, _I64(STEP))) as step:
            along = b.mul(step.index, _I64(_LINE_BYTES))
            token = b.add(tokens, b.mul(step.index, _I64(TILE_BYTES)))
            t.load_tile(4, b.add(first, along), row_bytes)
            t.load_tile(6, token, _I64(_LINE_BYTES))
            t.multiply(0, 4, 6)
            t.load_tile(5, b.add(second, along), row_bytes)
            t.multiply(1, 5, 6)
            if num_tiles == 2:
                t.load_tile(7, b.add(token, tile_bytes), _I64(_LINE_BYTES))
                t.multiply(2, 4, 7)
                t.multiply(3, 5, 7)
            at = b.mul(b.mul(step.index, _I64(LANES)), fetch)
            for _ in range(LANES):
                for start in (ahead, ahead2):
                    t.prefetch(b.add(start, at), 0, level=2)
                at = b.add(at, fetch)
        for at in range(2 * num_tiles):
            t.store_tile(at, b.add(sums, _I64(at * TILE_BYTES)))

    return emit


def _pairs(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(rows) for column in range(columns)]
