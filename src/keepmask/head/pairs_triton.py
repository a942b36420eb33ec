"""The operations of `pairs`, and scores of whole rows, in Triton, for GPUs.

`score_rows` reads each head row of a token's support once: while it is in registers, its logit updates an online
softmax (Milakov and Gimelshein 2018) and the row itself a running sum of p_j * dz_j/dlogit_j * w_j, which at the end
is half of the derivative of the log-probability by the hidden state. Tokens of wide supports start first, so that
none is left over at the end. The weight's gradient sums the hidden states of each id's pairs, which stand together:
no atomic operation, so the result is the same bits each time.

All arithmetic is float32. Under `TRITON_INTERPRET=1`, set before Triton is first imported, this runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pairs import Pairs

__all__ = ["add_weight_gradient", "hidden_gradient", "scale_rows", "score_rows"]

_TILE = 8192  # entries of the head or of the hidden states that a program holds at a time


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


class _Table(NamedTuple):
    """A matrix of whole rows."""

    data: Any
    stride: Any
    """Between rows."""


class _Rows(NamedTuple):
    """The CSR rows of pairs, on the device."""

    places: Any
    """[A] int64: where each row stands in a table."""
    offsets: Any
    """[A+1] int64."""
    schedule: Any
    """[A] int64: rows in the order in which to start them, the longest first."""


class _Out(NamedTuple):
    logits: Any
    """[M] float32."""
    stats: Any
    """[4, A] float32: peak, total, weighted, target."""
    derivative: Any
    """[A, E], or None."""
    num_rows: Any


class _Shape(NamedTuple):
    SIZE: int
    """E."""
    WIDTH: int
    """Of a program's part of a row, a power of two."""
    STEP: int
    """Rows read at a time."""


