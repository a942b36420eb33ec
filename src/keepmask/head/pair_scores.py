"""Scores of rows of pairs out of hidden states and head rows, in one operation. Names as in `pairs`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.head import pairs
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pair_rows import RowImpl, member_logprobs, pair_gradient, row_stats

__all__ = ["PairScores", "score_pairs"]


class PairScores(NamedTuple):
    """What `score_pairs` gives."""

    logits: Tensor
    """[M], raw."""
    z: Tensor
    """[M], transformed."""
    stats: tuple[Tensor, Tensor, Tensor, Tensor]
    """`row_stats` of z, [A] each."""
    jacobian: Tensor | None
    """[A, E] of the type of the hidden states: the derivative of each target's log-probability by its hidden state."""


def score_pairs(
    hidden: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    index: Tensor,
    positions: Tensor,
    form: HeadForm,
    transforms: PairTransforms,
    *,
    jacobian: bool,
    max_pairs: int,
    impl: pairs.Impl,
) -> PairScores:
    """The pairs' logits, transformed logits and their statistics by row; with jacobian, the derivative as well.

    hidden: [T, E]. rows: [A]. weight: [V, E]. bias: [V]. ids, index: [M]. offsets: [A+1]. positions: [A], the pairs
    of the targets, -1 where there is none. transforms: [M] each.

    impl "triton" reads each head row once for all of it, and the gradient of the log-probabilities then needs no other
    pass over the head.
    """
    if impl == "triton":
        from keepmask.head import pairs_triton

        logits, stats, derivative = pairs_triton.score_rows(
            hidden, rows, weight, bias, ids, offsets, positions, form, transforms, jacobian=jacobian
        )
        return PairScores(logits, transforms.apply(logits), stats, derivative)
    row_impl: RowImpl = "numba" if impl == "numba" else "gather"
    products = pairs.pair_logits(hidden, rows, weight, ids, offsets, index, max_pairs=max_pairs, impl=impl)
    logits = form.apply(products if bias is None else products + bias.to(products.dtype)[ids])
    z = transforms.apply(logits).to(logits.dtype)
    stats = row_stats(z, index, offsets, positions, impl=row_impl)
    derivative = None
    if jacobian:
        members = member_logprobs(z, index, offsets, stats[0], stats[1].log().to(z.dtype), impl=row_impl)
        ones = torch.ones_like(stats[0])
        grad = pair_gradient(members, index, offsets, positions, ones, None, impl=row_impl)
        slope = transforms.slope(logits)
        grad = form.backward(logits, grad if slope is None else grad * slope)
        every_row = torch.arange(rows.numel(), device=rows.device)
        derivative = hidden.new_empty(rows.numel(), hidden.shape[1])
        pairs.hidden_gradient(derivative, every_row, grad, weight, ids, offsets, max_pairs=max_pairs, impl=impl)
    return PairScores(logits, z, stats, derivative)
