"""Policy-gradient objectives as functions of log-probabilities, and the advantages they take.

Tensors over tokens are packed, [T] with cu_seqlens [S+1], or padded, [B, L], all of one shape: policy_logprobs (the
only one with a gradient), old_logprobs, advantages (a sequence's advantage repeated for its tokens), loss_mask.
Log-probabilities are on the support, in nats. Only tokens of the loss mask count, whatever the others hold. Log-ratios
are clamped to +-20, which `clamped_fraction` counts.

weights: importance weights that multiply each token's policy term, `ratios.tis(...).weights` for one.
delta: bounds the ratio also where the advantage is negative, so that no token weighs more (Ye et al. 2020,
arXiv:1912.09729; `delta` of TRL's two-sided GRPO); None leaves it unbounded there.
penalty: added to each token's loss before averaging, a coefficient times a KL divergence for one.
denominator: what the sum is divided by, in the unit each docstring names; counted from the loss mask by default. Give
the count of the whole batch where the tokens are one micro-batch or one rank's share of it, and add up the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.replay.ratios import log_ratio, sequence_sums, spread_to_tokens
from keepmask.replay.support import Support

__all__ = ["PolicyLoss", "center", "cispo", "dapo", "dr_grpo", "grpo", "gspo", "score_centering", "standardize"]

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides, a factor of 5e8: one far token must not make a loss infinite."""


class PolicyLoss(NamedTuple):
    """The loss to call backward on, and what it was made of (no gradient)."""

    loss: Tensor
    """Scalar, to be minimised."""
    token_losses: Tensor
    """The shape of the tokens: each token's loss before averaging, 0 outside the loss mask."""
    ratio: Tensor
    """The same shape: exp(policy - old) of the token, or of its sequence where the objective takes that; 1 outside."""
    clip_fraction: Tensor
    """Scalar: the share of loss tokens whose ratio was clipped, so that they pass no gradient or a bounded one."""
    clamped_fraction: Tensor
    """Scalar: the share of loss tokens whose log-ratio was beyond +-20 and taken as that, without a gradient."""
    denominator: Tensor
    """Scalar: what the sum was divided by."""


def grpo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Group relative policy optimisation: the mean over sequences of the mean over each one's loss tokens of
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Denominator: sequences that have a loss token (each token is first divided by the loss tokens of its sequence).
    Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, equation 3.
    """
    ratio = _Ratio.of(log_ratio(policy_logprobs, old_logprobs, loss_mask))
    losses, clipped = _clipped(ratio, advantages, loss_mask, (clip_low, clip_high, delta))
    losses = _finished(losses, loss_mask, weights, penalty)
    return _mean_of_sequence_means(losses, ratio, clipped, loss_mask, cu_seqlens, denominator)


def dr_grpo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    max_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """GRPO without its length bias: the sum of the clipped token losses over a constant; take `center` advantages.

    Denominator: sequences that have a loss token, times max_tokens, the generation budget of a sequence (`denominator`
    is the number of sequences). Source: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783.
    """
    if max_tokens < 1:
        raise MaskError(f"max_tokens={max_tokens}: must be >= 1, the most tokens a sequence may generate")
    ratio = _Ratio.of(log_ratio(policy_logprobs, old_logprobs, loss_mask))
    losses, clipped = _clipped(ratio, advantages, loss_mask, (clip_low, clip_high, delta))
    losses = _finished(losses, loss_mask, weights, penalty)
    sequences = _num_sequences(loss_mask, cu_seqlens, losses) if denominator is None else denominator
    return _divided(losses, ratio, clipped, loss_mask, sequences * max_tokens)


def dapo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    delta: float | None = None,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Clip-higher with a token mean: the mean over all loss tokens of
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Denominator: loss tokens. Source: Yu et al. 2025, DAPO, arXiv:2503.14476, equation 8.
    """
    ratio = _Ratio.of(log_ratio(policy_logprobs, old_logprobs, loss_mask))
    losses, clipped = _clipped(ratio, advantages, loss_mask, (clip_low, clip_high, delta))
    losses = _finished(losses, loss_mask, weights, penalty)
    return _divided(losses, ratio, clipped, loss_mask, _num_tokens(loss_mask) if denominator is None else denominator)


