"""Softmax over ragged rows of (row, id) pairs, and its derivative.

A is the number of rows, M of pairs; `offsets` [A+1] int64 is the CSR form of the rows and `index` [M] int64 the row of
each pair. z is a transformed logit, p_j = exp(z_j) / sum of exp(z) over the row of j.

impl: "gather" is the definition, in plain PyTorch, "numba" the same compiled for float32 on a CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["NEGLIGIBLE", "RowImpl", "member_logprobs", "pair_gradient", "probabilities", "row_stats", "row_sums"]

RowImpl = Literal["gather", "numba"]

NEGLIGIBLE = -64.0
"""Log-probabilities below this, 1.6e-28, are taken as that or as nothing. Their exponentials, and products with them,
would be denormal numbers, which slow arithmetic down tenfold."""


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[A] float64: the sum of each row. Float64, so that a row of thousands of ids loses nothing."""
    return torch.segment_reduce(values.double(), "sum", offsets=offsets)


def probabilities(logprobs: Tensor) -> Tensor:
    """exp(logprobs), the negligible ones exactly 0."""
    return logprobs.exp().masked_fill_(logprobs < NEGLIGIBLE, 0.0)


def row_stats(
    z: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, *, impl: RowImpl
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row: its largest z; sum of exp(z - largest) and of exp(z - largest) * (z - largest), float64; z of the
    pair `positions[a]`, 0 where that is -1. An empty row has largest -inf and sums 0. Four times [A].
    """
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.row_stats(z, offsets, positions)
    peak = torch.segment_reduce(z, "max", offsets=offsets)
    centred = (z - peak[index]).clamp_(min=NEGLIGIBLE)
    weights = centred.exp()
    target = z[positions.clamp(min=0)] if z.numel() else z.new_zeros(positions.shape)
    target = torch.where(positions >= 0, target, 0.0)
    return peak, row_sums(weights, offsets), row_sums(weights * centred, offsets), target


def member_logprobs(
    z: Tensor, index: Tensor, offsets: Tensor, peak: Tensor, log_total: Tensor, *, impl: RowImpl
) -> Tensor:
    """[M]: (z - peak[index]) - log_total[index]."""
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.member_logprobs(z, offsets, peak, log_total)
    return (z - peak[index]) - log_total[index]


def pair_gradient(
    logprobs: Tensor,
    index: Tensor,
    offsets: Tensor,
    positions: Tensor,
    for_targets: Tensor | None,
    for_entropy: tuple[Tensor, Tensor] | None,
    *,
    impl: RowImpl,
) -> Tensor:
    """[M]: the derivative by each z of the sum over rows of weighted log-probabilities of targets and entropies.

    logprobs: [M], log p_j. positions: [A], the pairs of the targets, -1 where a row has none. for_targets: [A]
    weights. for_entropy: [A] weights and [A] values of the entropies.
    """
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.pair_gradient(logprobs, offsets, positions, for_targets, for_entropy)
    slope = torch.zeros_like(logprobs)
    if for_targets is not None:
        slope -= for_targets[index]
    if for_entropy is not None:
        weights, values = for_entropy
        slope -= weights[index] * (logprobs.clamp(min=NEGLIGIBLE) + values[index])
    slope *= probabilities(logprobs)
    if for_targets is not None and logprobs.numel():
        slope.index_add_(0, positions.clamp(min=0), torch.where(positions >= 0, for_targets, 0.0))
    return slope
