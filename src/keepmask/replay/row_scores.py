"""`RowStats` and `RowScores`: what rows of pairs come down to, and the gradients of KL and member log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.head.pair_rows import NEGLIGIBLE, probabilities

__all__ = ["RowScores", "RowStats", "divergence", "divergence_gradient", "finish", "members_gradient", "merge"]


class RowStats(NamedTuple):
    """What one share of the vocabulary says about each row; [A] each. A row with nothing in it has peak -inf."""

    peak: Tensor
    """The largest transformed logit, z."""
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
    log_total: Tensor
    """log_normalizer - peak."""


def merge(first: RowStats, second: RowStats) -> RowStats:
    """The statistics of two disjoint shares of the vocabulary together."""
    peak = torch.maximum(first.peak, second.peak)
    total, weighted = torch.zeros_like(first.total), torch.zeros_like(first.total)
    for share in (first, second):
        # A share with nothing in it has peak -inf and total 0; -inf - (-inf) must not be formed.
        shift = torch.where(share.total > 0, share.peak - peak, 0.0).double()
        scale = torch.where(share.total > 0, shift.exp(), 0.0)
        total += share.total * scale
        weighted += (share.weighted + share.total * shift) * scale
    return RowStats(peak, total, weighted, first.target + second.target)


def finish(stats: RowStats) -> RowScores:
    """The scores that the statistics of all shares together give."""
    log_total = stats.total.log()
    scale = log_total.to(stats.peak.dtype)
    return RowScores(
        # The peak first: then the logarithm, which is small, is not rounded to the spacing of floats near the peak.
        logprobs=(stats.target - stats.peak) - scale,
        entropy=(log_total - stats.weighted / stats.total).to(stats.peak.dtype),
        log_normalizer=stats.peak + scale,
        log_total=scale,
    )


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[M]: p_j * (log p_j - log q_j), whose sum over a row is KL(p || q). reference: [M], log q_j."""
    return probabilities(logprobs) * _log_ratio(logprobs, reference)


def divergence_gradient(logprobs: Tensor, reference: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """[M]: the derivative by z of the weighted sum of KLs. weights, values: [M], of the row of each pair."""
    return weights * probabilities(logprobs) * (_log_ratio(logprobs, reference) - values)


def members_gradient(logprobs: Tensor, weights: Tensor, sums: Tensor) -> Tensor:
    """[M]: the derivative by z of the sum of weights * log p_j. sums: [M], of the weights over the row of each pair."""
    return weights - probabilities(logprobs) * sums


def _log_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    return torch.where(logprobs < NEGLIGIBLE, 0.0, logprobs - reference)  # 0 * inf must not be formed