def gspo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    delta: float | None = None,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Group sequence policy optimisation: GRPO with one ratio a sequence, the geometric mean of its tokens' ratios,
    exp(mean of policy - old over its loss tokens).

    Denominator: sequences that have a loss token. Source: Zheng et al. 2025, GSPO, arXiv:2507.18071, equations 5 and 7.
    """
    difference = log_ratio(policy_logprobs, old_logprobs, loss_mask)
    lengths = sequence_sums(loss_mask.to(difference.dtype), cu_seqlens).clamp(min=1)
    mean = sequence_sums(difference, cu_seqlens) / lengths
    ratio = _Ratio.of(spread_to_tokens(mean, difference, cu_seqlens))
    losses, clipped = _clipped(ratio, advantages, loss_mask, (clip_low, clip_high, delta))
    losses = _finished(losses, loss_mask, weights, penalty)
    return _mean_of_sequence_means(losses, ratio, clipped, loss_mask, cu_seqlens, denominator)


def cispo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_high: float,
    clip_low: float = 1.0,
    weights: Tensor | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Clipped importance-sampling weights: the mean over all loss tokens of -stop_gradient(clip(r, 1 - clip_low,
    1 + clip_high)) A log p. No token loses its gradient; clip_low = 1 leaves small ratios as they are.

    Denominator: loss tokens. Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    keep = loss_mask.bool()
    ratio = _Ratio.of(log_ratio(policy_logprobs, old_logprobs, loss_mask).detach())
    bounded = _bounded(ratio.values, clip_low, clip_high)
    losses = -bounded * _kept("advantages", advantages, loss_mask) * torch.where(keep, policy_logprobs, 0.0)
    losses = _finished(losses, loss_mask, weights, penalty)
    count = _num_tokens(loss_mask) if denominator is None else denominator
    return _divided(losses, ratio, bounded != ratio.values, loss_mask, count)


def score_centering(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    policy_member_logprobs: Tensor,
    rollout_member_logprobs: Tensor,
    support: Support,
    weight: Callable[[Tensor], Tensor] | None = None,
    penalty: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """REINFORCE with the sampler's expected score subtracted: the mean over all loss tokens of
    -A (w(r_a) log p(a) - sum over j in S of stop_gradient(q_j w(r_j)) log p_j), with r = p / q.

    When the sampler's q differs from the policy's p, the score has a mean under q, which pulls p towards q whatever the
    reward; this removes it exactly, since the support holds all of q. weight maps ratios to importance weights, such as
    `lambda r: r.clamp(max=2)`; None is 1.

    Tokens are packed, [T]. policy_member_logprobs: [N], differentiable; rollout_member_logprobs: [N], the mask's own;
    both normalised on the support, in the order of `support.ids`.
    Raises MaskError where a row of the loss mask is empty, since q is then unknown.
    Denominator: loss tokens. Source: Marek and Ryabinin 2026, Score Centering, arXiv:2609.20807.
    """
    keep = loss_mask.bool()
    if support.has_empty_rows and bool((keep & (support.counts == 0)).any()):
        raise MaskError("score centering needs the sampler's probabilities: loss tokens with whole-vocabulary rows")
    if not policy_member_logprobs.shape == rollout_member_logprobs.shape == support.ids.shape:
        raise MaskError(
            f"policy_member_logprobs {list(policy_member_logprobs.shape)} and rollout_member_logprobs "
            f"{list(rollout_member_logprobs.shape)} need one value for each of the {support.num_pairs} pairs"
        )
    ratio = _Ratio.of(log_ratio(policy_logprobs, rollout_logprobs, loss_mask).detach())
    pair_weights = rollout_member_logprobs.exp()
    drawn_weights = torch.ones_like(ratio.values)
    if weight is not None:
        drawn_weights = weight(ratio.values)
        pair_ratio = _Ratio.of(policy_member_logprobs.detach() - rollout_member_logprobs).values
        # What the sampler never draws weighs nothing, however large its ratio; 0 * inf must not be formed.
        pair_weights = torch.where(pair_weights > 0, pair_weights * weight(pair_ratio), 0.0)
    pairs = torch.where(keep[support.row_index], pair_weights * policy_member_logprobs, 0.0)
    expected = torch.segment_reduce(pairs.double(), "sum", offsets=support.offsets).to(policy_logprobs.dtype)
    centred = drawn_weights * torch.where(keep, policy_logprobs, 0.0) - expected
    losses = _finished(-_kept("advantages", advantages, loss_mask) * centred, loss_mask, None, penalty)
    count = _num_tokens(loss_mask) if denominator is None else denominator
    return _divided(losses, ratio, drawn_weights < ratio.values, loss_mask, count)


def center(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S]: reward minus the mean reward of its group. rewards: [S]; groups: [S] integers, equal within a group.

    Exactly 0 where all rewards of a group are equal. A reward that is not finite is left out of its group, and gets 0.
    Source: Liu et al. 2025, arXiv:2503.20783.
    """
    return _centred(rewards, groups)[0].to(_float(rewards))


