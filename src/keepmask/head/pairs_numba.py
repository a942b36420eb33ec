"""The operations of `pairs` and `pair_rows` compiled for the CPU: each row is read once, in its own type.

Work is split between rows, so results do not depend on the number of threads. All sums are float32, those over the
pairs of a row float64. Importing this module loads numba, so it is imported on first use only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepmask.compiled.jit import jit_reassociated
from keepmask.compiled.numerics import array, exp, narrow, widen
from keepmask.compiled.team_rows import on_team, run_pairs
from keepmask.head.pairs import Pairs

__all__ = ["add_weight_gradient", "hidden_gradient", "member_logprobs", "pair_gradient", "pair_logits", "row_stats"]

_LEAST_PRODUCTS = 512  # pairs worth a thread: a row of the head each
_LEAST_NUMBERS = 16384  # pairs worth a thread: a few numbers each


def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """`pair_products.pair_logits`."""
    out = torch.empty(pairs.num_pairs, dtype=torch.float32)
    arrays = (array(hidden), pairs.rows.numpy(), array(weight), pairs.ids.numpy(), out.numpy())
    run_pairs(_pair_logits, arrays, offsets=pairs.offsets, least=_LEAST_PRODUCTS)
    return out


def hidden_gradient(out: Tensor, grad: Tensor, weight: Tensor, pairs: Pairs) -> None:
    """`pair_products.hidden_gradient`."""
    if not pairs.num_rows:
        out.zero_()
        return
    arrays = (array(out), pairs.rows.numpy(), grad.numpy(), array(weight), pairs.ids.numpy())
    run_pairs(_set_rows, arrays, offsets=pairs.offsets, least=_LEAST_PRODUCTS)


def add_weight_gradient(out: Tensor, grad: Tensor, hidden: Tensor, pairs: Pairs) -> None:
    """`pair_products.add_weight_gradient`."""
    kernel = _add_rows_in_place if out.dtype == torch.float32 else _add_rows
    order, index, ids, offsets = pairs.by_id
    tensors = (ids, grad, order)
    arrays = (array(out), *(t.numpy() for t in tensors), array(hidden), pairs.rows.numpy(), index.numpy())
    run_pairs(kernel, arrays, offsets=offsets, least=_LEAST_PRODUCTS)


def row_stats(z: Tensor, offsets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`pair_rows.row_stats`."""
    peak, target = torch.empty(2, positions.numel())
    total, weighted = torch.empty(2, positions.numel(), dtype=torch.float64)
    arrays = tuple(t.numpy() for t in (z, positions, peak, total, weighted, target))
    run_pairs(_row_stats, arrays, offsets=offsets, least=_LEAST_NUMBERS)
    return peak, total, weighted, target


def member_logprobs(z: Tensor, offsets: Tensor, peak: Tensor, log_total: Tensor) -> Tensor:
    """`pair_rows.member_logprobs`."""
    out = torch.empty_like(z)
    arrays = tuple(t.numpy() for t in (z, peak, log_total, out))
    run_pairs(_member_logprobs, arrays, offsets=offsets, least=_LEAST_NUMBERS)
    return out


