"""`MassOutside`: the probability the policy has moved outside the recorded supports, from a few exact rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keepmask.mask import SamplingMask
from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden
from keepmask.replay.plan import as_support, check_loss_mask
from keepmask.replay.policy_head import Head
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms

__all__ = ["MassOutside", "estimate_mass_outside"]


@dataclass(frozen=True, eq=False, kw_only=True)
class MassOutside:
    """The mean over tokens of the policy's probability outside the support, estimated without bias from a sample."""

    mean: float
    standard_error: float
    """Of the mean; 0 where every token was looked at, NaN where only one of several was."""
    rows: Tensor
    """[n] int64: the tokens looked at."""
    values: Tensor
    """[n]: the mass outside the support of each, exact."""
    num_tokens: int
    """How many tokens the sample was drawn from."""


@torch.no_grad()
def estimate_mass_outside(
    hidden: Tensor,
    head: Head | Tensor,
    targets: Tensor,
    mask: SamplingMask | Support,
    *,
    num_samples: int,
    generator: torch.Generator,
    transforms: TokenTransforms | None = None,
    loss_mask: Tensor | None = None,
) -> MassOutside:
    """Estimate the mass outside the supports, which the replayed objective cannot see, from `num_samples` tokens.

    Tokens are drawn evenly and without repetition from those in the loss mask, and their rows scored on the whole
    vocabulary as well: the cost is that of a dense product for so many rows. The error falls as 1 / sqrt(num_samples).

    generator: on the CPU; with a head that is spread over processes, in the same state on each. The rest as in
    `logprobs_from_hidden`, which says what is raised. A mask without any token to score is a ValueError.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: must be at least 1")
    head = head if isinstance(head, Head) else Head(head)
    support = as_support(mask, targets, head.vocab_size)
    check_loss_mask(loss_mask, targets)
    candidates = torch.arange(len(support)) if loss_mask is None else loss_mask.cpu().nonzero()[:, 0]
    if not candidates.numel():
        raise ValueError("no token to look at: the mask has no rows inside the loss mask")
    chosen = torch.randperm(candidates.numel(), generator=generator)[:num_samples]
    rows = candidates[chosen].sort().values.to(targets.device)
    scores = logprobs_from_hidden(
        hidden[rows],
        head,
        targets[rows],
        support.select(rows),
        transforms=None if transforms is None else transforms.select(rows),
        full_log_normalizer=True,
        options=ScoreOptions(members=False),
    )
    assert scores.full_log_normalizer is not None
    values = -torch.expm1((scores.log_normalizer - scores.full_log_normalizer).clamp(max=0.0).double())
    return MassOutside(
        mean=float(values.mean()),
        standard_error=_standard_error(values, candidates.numel()),
        rows=rows,
        values=values,
        num_tokens=candidates.numel(),
    )


def _standard_error(values: Tensor, population: int) -> float:
    """Of the mean of a sample drawn without repetition (Cochran 1977, section 2.6)."""
    size = values.numel()
    if size == population:
        return 0.0
    if size == 1:
        return float("nan")
    return float((values.var() / size * (1 - size / population)).sqrt())
