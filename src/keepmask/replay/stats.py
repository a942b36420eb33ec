"""Entropy and KL divergences of distributions on their supports, in nats."""

from __future__ import annotations

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.replay.support import Support

__all__ = ["entropy", "exact_kl", "k1", "k2", "k3", "masked_mean"]


def entropy(member_logprobs: Tensor, support: Support) -> Tensor:
    """[T]: -sum over S_t of p log p, with p = exp(member_logprobs). Differentiable.

    member_logprobs: [N], normalised over each row, in the order of `support.ids`; -inf counts as p log p = 0.
    An empty row holds no pairs and gives 0: the scoring functions compute the entropy of such rows.
    """
    return -_expected(member_logprobs, member_logprobs, support)


def exact_kl(policy_member_logprobs: Tensor, ref_member_logprobs: Tensor, support: Support) -> Tensor:
    """[T]: KL(policy || reference) = sum over S_t of p (log p - log q), both on the support. Differentiable.

    Both [N], normalised over each row, in the order of `support.ids`. Where p = 0 the term is 0; where only q = 0 it is
    infinite. An empty row gives 0.
    """
    return _expected(policy_member_logprobs, policy_member_logprobs - ref_member_logprobs, support)


def k1(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p(a) - log q(a), a drawn from p: unbiased for KL(policy || reference), of either sign (Schulman 2020)."""
    return policy_logprobs - ref_logprobs


def k2(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p(a) - log q(a))^2 / 2, a drawn from p: biased, never negative (Schulman 2020)."""
    return (policy_logprobs - ref_logprobs).square() / 2


def k3(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log r with r = q(a) / p(a), a drawn from p: unbiased, never negative (Schulman 2020)."""
    log_r = ref_logprobs - policy_logprobs
    return torch.expm1(log_r) - log_r


def masked_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The mean over the tokens of the loss mask, 0 when there are none; what is elsewhere, NaN too, does not matter."""
    keep = loss_mask.bool()
    return torch.where(keep, values, 0.0).sum() / keep.sum().clamp(min=1)


def _expected(logprobs: Tensor, values: Tensor, support: Support) -> Tensor:
    """[T]: the expectation of `values` [N] under exp(logprobs) [N] over each row, summed in float64."""
    _check_pairs(logprobs, support)
    _check_pairs(values, support)
    probs = logprobs.exp()
    # Both factors are cleared where p = 0, so that 0 * inf appears neither in the value nor in its gradient.
    possible = probs > 0
    terms = torch.where(possible, probs, 0.0) * torch.where(possible, values, 0.0)
    return torch.segment_reduce(terms.double(), "sum", offsets=support.offsets).to(logprobs.dtype)


def _check_pairs(values: Tensor, support: Support) -> None:
    if values.shape != (support.num_pairs,):
        raise MaskError(
            f"values of shape {list(values.shape)} for a support of {support.num_pairs} pairs: each pair has its own"
        )
