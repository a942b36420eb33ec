"""Linear layers in bfloat16 on Intel's matrix tiles, with the weights as they are.

Rows of the weight are the left factor and tokens the right one, so weights need no layout of their own: they are read
in the order they lie in memory, and the next ones are being fetched while some are used. The tokens, which are few, are
laid out instead: as [token tiles, in / 2, 16, 2], by `add_layout`. An output is summed along the contraction in one
order whatever tokens come with it, so that it does not depend on the batch, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from torch import Tensor

from keepmask.compiled.program import Program
from keepmask.compiled.team import Kernel
from keepmask.compiled.tiles import TILE_BYTES, Tiles, available, configure, release
from keepmask.compiled.vectors import LANES, next_item, scratch, statement

__all__ = ["Place", "TiledLinear", "add_gated", "add_layout", "padded", "supports"]

Place = int | str
"""An address, or the name of one that is given when the program runs."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_ITEMSIZE = 2
_STEP = 32  # of the contraction that one tile covers
_PART = 10  # tiles along the contraction after which other tokens have their turn: the first cache holds their weights
_CHUNK = 16  # token tiles that meet a panel of weights at a time: about what the second cache holds

_Ending = Literal["rows", "adds", "gated"]
"""What becomes of sums: stored as [T, out]; added to what is there; silu(first) · second, laid out for tiles."""


