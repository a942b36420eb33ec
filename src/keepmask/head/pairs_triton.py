"""The operations of `pairs` and `pair_scores` in Triton, for GPUs.

`score_rows` reads each head row of a token's support once: while it is in registers, its logit updates an online
softmax (Milakov and Gimelshein 2018) and the row itself a running sum of p_j * dz_j/dlogit_j * w_j, which at the end
is half of the derivative of the log-probability by the hidden state. Tokens of wide supports start first, so that
none is left over at the end. The weight's gradient sums the hidden states of each id's pairs, which stand together:
no atomic operation, so the result is the same bits each time.

All arithmetic is float32. Under `TRITON_INTERPRET=1`, set before Triton is first imported, this runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from keepmask.head.form import HeadForm, PairTransforms

__all__ = ["add_weight_gradient", "hidden_gradient", "scale_rows", "score_rows"]

_TILE = 8192  # entries of the head or of the hidden states that a program holds at a time


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def score_rows(
    hidden: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    positions: Tensor,
    form: HeadForm,
    transforms: PairTransforms,
    *,
    jacobian: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """`pair_scores.score_pairs`: logits, statistics, derivative."""
    num_rows, size = rows.numel(), hidden.shape[1]
    logits = torch.empty(ids.numel(), dtype=torch.float32, device=hidden.device)
    stats = torch.empty(4, num_rows, dtype=torch.float32, device=hidden.device)
    derivative = hidden.new_empty(num_rows, size) if jacobian else None
    if num_rows:
        width = triton.next_power_of_2(size)
        per_pair = {
            "pair_bias": transforms.bias,
            "repetition": transforms.repetition,
            "subtract": transforms.subtract,
            "temperature": transforms.temperature,
        }
        _score_row[(num_rows,)](
            hidden,
            hidden.stride(0),
            rows,
            weight,
            weight.stride(0),
            bias,
            ids,
            offsets,
            positions,
            torch.argsort(offsets.diff(), descending=True),
            *(None if tensor is None else tensor.float().contiguous() for tensor in per_pair.values()),
            logits,
            stats,
            derivative,
            num_rows,
            form.softcap or 0.0,
            form.scale,
            SIZE=size,
            WIDTH=width,
            STEP=max(2, min(16, _TILE // width)),
            ROUND=form.rounding is not None,
            CAP=form.softcap is not None,
            num_warps=8 if width >= 2048 else 4,
        )
    peak, total, weighted, target = stats
    return logits, (peak, total.double(), weighted.double(), target), derivative


def hidden_gradient(out: Tensor, rows: Tensor, grad: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor) -> None:
    """`pairs.hidden_gradient`."""
    if rows.numel() < out.shape[0]:
        out.zero_()
    _sum_rows(out, rows, offsets, grad, None, weight, ids, None, add=False, width=2048)


def scale_rows(out: Tensor, rows: Tensor, factors: Tensor, derivative: Tensor) -> None:
    """Equals `out.zero_(); out[rows] = factors[:, None] * derivative`. out: [T, E]. factors: [A]."""
    if rows.numel() < out.shape[0]:
        out.zero_()
    if rows.numel():
        width = min(2048, triton.next_power_of_2(out.shape[1]))
        grid = (rows.numel(), triton.cdiv(out.shape[1], width))
        _scale_row[grid](out, out.stride(0), rows, factors, derivative, out.shape[1], WIDTH=width, num_warps=4)


def add_weight_gradient(
    out: Tensor, ids: Tensor, grad: Tensor, order: Tensor, hidden: Tensor, rows: Tensor, index: Tensor, offsets: Tensor
) -> None:
    """`pairs.add_weight_gradient`."""
    # The most frequent ids have a pair in most rows: narrow programs, so that many share such a sum.
    _sum_rows(out, ids, offsets, grad, order, hidden, rows, index, add=True, width=256)


def _sum_rows(
    out: Tensor,
    places: Tensor,
    offsets: Tensor,
    grad: Tensor,
    order: Tensor | None,
    table: Tensor,
    rows: Tensor,
    index: Tensor | None,
    *,
    add: bool,
    width: int,
) -> None:
    """Sets out[places[a]] to, or adds to it, the sum of grad[order[m]] * table[rows[index[m]]] over the pairs of a."""
    if not places.numel():
        return
    size = out.shape[1]
    width = min(width, triton.next_power_of_2(size))
    _sum_row[(places.numel(), triton.cdiv(size, width))](
        out,
        out.stride(0),
        places,
        torch.argsort(offsets.diff(), descending=True),
        offsets,
        grad,
        order,
        table,
        table.stride(0),
        rows,
        index,
        SIZE=size,
        WIDTH=width,
        STEP=max(2, min(32, _TILE // width)),
        ADD=add,
        num_warps=4,
    )


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
def _score_row(
    hidden_ptr: tl.tensor,  # [T, E], rows hidden_stride apart
    hidden_stride: tl.tensor,
    rows_ptr: tl.tensor,  # [A] int64
    weight_ptr: tl.tensor,  # [V, E], rows weight_stride apart
    weight_stride: tl.tensor,
    bias_ptr: tl.tensor,  # [V] or None
    ids_ptr: tl.tensor,  # [M] int
    offsets_ptr: tl.tensor,  # [A+1] int64
    positions_ptr: tl.tensor,  # [A] int64
    schedule_ptr: tl.tensor,  # [A] int64, rows in the order in which to start them
    pair_bias_ptr: tl.tensor,  # [M] float32 or None, as the three below
    repetition_ptr: tl.tensor,
    subtract_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    logits_ptr: tl.tensor,  # [M] float32, out
    stats_ptr: tl.tensor,  # [4, A] float32, out: peak, total, weighted, target
    derivative_ptr: tl.tensor,  # [A, E], out, or None
    num_rows: tl.tensor,
    softcap: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    ROUND: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    a = tl.load(schedule_ptr + tl.program_id(0))
    start, end = tl.load(offsets_ptr + a), tl.load(offsets_ptr + a + 1)
    position = tl.load(positions_ptr + a)
    e = tl.arange(0, WIDTH)
    h = tl.load(hidden_ptr + tl.load(rows_ptr + a) * hidden_stride + e, mask=e < SIZE, other=0.0).to(tl.float32)
    peak = tl.full([], -1e30, tl.float32)  # finite: -inf - (-inf) must not be formed
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)
    target = tl.zeros([], tl.float32)
    target_slope = tl.zeros([], tl.float32)
    mean = tl.zeros([WIDTH], tl.float32)  # sum of exp(z - peak) * dz/dlogit * w
    for first in range(start, end, STEP):
        m = first + tl.arange(0, STEP)
        live = m < end
        ids = tl.load(ids_ptr + m, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & (e < SIZE)[None, :]
        w = tl.load(weight_ptr + ids[:, None] * weight_stride + e[None, :], mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(w * h[None, :], axis=1)
        if bias_ptr is not None:
            logit += tl.load(bias_ptr + ids, mask=live, other=0.0).to(tl.float32)
        if ROUND:
            logit = _nearest_bfloat16(logit)
        logit *= scale
        slope = tl.full([STEP], 1.0, tl.float32) * scale
        if CAP:
            # tanh x = 1 - 2 / (exp(2 x) + 1)
            capped = 1.0 - 2.0 / (tl.exp(2.0 * logit / softcap) + 1.0)
            slope *= 1.0 - capped * capped
            logit = softcap * capped
        tl.store(logits_ptr + m, logit, mask=live)
        z = logit
        if pair_bias_ptr is not None:
            z += tl.load(pair_bias_ptr + m, mask=live, other=0.0)
        if repetition_ptr is not None:
            penalty = tl.load(repetition_ptr + m, mask=live, other=1.0)
            slope = tl.where(z > 0, slope / penalty, slope * penalty)
            z = tl.where(z > 0, z / penalty, z * penalty)
        if subtract_ptr is not None:
            z -= tl.load(subtract_ptr + m, mask=live, other=0.0)
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + m, mask=live, other=1.0)
            z /= temperature
            slope /= temperature
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
        if derivative_ptr is not None:
            mean = mean * old + tl.sum((p * slope)[:, None] * w, axis=0)
        peak = new_peak
    tl.store(stats_ptr + a, tl.where(end > start, peak, float("-inf")))
    tl.store(stats_ptr + num_rows + a, total)
    tl.store(stats_ptr + 2 * num_rows + a, weighted)
    tl.store(stats_ptr + 3 * num_rows + a, target)
    if derivative_ptr is not None:
        drawn = tl.load(ids_ptr + tl.maximum(position, 0), mask=position >= 0, other=0).to(tl.int64)
        w = tl.load(weight_ptr + drawn * weight_stride + e, mask=e < SIZE, other=0.0)
        derivative = target_slope * w.to(tl.float32) - mean / tl.maximum(total, 1e-30)
        tl.store(derivative_ptr + a * SIZE + e, _stored(derivative, derivative_ptr), mask=e < SIZE)


@_jit
def _sum_row(
    out_ptr: tl.tensor,  # [.., E], rows out_stride apart
    out_stride: tl.tensor,
    places_ptr: tl.tensor,  # [A] int64
    schedule_ptr: tl.tensor,  # [A] int64, rows in the order in which to start them
    offsets_ptr: tl.tensor,  # [A+1] int64
    grad_ptr: tl.tensor,  # [M] float32
    order_ptr: tl.tensor,  # [M] int64 or None
    table_ptr: tl.tensor,  # [.., E], rows table_stride apart
    table_stride: tl.tensor,
    rows_ptr: tl.tensor,  # [..] int
    index_ptr: tl.tensor,  # [M] int64 or None
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    a = tl.load(schedule_ptr + tl.program_id(0))
    start, end = tl.load(offsets_ptr + a), tl.load(offsets_ptr + a + 1)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(start, end, STEP):
        m = first + tl.arange(0, STEP)
        live = m < end
        pair = m
        if order_ptr is not None:
            pair = tl.load(order_ptr + m, mask=live, other=0)
        place = m
        if index_ptr is not None:
            place = tl.load(index_ptr + m, mask=live, other=0)
        grad = tl.load(grad_ptr + pair, mask=live, other=0.0)
        row = tl.load(rows_ptr + place, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & (e < SIZE)[None, :]
        values = tl.load(table_ptr + row[:, None] * table_stride + e[None, :], mask=inside, other=0.0)
        total += tl.sum(grad[:, None] * values.to(tl.float32), axis=0)
    target = out_ptr + tl.load(places_ptr + a) * out_stride + e
    if ADD:
        total += tl.load(target, mask=e < SIZE, other=0.0).to(tl.float32)
    tl.store(target, _stored(total, out_ptr), mask=e < SIZE)


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
