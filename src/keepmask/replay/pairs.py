"""Softmax statistics over ragged rows of (row, id) pairs, and their derivatives.

A is the number of rows, N of pairs; `index` [N] int64 is the row of each pair, `offsets` [A+1] int64 its CSR form.
z is a transformed logit, p_j = exp(z_j) / sum of exp(z) over the row of j.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "NEGLIGIBLE",
    "RowScores",
    "RowStats",
    "divergence",
    "finish",
    "member_logprobs",
    "pair_gradient",
    "probabilities",
    "row_stats",
    "row_sums",
]


NEGLIGIBLE = -64.0
"""Log-probabilities below this, 1.6e-28, are taken as that or as nothing. Their exponentials, and products with them,
would be denormal numbers, which slow arithmetic down tenfold."""


class RowStats(NamedTuple):
    """What one share of the vocabulary says about each row; [A] each. A row with nothing in it has peak -inf."""

    peak: Tensor
    """The largest z."""
    total: Tensor
    """Sum of exp(z - peak), float64."""
    weighted: Tensor
    """Sum of exp(z - peak) * (z - peak), float64."""
    target: Tensor
    """z of the target, 0 where the target is not in this share."""


class RowScores(NamedTuple):
    """Scores of A rows, [A] each."""

    logprobs: Tensor
    entropy: Tensor
    log_normalizer: Tensor


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[A] float64: the sum of each row. Float64, so that a row of thousands of ids loses nothing."""
    return torch.segment_reduce(values.double(), "sum", offsets=offsets)


def row_stats(z: Tensor, index: Tensor, offsets: Tensor, positions: Tensor) -> RowStats:
    """positions: [A] int64, the pair of each row's target, -1 where it has none."""
    peak = torch.segment_reduce(z, "max", offsets=offsets)
    centred = (z - peak[index]).clamp_(min=NEGLIGIBLE)
    weights = centred.exp()
    target = z[positions.clamp(min=0)] if z.numel() else z.new_zeros(positions.shape)
    return RowStats(
        peak=peak,
        total=row_sums(weights, offsets),
        weighted=row_sums(weights * centred, offsets),
        target=torch.where(positions >= 0, target, 0.0),
    )


def finish(stats: RowStats) -> RowScores:
    """The scores that the statistics of all shares together give."""
    log_total = stats.total.log()
    scale = log_total.to(stats.peak.dtype)
    return RowScores(
        # The peak first: then the logarithm, which is small, is not rounded to the spacing of floats near the peak.
        logprobs=(stats.target - stats.peak) - scale,
        entropy=(log_total - stats.weighted / stats.total).to(stats.peak.dtype),
        log_normalizer=stats.peak + scale,
    )


def member_logprobs(z: Tensor, index: Tensor, stats: RowStats) -> Tensor:
    """[N]: log p_j of every pair."""
    return (z - stats.peak[index]) - stats.total.log().to(z.dtype)[index]


def probabilities(logprobs: Tensor) -> Tensor:
    """exp(logprobs), the negligible ones exactly 0."""
    return logprobs.exp().masked_fill_(logprobs < NEGLIGIBLE, 0.0)


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N]: p_j * (log p_j - log q_j), whose sum over a row is KL(p || q). reference: [N], log q_j."""
    return probabilities(logprobs) * _log_ratio(logprobs, reference)


def _log_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    return torch.where(logprobs < NEGLIGIBLE, 0.0, logprobs - reference)  # 0 * inf must not be formed


def pair_gradient(
    logprobs: Tensor,
    index: Tensor,
    positions: Tensor,
    *,
    for_targets: Tensor | None = None,
    for_entropy: tuple[Tensor, Tensor] | None = None,
    for_kl: tuple[Tensor, Tensor, Tensor] | None = None,
    for_members: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[N]: the derivative by each z of the weighted sum of scores whose weights are given.

    logprobs: [N], log p_j. for_targets: [A] weights of the targets' log-probabilities. for_entropy: [A] weights and
    values. for_kl: [A] weights and values, and [N] log-probabilities of the reference. for_members: [N] weights of
    log p_j and [A] their sums over the rows.
    """
    slope = torch.zeros_like(logprobs)  # what p_j is multiplied with
    if for_targets is not None:
        slope -= for_targets[index]
    if for_entropy is not None:
        weights, values = for_entropy
        slope -= weights[index] * (logprobs.clamp(min=NEGLIGIBLE) + values[index])
    if for_kl is not None:
        weights, values, reference = for_kl
        slope += weights[index] * (_log_ratio(logprobs, reference) - values[index])
    if for_members is not None:
        slope -= for_members[1].to(slope.dtype)[index]
    slope *= probabilities(logprobs)
    if for_members is not None:
        slope += for_members[0]
    if for_targets is not None and logprobs.numel():
        slope.index_add_(0, positions.clamp(min=0), torch.where(positions >= 0, for_targets, 0.0))
    return slope