def supports(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be multiplied with here."""
    whole = all(size % (2 * LANES) == 0 for size in weight.shape)
    kind = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return kind and whole and available()


def padded(num_tokens: int) -> int:
    """The tokens that this many take in the layout for tiles: whole ones."""
    return -(-num_tokens // LANES) * LANES


class TiledLinear:
    """x @ weight.T + bias for x [T, in]; the rows of the parameters [out_i, in], one after the other, are the weight.

    bias: [out] or None. Parameters keep their values, and changes in place are followed. Raises ValueError for what
    `supports` does not admit.
    """

    def __init__(self, parameters: Sequence[Tensor], bias: Tensor | None) -> None:
        for parameter in parameters:
            if not supports(parameter):
                shape = list(parameter.shape)
                raise ValueError(f"weight {shape} {parameter.dtype}: matrix tiles cannot take it here")
        self.parameters, self.bias = list(parameters), bias
        self.out_features = sum(parameter.shape[0] for parameter in parameters)
        self.in_features = int(parameters[0].shape[1])
        self._program = Program()
        add_layout(self._program, self.in_features, x="x", x_stride="x_stride", tokens="tokens")
        self.add_to(self._program, tokens="tokens", out="out")

    @property
    def weight(self) -> Tensor:
        """[out, in]."""
        return self.parameters[0] if len(self.parameters) == 1 else torch.cat(self.parameters)

    def restore(self) -> None:
        """Nothing: the parameters have their values."""

    def refresh(self) -> None:
        """Nothing: the parameters are what is multiplied with."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        T = x.shape[0]
        x = x if x.stride(1) == 1 else x.contiguous()
        tokens = torch.empty(padded(T), self.in_features, dtype=x.dtype)
        out = torch.empty(T, self.out_features, dtype=x.dtype)
        self._program.run(
            T=T,
            x=x.data_ptr(),
            x_stride=x.stride(0) * _ITEMSIZE,
            tokens=tokens.data_ptr(),
            out=out.data_ptr(),
        )
        return out

    def add_to(self, program: Program, *, tokens: Place, out: Place, adds: bool = False) -> None:
        """Make the product of `T` laid-out tokens a step of a program.

        out: [T, out]. adds: whether the rounded product is added to what is there, in place of it.
        """
        first = 0
        for parameter in self.parameters:
            N, K = parameter.shape
            panel = 2 * LANES
            _add(
                program,
                "adds" if adds else "rows",
                *("T", K, N // panel, tokens),
                *(parameter.data_ptr(), parameter.data_ptr() + LANES * K * _ITEMSIZE, panel * K * _ITEMSIZE),
                *(out, first * _ITEMSIZE, self.out_features * _ITEMSIZE),
                *self._biases(first, first + LANES),
                waits=parameter is self.parameters[-1],
            )
            first += N

    def _biases(self, *outputs: int) -> tuple[int, ...]:
        """Addresses of the bias of these outputs; 0 without one."""
        return tuple(0 if self.bias is None else self.bias.data_ptr() + at * _ITEMSIZE for at in outputs)


def add_gated(program: Program, gate: TiledLinear, up: TiledLinear, *, tokens: Place, out: Place) -> None:
    """Make silu(gate(x)) · up(x) of `T` laid-out tokens a step of a program, with the roundings of `silu_mul`.

    out: laid out for tiles as the tokens are, whole ones, for a product that contracts over these values.
    """
    (first,), (second,) = gate.parameters, up.parameters
    N, K = first.shape
    _add(
        program,
        "gated",
        *("T", K, N // LANES, tokens),
        *(first.data_ptr(), second.data_ptr(), LANES * K * _ITEMSIZE),
        *(out, 0, N * _ITEMSIZE),
        *(gate._biases(0) + up._biases(0)),
    )


def add_layout(program: Program, width: int, *, x: Place, x_stride: Place, tokens: Place) -> None:
    """Make laying `T` tokens of x [T, width] out for tiles a step of a program; the last one fills its tile up.

    x_stride: bytes from token to token.
    """
    program.add("linear", _layout_kernel(), "T", width // _STEP, x, x_stride, tokens)


def _add(program: Program, ending: _Ending, *arguments: Place, waits: bool = True) -> None:
    program.add("linear", _product_kernel(ending, biased=arguments[-1] != 0), *arguments, waits=waits)


@cache
def _layout_kernel() -> Kernel:
    lay_out = statement(_lay_out)

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (6,), np.int64)
        T, steps = a[1], a[2]
        while True:
            first = next_item(data) * LANES
            if first >= T:
                break
            for step in range(steps):
                out = a[5] + (first // LANES * steps + step) * TILE_BYTES
                lay_out((a[3] + step * _STEP * _ITEMSIZE, a[4], first, T - 1, out))

    return Kernel(kernel, 5)


def _lay_out(b: Any, args: list[Any]) -> None:
    """One tile: pairs of 16 tokens from `first` on, or the last of all in place of those past it."""
    t = Tiles(b)
    x, stride, first, last, out = args
    rows = []
    for i in range(LANES):
        token = b.add(first, _I64(i))
        token = b.select(b.icmp_signed("<", token, last), token, last)
        rows.append(t.load(b.inttoptr(b.add(x, b.mul(token, stride)), _F32.as_pointer()), 0))
    target = b.inttoptr(out, _F32.as_pointer())
    for i, column in enumerate(t.transposed(rows)):
        t.store(column, target, i * LANES)


@cache
def _product_kernel(ending: _Ending, *, biased: bool) -> Kernel:
    """The product of panels of 32 rows of weights, as two blocks of 16, with all tokens."""
    one, two = statement(_multiply(1)), statement(_multiply(2))
    end = statement({"rows": _as_rows, "adds": _as_sums, "gated": _as_gated}[ending](biased=biased))
    place, gated = scratch(_CHUNK * 2 * LANES * LANES + 2 * LANES), ending == "gated"
    out_bytes = LANES * LANES * _ITEMSIZE if gated else 2 * LANES * _ITEMSIZE  # from panel to panel
    bias_bytes = LANES * _ITEMSIZE if gated else 2 * LANES * _ITEMSIZE

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (13,), np.int64)
        T, K, panels, tokens, first, second, panel_bytes, stride = a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[10]
        tiles, steps = (T + LANES - 1) // LANES, K // _STEP
        row_bytes, tile_bytes = K * _ITEMSIZE, LANES * K * _ITEMSIZE
        sums = place()
        spare = sums + _CHUNK * 2 * TILE_BYTES
        configure((spare,))
        items = panels * ((tiles + _CHUNK - 1) // _CHUNK)
        item = next_item(data)
        while item < items:
            after = next_item(data)  # taken early, so that its weights are fetched while these are used
            panel, start = item % panels, item // panels * _CHUNK
            stop = min(tiles, start + _CHUNK)
            pairs = (stop - start + 1) // 2
            part, lines = steps if pairs == 1 else _PART, 1 + LANES // pairs
            ahead = (after if after < items else item) % panels * panel_bytes
            for step in range(0, steps, part):
                count = min(part, steps - step)
                at = panel * panel_bytes + step * _STEP * _ITEMSIZE
                for pair in range(pairs):
                    tile = start + 2 * pair
                    x = tokens + tile * tile_bytes + step * TILE_BYTES
                    here = sums + pair * 4 * TILE_BYTES
                    work = (first + at, second + at, row_bytes, x, tile_bytes, count, here, step)
                    if tile + 1 < stop:
                        two((*work, first + ahead, second + ahead, lines))
                    else:
                        one((*work, first + ahead, second + ahead, lines))
                    ahead += count * lines * 64
            out = a[8] + a[9] + start * LANES * stride + panel * out_bytes
            bias, bias2 = a[11] + panel * bias_bytes, a[12] + panel * bias_bytes
            for tile in range(stop - start):
                left = T - (start + tile) * LANES
                end((sums + tile * 2 * TILE_BYTES, out + tile * LANES * stride, stride, bias, bias2, left, spare))
            item = after
        release((0,))

    return Kernel(kernel, 12)


def _multiply(num_tiles: int) -> Any:
    """Sums of two blocks of 16 rows of weights with one or two token tiles, one after the other in scratch.

    args: the blocks, bytes from row to row of them, the token tiles, bytes between these, steps along the contraction,
    where the sums are, whether there are any already, what to fetch meanwhile, and how many lines of it in each step.
    """

    def emit(b: Any, args: list[Any]) -> None:
        t = Tiles(b)
        first, second, row_bytes, tokens, tile_bytes, steps, sums, resumes, ahead, ahead2, lines = args
        with b.if_else(b.icmp_signed("!=", resumes, _I64(0))) as (resumed, begun):
            with resumed:
                for at in range(2 * num_tiles):
                    t.load_tile(at, b.add(sums, _I64(at * TILE_BYTES)), _I64(64))
            with begun:
                for at in range(2 * num_tiles):
                    t.clear_tile(at)
        with cgutils.for_range(b, steps) as loop:
            along = b.mul(loop.index, _I64(_STEP * _ITEMSIZE))
            token = b.add(tokens, b.mul(loop.index, _I64(TILE_BYTES)))
            t.load_tile(4, b.add(first, along), row_bytes)
            t.load_tile(6, token, _I64(64))
            t.multiply(0, 4, 6)
            t.load_tile(5, b.add(second, along), row_bytes)
            t.multiply(1, 5, 6)
            if num_tiles == 2:
                t.load_tile(7, b.add(token, tile_bytes), _I64(64))
                t.multiply(2, 4, 7)
                t.multiply(3, 5, 7)
            with cgutils.for_range(b, lines) as line:
                at = b.mul(b.add(b.mul(loop.index, lines), line.index), _I64(64))
                for start in (ahead, ahead2):
                    t.prefetch(b.add(start, at), 0, level=2)
        for at in range(2 * num_tiles):
            t.store_tile(at, b.add(sums, _I64(at * TILE_BYTES)))

    return emit


def _rows_of(t: Tiles, args: list[Any], half: int, *, biased: bool) -> list[Any]:
    """The 16 outputs of one of two blocks of sums, each for 16 tokens."""
    sums, bias = t.pointer(args[0], _F32), t.pointer(args[3 + half], t.item)
    rows = [t.load(sums, (half * LANES + i) * LANES) for i in range(LANES)]
    return [t.b.fadd(row, t.splat_item(bias, i)) for i, row in enumerate(rows)] if biased else rows


# What follows takes: two blocks of sums, where the result goes, bytes from token to token of it, the blocks' biases,
# how many tokens there are, and a place for the others.


def _as_rows(*, biased: bool, adds: bool = False) -> Any:
    """To [16 tokens, 32 outputs]."""

    def emit(b: Any, args: list[Any]) -> None:
        t = Tiles(b)
        rows = [row for half in range(2) for row in _rows_of(t, args, half, biased=biased)]
        columns = t.transposed([t.pairs(*rows[at : at + 2]) for at in range(0, 2 * LANES, 2)])
        for token, column in enumerate(columns):
            place = b.add(args[1], b.mul(args[2], _I64(token)))
            place = t.pointer(b.select(b.icmp_signed(">", args[5], _I64(token)), place, args[6]), _F32)
            if adds:
                sums = [b.fadd(*pair) for pair in zip(t.halves(t.load(place, 0)), t.halves(column), strict=True)]
                for half, value in enumerate(sums):
                    t.store_items(value, b.bitcast(place, t.item.as_pointer()), half * LANES)
            else:
                t.store(column, place, 0)

    return emit


def _as_sums(*, biased: bool) -> Any:
    """Added to [16 tokens, 32 outputs]."""
    return _as_rows(biased=biased, adds=True)


def _as_gated(*, biased: bool) -> Any:
    """silu(first) · second to [8, 16 tokens, 2 outputs]."""

    def emit(b: Any, args: list[Any]) -> None:
        t = Tiles(b)
        gates, ups = (_rows_of(t, args, half, biased=biased) for half in range(2))
        gates = [t.rounded(t.silu(t.rounded(gate))) for gate in gates]
        values = [b.fmul(gate, t.rounded(up)) for gate, up in zip(gates, ups, strict=True)]
        target = t.pointer(args[1], _F32)
        for pair in range(LANES // 2):
            t.store(t.pairs(*values[2 * pair : 2 * pair + 2]), target, pair * LANES)

    return emit