def pair_gradient(
    logprobs: Tensor,
    offsets: Tensor,
    positions: Tensor,
    for_targets: Tensor | None,
    for_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`pair_rows.pair_gradient`."""
    zeros = torch.zeros(positions.numel())
    targets = zeros if for_targets is None else for_targets.contiguous()
    weights, values = (zeros, zeros) if for_entropy is None else for_entropy
    out = torch.empty_like(logprobs)
    arrays = tuple(t.numpy() for t in (logprobs, positions, targets, weights.contiguous(), values, out))
    run_pairs(_pair_gradient, arrays, offsets=offsets, least=_LEAST_NUMBERS)
    return out


# The loops over e are what is vectorised; four rows at a time keep the loads independent of each other.


@jit_reassociated
def _pair_logits_of(
    hidden: Any, rows: Any, weight: Any, ids: Any, out: Any, offsets: Any, start: int, stop: int
) -> None:
    size = hidden.shape[1]
    h = np.empty(size, np.float32)
    for a in range(start, stop):
        source = hidden[rows[a]]
        for e in range(size):
            h[e] = widen(source[e])
        m, end = offsets[a], offsets[a + 1]
        while m + 4 <= end:
            w0, w1, w2, w3 = weight[ids[m]], weight[ids[m + 1]], weight[ids[m + 2]], weight[ids[m + 3]]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for e in range(size):
                s0 += h[e] * widen(w0[e])
                s1 += h[e] * widen(w1[e])
                s2 += h[e] * widen(w2[e])
                s3 += h[e] * widen(w3[e])
            out[m], out[m + 1], out[m + 2], out[m + 3] = s0, s1, s2, s3
            m += 4
        while m < end:
            w0, s0 = weight[ids[m]], np.float32(0)
            for e in range(size):
                s0 += h[e] * widen(w0[e])
            out[m] = s0
            m += 1


@jit_reassociated
def _set_rows_of(out: Any, rows: Any, grad: Any, weight: Any, ids: Any, offsets: Any, start: int, stop: int) -> None:
    """Row rows[a] of `out` gets the sum of grad[m] * weight[ids[m]] over the pairs of a; rows in between get 0."""
    size = out.shape[1]
    total = np.empty(size, np.float32)
    for a in range(start, stop):
        for t in range(rows[a - 1] + 1 if a > 0 else 0, rows[a]):
            out[t] = 0
        total[:] = 0
        m, end = offsets[a], offsets[a + 1]
        while m + 4 <= end:
            g0, g1, g2, g3 = grad[m], grad[m + 1], grad[m + 2], grad[m + 3]
            w0, w1, w2, w3 = weight[ids[m]], weight[ids[m + 1]], weight[ids[m + 2]], weight[ids[m + 3]]
            for e in range(size):
                total[e] += (g0 * widen(w0[e]) + g1 * widen(w1[e])) + (g2 * widen(w2[e]) + g3 * widen(w3[e]))
            m += 4
        while m < end:
            g0, w0 = grad[m], weight[ids[m]]
            for e in range(size):
                total[e] += g0 * widen(w0[e])
            m += 1
        target = out[rows[a]]
        for e in range(size):
            target[e] = narrow(total[e], target[e])
    if stop == rows.size:
        for t in range(rows[stop - 1] + 1, out.shape[0]):
            out[t] = 0


@jit_reassociated
def _add_products(total: Any, grad: Any, order: Any, hidden: Any, rows: Any, index: Any, m: int, end: int) -> None:
    """Adds grad[order[m]] * hidden[rows[index[m]]] for m up to end to `total`, float32."""
    size = total.size
    while m + 4 <= end:
        g0, g1, g2, g3 = grad[order[m]], grad[order[m + 1]], grad[order[m + 2]], grad[order[m + 3]]
        h0, h1 = hidden[rows[index[m]]], hidden[rows[index[m + 1]]]
        h2, h3 = hidden[rows[index[m + 2]]], hidden[rows[index[m + 3]]]
        for e in range(size):
            total[e] += (g0 * widen(h0[e]) + g1 * widen(h1[e])) + (g2 * widen(h2[e]) + g3 * widen(h3[e]))
        m += 4
    while m < end:
        g0, h0 = grad[order[m]], hidden[rows[index[m]]]
        for e in range(size):
            total[e] += g0 * widen(h0[e])
        m += 1


@jit_reassociated
def _add_rows_of(
    out: Any, ids: Any, grad: Any, order: Any, hidden: Any, rows: Any, index: Any, offsets: Any, start: int, stop: int
) -> None:
    """For a bfloat16 `out`: a sum is formed aside, added and rounded once."""
    total = np.empty(out.shape[1], np.float32)
    for u in range(start, stop):
        total[:] = 0
        _add_products(total, grad, order, hidden, rows, index, offsets[u], offsets[u + 1])
        target = out[ids[u]]
        for e in range(total.size):
            target[e] = narrow(widen(target[e]) + total[e], target[e])


@jit_reassociated
def _add_rows_in_place_of(
    out: Any, ids: Any, grad: Any, order: Any, hidden: Any, rows: Any, index: Any, offsets: Any, start: int, stop: int
) -> None:
    """For a float32 `out`."""
    for u in range(start, stop):
        _add_products(out[ids[u]], grad, order, hidden, rows, index, offsets[u], offsets[u + 1])


_NEGLIGIBLE = np.float32(-64)  # as in `pair_rows`


@jit_reassociated
def _row_stats_of(
    z: Any, positions: Any, peak: Any, total: Any, weighted: Any, target: Any, offsets: Any, start: int, stop: int
) -> None:
    for a in range(start, stop):
        high = np.float32(-np.inf)
        for m in range(offsets[a], offsets[a + 1]):
            high = z[m] if z[m] > high else high
        one, other = 0.0, 0.0
        for m in range(offsets[a], offsets[a + 1]):
            centred = z[m] - high
            centred = _NEGLIGIBLE if centred < _NEGLIGIBLE else centred
            weight = exp(centred)
            one += weight
            other += weight * centred
        peak[a], total[a], weighted[a] = high, one, other
        target[a] = z[positions[a]] if positions[a] >= 0 else 0


@jit_reassociated
def _member_logprobs_of(z: Any, peak: Any, log_total: Any, out: Any, offsets: Any, start: int, stop: int) -> None:
    for a in range(start, stop):
        for m in range(offsets[a], offsets[a + 1]):
            out[m] = (z[m] - peak[a]) - log_total[a]


@jit_reassociated
def _pair_gradient_of(
    logprobs: Any,
    positions: Any,
    targets: Any,
    weights: Any,
    values: Any,
    out: Any,
    offsets: Any,
    start: int,
    stop: int,
) -> None:
    for a in range(start, stop):
        for m in range(offsets[a], offsets[a + 1]):
            logprob = _NEGLIGIBLE if logprobs[m] < _NEGLIGIBLE else logprobs[m]
            prob = np.float32(0) if logprobs[m] < _NEGLIGIBLE else exp(logprob)
            out[m] = -prob * (targets[a] + weights[a] * (logprob + values[a]))
        if positions[a] >= 0:
            out[positions[a]] += targets[a]


# Each of the above on all rows.


@jit_reassociated
def _pair_logits(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_pair_logits_of, args, cuts, num_threads, team)


@jit_reassociated
def _set_rows(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_set_rows_of, args, cuts, num_threads, team)


@jit_reassociated
def _add_rows(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_add_rows_of, args, cuts, num_threads, team)


@jit_reassociated
def _add_rows_in_place(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_add_rows_in_place_of, args, cuts, num_threads, team)


@jit_reassociated
def _row_stats(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_row_stats_of, args, cuts, num_threads, team)


@jit_reassociated
def _member_logprobs(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_member_logprobs_of, args, cuts, num_threads, team)


@jit_reassociated
def _pair_gradient(args: Any, cuts: Any, num_threads: int, team: int) -> None:
    on_team(_pair_gradient_of, args, cuts, num_threads, team)
