"""`SupportScores`: what scoring tokens on their supports returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

__all__ = ["RowStatus", "SupportScores"]


class RowStatus(IntEnum):
    """How a row was scored."""

    SUPPORT = 0
    """On its support of two ids or more."""
    SINGLETON = 1
    """One id, the target: log-probability, entropy, KL and gradients are exactly 0, and nothing was computed."""
    FULL = 2
    """An empty row, scored on the whole vocabulary."""
    LOSS_MASKED = 3
    """Left out by the loss mask: every value is 0."""
    IGNORED = 4
    """An empty row, left out by `on_empty="ignore"`: every value is 0."""
    OUTSIDE = 5
    """The target is not in its row, left out by `on_outside="ignore"`: every value is 0."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SupportScores:
    """Scores of T tokens under the policy renormalised on each token's support S_t, in nats.

    With z the transformed logits: logprobs[t] = z[target] - logsumexp(z over S_t). Values are float32, or float64
    where the inputs were. Rows that were not scored (`row_status`) hold 0, and pass no gradient.
    """

    logprobs: Tensor
    """[T], differentiable."""
    row_status: Tensor
    """[T] int8, values of `RowStatus`."""
    log_normalizer: Tensor
    """[T], logsumexp of z over the support; NaN in rows where it was not needed: singletons (unless the full
    normaliser was asked for) and rows left out. No gradient."""
    entropy: Tensor | None = None
    """[T], of the distribution on the support; differentiable with entropy="grad"."""
    kl: Tensor | None = None
    """[T], exact KL(policy || reference), both on the support; differentiable."""
    member_logprobs: Tensor | None = None
    """[N], log-probability of every member of every support, in the order of the support's ids; differentiable."""
    full_log_normalizer: Tensor | None = None
    """[T], logsumexp of z over the whole vocabulary; NaN in rows left out. No gradient."""

    @property
    def kept_mass(self) -> Tensor:
        """[T]: the policy's probability of the support within the whole vocabulary, exp(log_normalizer - full)."""
        return (self.log_normalizer - self._full()).exp().clamp_(max=1.0)

    @property
    def full_logprobs(self) -> Tensor:
        """[T]: log-probability of the target over the whole vocabulary; gradient as that of `logprobs`."""
        return self.logprobs + self.log_normalizer - self._full()

    def _full(self) -> Tensor:
        if self.full_log_normalizer is None:
            raise ValueError("the full-vocabulary log-normaliser was not computed: score with full_log_normalizer=True")
        return self.full_log_normalizer