def score_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Pairs,
    positions: Tensor,
    form: HeadForm,
    transforms: PairTransforms,
    *,
    jacobian: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Logits [M], `row_stats` of the transformed ones, and the derivative [A, E], in the type of the hidden states, of
    the targets' log-probabilities by them where `jacobian` asks for it.

    hidden: [T, E]. weight: [V, E]. bias: [V]. positions: [A], the pairs of the targets, -1 where there is none.
    transforms: [M] each.
    """
    num_rows, size = pairs.num_rows, hidden.shape[1]
    logits = torch.empty(pairs.num_pairs, dtype=torch.float32, device=hidden.device)
    stats = torch.empty(4, num_rows, dtype=torch.float32, device=hidden.device)
    derivative = hidden.new_empty(num_rows, size) if jacobian else None
    if num_rows:
        width = triton.next_power_of_2(size)
        per_pair = (transforms.bias, transforms.repetition, transforms.subtract, transforms.temperature)
        _score_row[(num_rows,)](
            _table(hidden),
            (*_table(weight), bias),
            _rows(pairs.rows, pairs.offsets),
            (pairs.ids, positions),
            tuple(None if tensor is None else tensor.float().contiguous() for tensor in per_pair),
            _Out(logits, stats, derivative, num_rows),
            (form.softcap or 0.0, form.scale),
            SHAPE=_Shape(size, width, max(2, min(16, _TILE // width))),
            ROUND=form.rounding is not None,
            CAP=form.softcap is not None,
            num_warps=8 if width >= 2048 else 4,
        )
    peak, total, weighted, target = stats
    return logits, (peak, total.double(), weighted.double(), target), derivative


def hidden_gradient(out: Tensor, grad: Tensor, weight: Tensor, pairs: Pairs) -> None:
    """`pair_products.hidden_gradient`."""
    if pairs.num_rows < out.shape[0]:
        out.zero_()
    _sum_rows(out, pairs.rows, pairs.offsets, (grad, None), (weight, pairs.ids, None), add=False, width=2048)


def scale_rows(out: Tensor, rows: Tensor, factors: Tensor, derivative: Tensor) -> None:
    """Equals `out.zero_(); out[rows] = factors[:, None] * derivative`. out: [T, E]. factors: [A]."""
    if rows.numel() < out.shape[0]:
        out.zero_()
    if rows.numel():
        width = min(2048, triton.next_power_of_2(out.shape[1]))
        grid = (rows.numel(), triton.cdiv(out.shape[1], width))
        _scale_row[grid](out, out.stride(0), rows, factors, derivative, out.shape[1], WIDTH=width, num_warps=4)


def add_weight_gradient(out: Tensor, grad: Tensor, hidden: Tensor, pairs: Pairs) -> None:
    """`pair_products.add_weight_gradient`."""
    order, index, ids, offsets = pairs.by_id
    # The most frequent ids have a pair in most rows: narrow programs, so that many share such a sum.
    _sum_rows(out, ids, offsets, (grad, order), (hidden, pairs.rows, index), add=True, width=256)


def _sum_rows(
    out: Tensor,
    places: Tensor,
    offsets: Tensor,
    factors: tuple[Tensor, Tensor | None],
    terms: tuple[Tensor, Tensor, Tensor | None],
    *,
    add: bool,
    width: int,
) -> None:
    """Sets out[places[a]] to, or adds to it, the sum of grad[order[m]] * table[rows[index[m]]] over the pairs of a.

    factors: grad and order. terms: table, rows and index. order and index None are m itself.
    """
    if not places.numel():
        return
    size = out.shape[1]
    width = min(width, triton.next_power_of_2(size))
    table, *lookup = terms
    _sum_row[(places.numel(), triton.cdiv(size, width))](
        _table(out),
        _rows(places, offsets),
        factors,
        _table(table),
        tuple(lookup),
        SHAPE=_Shape(size, width, max(2, min(32, _TILE // width))),
        ADD=add,
        num_warps=4,
    )


def _table(tensor: Tensor) -> _Table:
    return _Table(tensor, tensor.stride(0))


def _rows(places: Tensor, offsets: Tensor) -> _Rows:
    return _Rows(places, offsets, torch.argsort(offsets.diff(), descending=True))


@_jit
def _nearest_bfloat16(x: tl.tensor) -> tl.tensor:
    """float32 rounded to the nearest bfloat16, ties to even. (The interpreter's own conversion cuts off.)"""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@_jit
def _stored(x: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """float32 `x` as what is stored at `pointer` holds it."""
    return _nearest_bfloat16(x) if pointer.dtype.element_ty == tl.bfloat16 else x


@_jit
def _logit(x: tl.tensor, form: tl.tuple, ROUND: tl.constexpr, CAP: tl.constexpr) -> tl.tuple:
    """`HeadForm.apply` of products, and its derivative. form: softcap and scale."""
    if ROUND:
        x = _nearest_bfloat16(x)
    x *= form[1]
    slope = tl.zeros_like(x) + form[1]
    if CAP:
        # tanh x = 1 - 2 / (exp(2 x) + 1)
        capped = 1.0 - 2.0 / (tl.exp(2.0 * x / form[0]) + 1.0)
        slope *= 1.0 - capped * capped
        x = form[0] * capped
    return x, slope


@_jit
def _transformed(z: tl.tensor, slope: tl.tensor, transforms: tl.tuple, m: tl.tensor, live: tl.tensor) -> tl.tuple:
    """`PairTransforms.apply` of the logits of pairs m, and `slope` times its derivative.

    transforms: pointers to bias, repetition, subtract and temperature, [M] float32 or None each.
    """
    if transforms[0] is not None:
        z += tl.load(transforms[0] + m, mask=live, other=0.0)
    if transforms[1] is not None:
        penalty = tl.load(transforms[1] + m, mask=live, other=1.0)
        slope = tl.where(z > 0, slope / penalty, slope * penalty)
        z = tl.where(z > 0, z / penalty, z * penalty)
    if transforms[2] is not None:
        z -= tl.load(transforms[2] + m, mask=live, other=0.0)
    if transforms[3] is not None:
        temperature = tl.load(transforms[3] + m, mask=live, other=1.0)
        z /= temperature
        slope /= temperature
    return z, slope


@_jit
def _score_row(
    hidden: tl.tuple,  # a _Table
    head: tl.tuple,  # weight and stride, as in a _Table, and the bias, [V] or None
    rows: tl.tuple,  # _Rows in `hidden`
    pairs: tl.tuple,  # ids, [M] int, and positions, [A] int64
    transforms: tl.tuple,
    out: tl.tuple,  # an _Out
    form: tl.tuple,
    SHAPE: tl.constexpr,
    ROUND: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    a = tl.load(rows.schedule + tl.program_id(0))
    start, end = tl.load(rows.offsets + a), tl.load(rows.offsets + a + 1)
    position = tl.load(pairs[1] + a)
    e = tl.arange(0, SHAPE.WIDTH)
    inside_row = e < SHAPE.SIZE
    place = tl.load(rows.places + a)
    h = tl.load(hidden.data + place * hidden.stride + e, mask=inside_row, other=0.0).to(tl.float32)
    peak = tl.full([], -1e30, tl.float32)  # finite: -inf - (-inf) must not be formed
    total, weighted = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    target, target_slope = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    mean = tl.zeros([SHAPE.WIDTH], tl.float32)  # sum of exp(z - peak) * dz/dlogit * w
    for first in range(start, end, SHAPE.STEP):
        m = first + tl.arange(0, SHAPE.STEP)
        live = m < end
        ids = tl.load(pairs[0] + m, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & inside_row[None, :]
        w = tl.load(head[0] + ids[:, None] * head[1] + e[None, :], mask=inside, other=0.0).to(tl.float32)
        product = tl.sum(w * h[None, :], axis=1)
        if head[2] is not None:
            product += tl.load(head[2] + ids, mask=live, other=0.0).to(tl.float32)
        logit, slope = _logit(product, form, ROUND, CAP)
        tl.store(out.logits + m, logit, mask=live)
        z, slope = _transformed(logit, slope, transforms, m, live)
        is_target = live & (m == position)
        target += tl.sum(tl.where(is_target, z, 0.0), axis=0)
        target_slope += tl.sum(tl.where(is_target, slope, 0.0), axis=0)
        z = tl.where(live, z, -1e30)
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        shift = tl.maximum(peak - new_peak, -80.0)
        old = tl.where(total > 0, tl.exp(shift), 0.0)
        centred = tl.maximum(z - new_peak, -64.0)
        p = tl.where(live, tl.exp(centred), 0.0)
        weighted = (weighted + total * shift) * old + tl.sum(p * centred, axis=0)
        total = total * old + tl.sum(p, axis=0)
        if out.derivative is not None:
            mean = mean * old + tl.sum((p * slope)[:, None] * w, axis=0)
        peak = new_peak
    tl.store(out.stats + a, tl.where(end > start, peak, float("-inf")))
    tl.store(out.stats + out.num_rows + a, total)
    tl.store(out.stats + 2 * out.num_rows + a, weighted)
    tl.store(out.stats + 3 * out.num_rows + a, target)
    if out.derivative is not None:
        drawn = tl.load(pairs[0] + tl.maximum(position, 0), mask=position >= 0, other=0).to(tl.int64)
        w = tl.load(head[0] + drawn * head[1] + e, mask=inside_row, other=0.0)
        derivative = target_slope * w.to(tl.float32) - mean / tl.maximum(total, 1e-30)
        tl.store(out.derivative + a * SHAPE.SIZE + e, _stored(derivative, out.derivative), mask=inside_row)


@_jit
def _sum_row(
    out: tl.tuple,  # a _Table
    rows: tl.tuple,  # _Rows in `out`
    factors: tl.tuple,  # grad, [M] float32, and order, [M] int64 or None
    table: tl.tuple,  # a _Table
    lookup: tl.tuple,  # rows of the table, [..] int, and index, [M] int64 or None
    SHAPE: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    a = tl.load(rows.schedule + tl.program_id(0))
    start, end = tl.load(rows.offsets + a), tl.load(rows.offsets + a + 1)
    e = tl.program_id(1) * SHAPE.WIDTH + tl.arange(0, SHAPE.WIDTH)
    inside_row = e < SHAPE.SIZE
    total = tl.zeros([SHAPE.WIDTH], tl.float32)
    for first in range(start, end, SHAPE.STEP):
        m = first + tl.arange(0, SHAPE.STEP)
        live = m < end
        pair, place = m, m
        if factors[1] is not None:
            pair = tl.load(factors[1] + m, mask=live, other=0)
        if lookup[1] is not None:
            place = tl.load(lookup[1] + m, mask=live, other=0)
        grad = tl.load(factors[0] + pair, mask=live, other=0.0)
        row = tl.load(lookup[0] + place, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & inside_row[None, :]
        values = tl.load(table.data + row[:, None] * table.stride + e[None, :], mask=inside, other=0.0)
        total += tl.sum(grad[:, None] * values.to(tl.float32), axis=0)
    target = out.data + tl.load(rows.places + a) * out.stride + e
    if ADD:
        total += tl.load(target, mask=inside_row, other=0.0).to(tl.float32)
    tl.store(target, _stored(total, out.data), mask=inside_row)


@_jit
def _scale_row(
    out_ptr: tl.tensor,  # [T, E], rows out_stride apart
    out_stride: tl.tensor,
    rows_ptr: tl.tensor,  # [A] int64
    factors_ptr: tl.tensor,  # [A] float32
    derivative_ptr: tl.tensor,  # [A, E]
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    a = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    derivative = tl.load(derivative_ptr + a * SIZE + e, mask=e < SIZE, other=0.0).to(tl.float32)
    scaled = tl.load(factors_ptr + a) * derivative
    tl.store(out_ptr + tl.load(rows_ptr + a) * out_stride + e, _stored(scaled, out_ptr), mask=e < SIZE)
