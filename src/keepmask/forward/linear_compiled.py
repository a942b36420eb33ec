"""Linear layers on CPUs in a fixed order of sums, with the weights as they are.

A vector or a matrix tile holds 16 tokens, so weights need no layout of their own: they are read in the order they lie
in memory, and the next ones are being fetched while some are used. The tokens, which are few, are laid out instead: as
[tiles, K, 16] with K in units of 4 bytes, by `add_layout`. An output is summed along the contraction in one order
whatever tokens come with it, so that it does not depend on the batch, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from torch import Tensor

from keepmask.compiled import tiles
from keepmask.compiled.processor import Instructions, instructions
from keepmask.compiled.program import Program
from keepmask.compiled.team import Kernel
from keepmask.compiled.tiles import TILE_BYTES
from keepmask.compiled.vectors import LANES, Vectors, call, next_item, pointer, scratch, statement
from keepmask.forward.linear_sums import STEP, by_broadcast, by_tiles, by_transposing
from keepmask.forward.linear_torch import whole_bias

__all__ = ["CompiledLinear", "Place", "add_gated", "add_layout", "padded", "supports"]

Place = int | str
"""An address, or the name of one that is given when the program runs."""

_F32, _I64 = ir.FloatType(), ir.IntType(64)
_UNIT_BYTES = 4
_PANEL = 2 * LANES  # rows of weights that meet the tokens together
_CHUNK = 16  # token tiles that meet a panel at a time: about what the second cache holds
_NUM_ARGUMENTS = 13  # of `_add_products`
_FEW = (1, 4)  # tokens, up to which weights are turned around
_MOST_TILES = {"tiles": 2, "avx512_bf16": 4, "plain": 4}  # that are summed up together
_PART = {"tiles": 160, "avx512_bf16": 1024, "plain": 1024}
"""Units along the contraction after which other tokens have their turn: the first cache holds these of the weights on
tiles, the second one these of the tokens elsewhere."""

_Ending = Literal["rows", "adds", "wide", "gated"]
"""What becomes of sums: rounded and stored as [T, out]; added to what is there; stored as float32; or rounded, and
silu(first) · second laid out as tokens."""


def supports(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be multiplied with here."""
    kind = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.is_contiguous()
    return kind and weight.shape[0] >= _PANEL and weight[0].nbytes % (STEP * _UNIT_BYTES) == 0