def standardize(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """[S]: `center`, divided by the standard deviation of the group (over n - 1) plus epsilon; 0 in a group of one.

    Source: Shao et al. 2024, arXiv:2402.03300.
    """
    centred, index, counts = _centred(rewards, groups)
    squares = torch.zeros_like(counts).index_add_(0, index, centred.square())
    deviation = (squares / (counts - 1).clamp(min=1)).sqrt()
    return (centred / (deviation[index] + epsilon)).to(_float(rewards))


class _Ratio(NamedTuple):
    """Importance ratios of tokens, their logarithms clamped so that no loss overflows."""

    values: Tensor
    clamped: Tensor
    """Where the clamp was met; the gradient is 0 there."""

    @classmethod
    def of(cls, log_ratios: Tensor) -> _Ratio:
        return cls(log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp(), log_ratios.abs() > _MAX_LOG_RATIO)


def _clipped(
    ratio: _Ratio, advantages: Tensor, loss_mask: Tensor, bounds: tuple[float, float, float | None]
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic token losses (Schulman et al. 2017, arXiv:1707.06347), and where the clipped side was taken.

    bounds: clip_low, clip_high and delta, the upper bound of the side that is not clipped.
    """
    low, high, delta = bounds
    if delta is not None and not delta > 1 + high:
        raise MaskError(f"delta={delta}: must be above 1 + clip_high = {1 + high}; None leaves out the second bound")
    advantages = _kept("advantages", advantages, loss_mask)
    capped = ratio.values if delta is None else ratio.values.clamp(max=delta)
    free, bounded = capped * advantages, _bounded(ratio.values, low, high) * advantages
    return -torch.minimum(free, bounded), (bounded < free) | ((capped < ratio.values) & (advantages < 0))


def _bounded(ratio: Tensor, low: float, high: float) -> Tensor:
    if not (0 <= low <= 1 and high >= 0):
        raise MaskError(f"clip_low={low}, clip_high={high}: must be in [0, 1] and >= 0; ratios stay in [1-low, 1+high]")
    return ratio.clamp(1 - low, 1 + high)


def _finished(losses: Tensor, loss_mask: Tensor, weights: Tensor | None, penalty: Tensor | None) -> Tensor:
    """Weighted, penalised, and 0 outside the loss mask."""
    losses = losses if weights is None else losses * _kept("weights", weights, loss_mask)
    losses = losses if penalty is None else losses + _kept("penalty", penalty, loss_mask)
    return torch.where(loss_mask.bool(), losses, 0.0)


def _kept(name: str, values: Tensor, loss_mask: Tensor) -> Tensor:
    """`values`, 0 outside the loss mask whatever is there."""
    if values.shape != loss_mask.shape:
        raise MaskError(
            f"{name} must have the shape of the tokens, {list(loss_mask.shape)}, got {list(values.shape)}; repeat one "
            "a sequence for its tokens (ReplayBatch.expand)"
        )
    return torch.where(loss_mask.bool(), values, 0.0)


def _mean_of_sequence_means(
    losses: Tensor,
    ratio: _Ratio,
    clipped: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None,
    denominator: Tensor | float | None,
) -> PolicyLoss:
    lengths = sequence_sums(loss_mask.to(losses.dtype), cu_seqlens)
    count = (lengths > 0).sum() if denominator is None else denominator
    result = _divided(losses, ratio, clipped, loss_mask, count)
    means = sequence_sums(losses, cu_seqlens) / lengths.clamp(min=1)
    return result._replace(loss=means.sum() / result.denominator)


def _divided(
    losses: Tensor, ratio: _Ratio, clipped: Tensor, loss_mask: Tensor, denominator: Tensor | float
) -> PolicyLoss:
    # A micro-batch without loss tokens has loss 0, not 0 / 0.
    divisor = torch.as_tensor(denominator, dtype=losses.dtype, device=losses.device)
    divisor = torch.where(divisor == 0, 1.0, divisor)
    keep = loss_mask.bool()
    return PolicyLoss(
        loss=losses.sum() / divisor,
        token_losses=losses.detach(),
        ratio=torch.where(keep, ratio.values.detach(), 1.0),
        clip_fraction=(clipped & keep).sum() / keep.sum().clamp(min=1),
        clamped_fraction=(ratio.clamped & keep).sum() / keep.sum().clamp(min=1),
        denominator=divisor,
    )


def _num_tokens(loss_mask: Tensor) -> Tensor:
    return loss_mask.bool().sum()


def _num_sequences(loss_mask: Tensor, cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    return (sequence_sums(loss_mask.to(like.dtype), cu_seqlens) > 0).sum()


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: [S] rewards minus their group's mean, 0 where not finite; [S] groups; [G] how many are finite."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise MaskError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [S]")
    values, finite = rewards.double(), rewards.isfinite()
    distinct, index = torch.unique(groups, return_inverse=True)
    counts = values.new_zeros(distinct.numel()).index_add_(0, index, finite.double())
    # Against the least reward of the group first, so that equal rewards are exactly 0.
    least = torch.full_like(counts, torch.inf).scatter_reduce_(0, index, torch.where(finite, values, torch.inf), "amin")
    values = torch.where(finite, values - least[index], 0.0)
    means = torch.zeros_like(counts).index_add_(0, index, values) / counts.clamp(min=1)
    return torch.where(finite, values - means[index], 0.0), index, counts


def _float(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
