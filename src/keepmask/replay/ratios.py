"""Importance weights for tokens drawn by an engine whose log-probabilities differ from the trainer's.

r_t = exp(policy_logprobs - rollout_logprobs), with both log-probabilities on the token's support. Tensors are packed,
[T] with cu_seqlens [S+1], or padded, [B, L]; loss_mask has their shape. Weights carry no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.errors import MaskError

__all__ = [
    "ImportanceWeights",
    "icepop",
    "log_ratio",
    "mis",
    "sequence_mis",
    "sequence_sums",
    "sequence_tis",
    "spread_to_tokens",
    "tis",
]


class ImportanceWeights(NamedTuple):
    """What a token's loss is multiplied with, and which tokens are left.

    A masked-out (rejected) token has weight 0 and is not in `kept`. Passing `kept` to an objective as its loss mask
    takes rejected tokens out of the denominator too; passing the loss mask itself leaves them in it.
    """

    weights: Tensor
    """The shape of the tokens; 0 outside the loss mask. No gradient."""
    kept: Tensor
    """The same shape, bool: in the loss mask and not rejected."""
    truncated_share: Tensor
    """Scalar: the share of loss tokens whose weight was cut to the cap."""
    rejected_share: Tensor
    """Scalar: the share of loss tokens that were rejected."""


def log_ratio(policy_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """policy_logprobs - rollout_logprobs, in nats; 0 outside the loss mask, whatever is there. Differentiable."""
    if not policy_logprobs.shape == rollout_logprobs.shape == loss_mask.shape:
        raise MaskError(
            f"policy_logprobs {list(policy_logprobs.shape)}, rollout_logprobs {list(rollout_logprobs.shape)} and "
            f"loss_mask {list(loss_mask.shape)} must have one shape"
        )
    keep = loss_mask.bool()
    # Both operands are cleared before the subtraction: -inf - -inf outside the mask would make the gradient NaN.
    zero = policy_logprobs.new_zeros(())
    return torch.where(keep, policy_logprobs, zero) - torch.where(keep, rollout_logprobs, zero)


def tis(policy_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, *, cap: float = 2.0) -> ImportanceWeights:
    """Truncated importance sampling, a token at a time: w_t = min(r_t, cap).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    ratio = log_ratio(policy_logprobs, rollout_logprobs, loss_mask).detach().exp()
    return _truncated(ratio, loss_mask, _positive("cap", cap))


def mis(policy_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, *, cap: float = 2.0) -> ImportanceWeights:
    """Masked importance sampling, a token at a time: w_t = r_t where r_t <= cap, and rejected above.

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """
    ratio = log_ratio(policy_logprobs, rollout_logprobs, loss_mask).detach().exp()
    return _masked(ratio, loss_mask, 0.0, _positive("cap", cap))


def icepop(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, *, low: float = 0.5, high: float = 5.0
) -> ImportanceWeights:
    """Masking on both sides, a token at a time: w_t = r_t where low <= r_t <= high, and rejected elsewhere.

    Source: Ling Team 2025, IcePop, in "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model", arXiv:2510.18855; low and high are its alpha and beta.
    """
    if not 0 <= low <= 1 <= high:
        raise MaskError(f"low={low}, high={high}: must satisfy 0 <= low <= 1 <= high, so that equal policies are kept")
    ratio = log_ratio(policy_logprobs, rollout_logprobs, loss_mask).detach().exp()
    return _masked(ratio, loss_mask, low, high)


def sequence_tis(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float = 2.0,
    cu_seqlens: Tensor | None = None,
) -> ImportanceWeights:
    """Truncated importance sampling of whole sequences: every token of s gets min(product of r_t over s, cap).

    Source: as `mis`.
    """
    ratio = _sequence_ratio(policy_logprobs, rollout_logprobs, loss_mask, cu_seqlens)
    return _truncated(ratio, loss_mask, _positive("cap", cap))


def sequence_mis(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float = 2.0,
    cu_seqlens: Tensor | None = None,
) -> ImportanceWeights:
    """Masked importance sampling of whole sequences: the product of r_t over s where it is <= cap, and rejected above.

    Source: as `mis`.
    """
    ratio = _sequence_ratio(policy_logprobs, rollout_logprobs, loss_mask, cu_seqlens)
    return _masked(ratio, loss_mask, 0.0, _positive("cap", cap))


def sequence_sums(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[S]: the sum over each sequence, added up in float64 and of the type of `values`. Differentiable.

    values: [T] with cu_seqlens [S+1], sequence s being values[cu_seqlens[s]:cu_seqlens[s + 1]]; or [B, L] without, a
    row a sequence. Raises MaskError for a packed tensor without boundaries, or with boundaries of another length.
    """
    if cu_seqlens is None:
        if values.ndim != 2:
            raise MaskError(
                f"values of shape {list(values.shape)}: give cu_seqlens for packed tokens, or a padded [B, L] tensor"
            )
        return values.double().sum(1).to(values.dtype)
    _check_packed(values, cu_seqlens)
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens.long()).to(values.dtype)


def spread_to_tokens(per_sequence: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`per_sequence` [S] repeated for each token, in the shape of `like`: [T] with cu_seqlens [S+1], [B, L] without."""
    if cu_seqlens is None:
        return per_sequence[:, None].expand_as(like)
    _check_packed(like, cu_seqlens)
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff().long(), output_size=like.numel())


def _sequence_ratio(
    policy_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    difference = log_ratio(policy_logprobs, rollout_logprobs, loss_mask).detach()
    return spread_to_tokens(sequence_sums(difference, cu_seqlens).exp(), difference, cu_seqlens)


def _truncated(ratio: Tensor, loss_mask: Tensor, cap: float) -> ImportanceWeights:
    keep = loss_mask.bool()
    return ImportanceWeights(
        weights=torch.where(keep, ratio.clamp(max=cap), 0.0),
        kept=keep,
        truncated_share=_share(ratio > cap, keep),
        rejected_share=ratio.new_zeros(()),
    )


def _masked(ratio: Tensor, loss_mask: Tensor, low: float, high: float) -> ImportanceWeights:
    keep = loss_mask.bool()
    kept = keep & (ratio >= low) & (ratio <= high)
    return ImportanceWeights(
        weights=torch.where(kept, ratio, 0.0),
        kept=kept,
        truncated_share=ratio.new_zeros(()),
        rejected_share=_share(~kept, keep),
    )


def _share(of: Tensor, among: Tensor) -> Tensor:
    return (of & among).sum() / among.sum().clamp(min=1)


def _positive(name: str, value: float) -> float:
    if not value >= 1:
        raise MaskError(f"{name}={value}: must be >= 1, the ratio of equal policies")
    return value


def _check_packed(values: Tensor, cu_seqlens: Tensor) -> None:
    if values.ndim != 1 or cu_seqlens.ndim != 1 or not cu_seqlens.numel():
        raise MaskError(
            f"packed tokens are [T] with cu_seqlens [S+1], got {list(values.shape)} with {list(cu_seqlens.shape)}"
        )
    # Reading boundaries off another device would make the host wait.
    if cu_seqlens.device.type == "cpu" and (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != values.numel() or bool((cu_seqlens.diff() < 0).any())
    ):
        raise MaskError(
            f"cu_seqlens must rise from 0 to the number of tokens, {values.numel()}; it goes from {int(cu_seqlens[0])} "
            f"to {int(cu_seqlens[-1])}"
        )