def padded(num_tokens: int) -> int:
    """The tokens that this many take when laid out: whole tiles."""
    return -(-num_tokens // LANES) * LANES


class CompiledLinear:
    """x @ weight.T + bias for x [T, in]; the rows of the parameters [out_i, in], one after the other, are the weight.

    biases: of each parameter, [out_i] or None. Nothing is written to them, and changes of them in place are followed.
    using: the instructions that products are made of. Raises ValueError for what `supports` does not admit.
    """

    def __init__(
        self, parameters: Sequence[Tensor], biases: Sequence[Tensor | None], *, using: Instructions | None = None
    ) -> None:
        for parameter in parameters:
            if not supports(parameter):
                shape = list(parameter.shape)
                raise ValueError(f"weight {shape} {parameter.dtype}: compiled products cannot take it")
        self.parameters = [parameter.detach() for parameter in parameters]
        self._biases = [None if bias is None else bias.detach() for bias in biases]
        self.out_features = sum(parameter.shape[0] for parameter in parameters)
        self.in_features = int(parameters[0].shape[1])
        self.using = _fitting(using or instructions(), parameters)
        self._programs: dict[_Ending, Program] = {}

    @property
    def weight(self) -> Tensor:
        """[out, in]."""
        return self.parameters[0] if len(self.parameters) == 1 else torch.cat(self.parameters)

    @property
    def bias(self) -> Tensor | None:
        """[out] or None."""
        return whole_bias(self.parameters, self._biases)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        return self._run(x, "rows", x.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """[T, out] float32, not rounded to the weights' type."""
        return self._run(x, "wide", torch.float32)

    def add_to(self, program: Program, *, tokens: Place, out: Sequence[Place], ending: _Ending = "rows") -> None:
        """Make the product of `T` laid-out tokens a step of a program.

        out: for each parameter, the address of its part of [T, out]. ending: "rows" stores, "adds" adds the rounded
        product to what is there, "wide" stores float32.
        """
        stride = self.out_features * (_UNIT_BYTES if ending == "wide" else self.parameters[0].element_size())
        for parameter, bias, place in zip(self.parameters, self._biases, out, strict=True):
            kernel = _product_kernel(_name(parameter.dtype), self.using, ending, biased=bias is not None)
            blocks = (parameter.data_ptr(), parameter[LANES:].data_ptr())
            biases = (0, 0) if bias is None else (bias.data_ptr(), bias[LANES:].data_ptr())
            last = parameter is self.parameters[-1]
            program.add("linear", kernel, *_shape(parameter), tokens, *blocks, place, stride, *biases, waits=last)

    def parts_of(self, out: int, itemsize: int) -> list[int]:
        """For an address of [T, out] with items of this size, those of each parameter's part."""
        sizes = np.cumsum([0, *(len(parameter) for parameter in self.parameters[:-1])])
        return [out + int(size) * itemsize for size in sizes]

    def _run(self, x: Tensor, ending: _Ending, dtype: torch.dtype) -> Tensor:
        T = x.shape[0]
        x = x if x.stride(1) == 1 else x.contiguous()
        tokens = torch.empty(padded(T), self.in_features, dtype=x.dtype)
        out = torch.empty(T, self.out_features, dtype=dtype)
        names = [f"out{at}" for at in range(len(self.parameters))]
        if (program := self._programs.get(ending)) is None:
            program = self._programs[ending] = Program()
            add_layout(program, x.shape[1], x.dtype, x="x", x_stride="x_stride", tokens="tokens")
            self.add_to(program, tokens="tokens", out=names, ending=ending)
        program.run(
            T=T,
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.element_size(),
            tokens=tokens.data_ptr(),
            **dict(zip(names, self.parts_of(out.data_ptr(), out.element_size()), strict=True)),
        )
        return out


def add_gated(program: Program, gate: CompiledLinear, up: CompiledLinear, *, tokens: Place, out: Place) -> None:
    """Make silu(gate(x)) · up(x) of `T` laid-out tokens a step of a program, with the roundings of `silu_mul`.

    out: laid out as the tokens are, whole tiles, for a product that contracts over these values. The number of outputs
    is one that `supports` admits as inputs.
    """
    (first,), (second,) = gate.parameters, up.parameters
    biases = [each.bias for each in (gate, up)]
    kernel = _product_kernel(_name(first.dtype), gate.using, "gated", biased=biases[0] is not None)
    blocks, stride = (first.data_ptr(), second.data_ptr()), len(first) * first.element_size()
    places = (0 if bias is None else bias.data_ptr() for bias in biases)
    program.add("linear", kernel, *_shape(first), tokens, *blocks, out, stride, *places)


def add_layout(program: Program, width: int, dtype: torch.dtype, *, x: Place, x_stride: Place, tokens: Place) -> None:
    """Make laying `T` tokens of x [T, width] out a step of a program; the last one fills its tile up.

    x_stride: bytes from token to token.
    """
    program.add("linear", _layout_kernel(), "T", width * dtype.itemsize // (STEP * _UNIT_BYTES), x, x_stride, tokens)


def _fitting(using: Instructions, parameters: Sequence[Tensor]) -> Instructions:
    """What products of these parameters can use."""
    if parameters[0].dtype == torch.float32:
        return "plain"
    whole = all(len(parameter) % _PANEL == 0 for parameter in parameters)
    return using if whole or using != "tiles" else "avx512_bf16"


def _shape(parameter: Tensor) -> tuple[str, int, int]:
    """What a kernel takes first: tokens, units of a row, rows."""
    return "T", parameter[0].nbytes // _UNIT_BYTES, len(parameter)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
                lay_out((a[3] + step * STEP * _UNIT_BYTES, a[4], first, T - 1, out))

    return Kernel(kernel, 5)


def _lay_out(b: Any, args: list[Any]) -> None:
    """16 units of 16 tokens from `first` on, or the last of all in place of those past it."""
    v = Vectors(b, "float32")
    x, stride, first, last, out = args
    rows = []
    for i in range(LANES):
        token = b.add(first, _I64(i))
        token = b.select(b.icmp_signed("<", token, last), token, last)
        rows.append(v.load(b.inttoptr(b.add(x, b.mul(token, stride)), _F32.as_pointer()), 0))
    target = b.inttoptr(out, _F32.as_pointer())
    for i, column in enumerate(v.transposed(rows)):
        v.store(column, target, i * LANES)


@cache
def _product_kernel(dtype: str, using: Instructions, ending: _Ending, *, biased: bool) -> Kernel:
    """The product of panels of rows of weights, two blocks of 16, with all tokens.

    Its arguments: T, units of a row, rows, the tokens, the first two blocks, the output, bytes from token to token of
    it, the blocks' biases.
    """
    add, most = _sums_kernel(dtype, using).address, _MOST_TILES[using]
    end = statement(_end(dtype, ending, biased=biased))
    place, is_gated = scratch(_CHUNK * _PANEL * LANES + _PANEL + 2 * _NUM_ARGUMENTS), ending == "gated"
    begin, leave = (tiles.configure, tiles.release) if using == "tiles" else (_nothing, _nothing)
    width, part_units, few = LANES if is_gated else _PANEL, _PART[using], 0 if using == "tiles" else _FEW[-1]
    itemsize = 2 if dtype == "bfloat16" else 4
    out_bytes = LANES * itemsize if is_gated else _UNIT_BYTES if ending == "wide" else itemsize

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (11,), np.int64)
        T, units, N, stride = a[1], a[2], a[3], a[8]
        num_tiles, panels = (T + LANES - 1) // LANES, (N + width - 1) // width
        row_bytes, tile_bytes = units * _UNIT_BYTES, units * LANES * _UNIT_BYTES
        part = units if few >= T else part_units
        sums = place()
        spare = sums + _CHUNK * 2 * TILE_BYTES
        work = carray(pointer(spare + _PANEL * _UNIT_BYTES), (_NUM_ARGUMENTS,), np.int64)
        work[12] = T
        begin((spare,))
        items = panels * ((num_tiles + _CHUNK - 1) // _CHUNK)
        item = next_item(data)
        while item < items:
            after = next_item(data)  # taken early, so that its weights are fetched while these are used
            row = min(item % panels * width, N - width)  # the last panel may begin in the one before
            coming = min((after if after < items else item) % panels * width, N - width) * row_bytes
            start = item // panels * _CHUNK
            stop = min(num_tiles, start + _CHUNK)
            for at in range(0, units, part):
                count, weights, tile, fetch = min(part, units - at), row * row_bytes + at * _UNIT_BYTES, start, 64
                ahead = coming + at * _UNIT_BYTES * LANES
                while tile < stop:
                    tokens, here = a[4] + tile * tile_bytes + at * LANES * _UNIT_BYTES, (tile - start) * 2 * TILE_BYTES
                    work[0], work[1], work[2], work[3] = a[5] + weights, a[6] + weights, row_bytes, tokens
                    work[4], work[5], work[6], work[7] = tile_bytes, count, sums + here, at
                    work[8], work[9], work[10], work[11] = a[5] + ahead, a[6] + ahead, fetch, stop - tile
                    call((add, work.ctypes.data))
                    tile, fetch = tile + (most if stop - tile >= most else min(stop - tile, 2)), 0
            out = a[7] + start * LANES * stride + row * out_bytes
            for tile in range(stop - start):
                left = T - (start + tile) * LANES
                biases = (a[9] + row * itemsize, a[10] + row * itemsize)
                end((sums + tile * 2 * TILE_BYTES, out + tile * LANES * stride, stride, *biases, left, spare))
            item = after
        leave((0,))

    return Kernel(kernel, 10)


_nothing = statement(lambda _b, _args: None)


@cache
def _sums_kernel(dtype: str, using: Instructions) -> Kernel:
    """`_add_products`, compiled once for all that becomes of sums."""
    add = statement(_add_products(dtype, using))

    @cfunc(types.void(types.voidptr), nopython=True)
    def kernel(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (_NUM_ARGUMENTS,), np.int64)
        add((a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]))

    return Kernel(kernel, _NUM_ARGUMENTS - 1)


def _add_products(dtype: str, using: Instructions) -> Any:
    """One of `linear_sums`, whose arguments are followed by the number of tiles that are left, and of all tokens."""
    if using == "tiles":
        return _by_number(by_tiles(1), [(2, by_tiles(2))])
    native = using == "avx512_bf16"
    one, two, four = (by_broadcast(dtype, n, native=native) for n in (1, 2, 4))
    few = [(n, by_transposing(dtype, n, native=native)) for n in _FEW]
    return _by_number(one, [(4, four), (2, two)], few)


def _by_number(one: Any, many: list[tuple[int, Any]], few: Sequence[tuple[int, Any]] = ()) -> Any:
    """few: for up to this many tokens; many: from this many tiles on; the first that applies, or else `one`."""

    def emit(b: Any, args: list[Any]) -> None:
        *args, left, T = args
        cases = [(b.icmp_signed("<=", T, _I64(n)), run) for n, run in few]
        cases += [(b.icmp_signed(">=", left, _I64(n)), run) for n, run in many]

        def choose(at: int) -> None:
            if at == len(cases):
                one(b, args)
                return
            applies, run = cases[at]
            with b.if_else(applies) as (then, otherwise):
                with then:
                    run(b, args)
                with otherwise:
                    choose(at + 1)

        choose(0)

    return emit


def _end(dtype: str, ending: _Ending, *, biased: bool) -> Any:
    """What becomes of two blocks of sums [16 outputs, 16 tokens].

    Takes where they are, where the result goes, bytes from token to token of it, the blocks' biases, how many tokens
    there are, and a place for the others.
    """

    def emit(b: Any, args: list[Any]) -> None:
        v = Vectors(b, dtype)
        blocks = [_rows_of(v, args[0], args[3 + half], half, biased=biased) for half in range(2)]
        if ending == "gated":
            _store_gated(v, blocks[0], blocks[1], v.pointer(args[1], _F32))
            return
        tokens = _in_pairs(v, *blocks) if dtype == "bfloat16" and ending != "wide" else _whole(v, *blocks)
        for token, values in enumerate(tokens):
            place = b.add(args[1], b.mul(args[2], _I64(token)))
            place = b.select(b.icmp_signed(">", args[5], _I64(token)), place, args[6])
            _store_token(v, values, place, adds=ending == "adds")

    return emit


def _rows_of(v: Vectors, sums: Any, bias: Any, half: int, *, biased: bool) -> list[Any]:
    """The 16 outputs of one of two blocks of sums, each for 16 tokens."""
    place, biases = v.pointer(sums, _F32), v.pointer(bias, v.item)
    rows = [v.load(place, (half * LANES + i) * LANES) for i in range(LANES)]
    return [v.b.fadd(row, v.splat_item(biases, i)) for i, row in enumerate(rows)] if biased else rows


def _in_pairs(v: Vectors, first: list[Any], second: list[Any]) -> list[list[Any]]:
    """For each of 16 tokens its 32 outputs, rounded to bfloat16, in one vector."""
    rows = first + second
    return [[column] for column in v.transposed([v.pairs(*rows[at : at + 2]) for at in range(0, _PANEL, 2)])]


def _whole(v: Vectors, first: list[Any], second: list[Any]) -> list[list[Any]]:
    """For each of 16 tokens its 32 outputs in two vectors."""
    return [list(pair) for pair in zip(v.transposed(first), v.transposed(second), strict=True)]


def _store_token(v: Vectors, values: list[Any], place: Any, *, adds: bool) -> None:
    """Store 32 outputs of a token, or add them to what is there."""
    if not adds:
        for at, value in enumerate(values):
            v.store(value, v.pointer(place, _F32), at * LANES)
        return
    updates = v.halves(values[0]) if len(values) == 1 else values
    target = v.pointer(place, v.item)
    for at, update in enumerate(updates):
        v.store_items(v.b.fadd(v.load_items(target, at * LANES), update), target, at * LANES)


def _store_gated(v: Vectors, gates: list[Any], ups: list[Any], target: Any) -> None:
    """silu(gate) · up of 16 outputs, laid out as tokens."""
    gates = [v.rounded(v.silu(v.rounded(gate))) for gate in gates]
    values = [v.b.fmul(gate, v.rounded(up)) for gate, up in zip(gates, ups, strict=True)]
    if v.dtype == "bfloat16":
        values = [v.pairs(*values[at : at + 2]) for at in range(0, LANES, 2)]
    for at, value in enumerate(values):
        v.store(value, target, at * LANES)
