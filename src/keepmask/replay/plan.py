"""`Plan`: which rows are scored, and how, before any arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.replay.scores import RowStatus
from keepmask.replay.support import Active, Support, listed_rows

__all__ = ["OnEmpty", "OnOutside", "Plan", "as_support", "check_loss_mask", "plan_rows"]

OnEmpty = Literal["full", "ignore", "error"]
OnOutside = Literal["error", "ignore"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """The rows of a batch by what has to be computed for them."""

    status: Tensor
    """[T] int8, values of `RowStatus`."""
    active: Active
    """The rows scored on their pairs; A of them."""
    positions: Tensor
    """[A] int64: the active pair of each of their targets."""
    full_rows: Tensor
    """[F] int64: the empty rows to score on the whole vocabulary."""


def as_support(mask: SamplingMask | Support, targets: Tensor, vocab_size: int) -> Support:
    """The mask as a support on the device of `targets`. Raises MaskError where it cannot be theirs."""
    if targets.ndim != 1 or targets.dtype not in (torch.int32, torch.int64):
        raise MaskError(f"targets: must be a flat integer tensor, got {targets.dtype} {list(targets.shape)}")
    if not isinstance(mask, SamplingMask | Support):
        raise MaskError(
            f"mask: must be a SamplingMask or a Support, got {type(mask).__name__}; SamplingMask.from_lists takes lists"
        )
    support = Support.from_mask(mask, targets.device) if isinstance(mask, SamplingMask) else mask
    if support.ids.device != targets.device:
        raise MaskError(f"the mask is on {support.ids.device}, the targets on {targets.device}; move one of them")
    if support.num_rows != targets.numel():
        raise MaskError(
            f"{support.num_rows} rows for {targets.numel()} targets: each token needs its own row; "
            "shard, shift or pad the rows together with the tokens"
        )
    support.check_ids(vocab_size)
    return support


def check_loss_mask(loss_mask: Tensor | None, targets: Tensor) -> None:
    """Raise MaskError unless it is None, or one bool for each target."""
    if loss_mask is not None and (loss_mask.dtype != torch.bool or loss_mask.shape != targets.shape):
        raise MaskError(
            f"loss_mask: must be bool of shape {list(targets.shape)}, got {loss_mask.dtype} {list(loss_mask.shape)}"
        )


def plan_rows(
    support: Support,
    targets: Tensor,
    vocab_size: int,
    *,
    loss_mask: Tensor | None,
    on_empty: OnEmpty,
    on_outside: OnOutside,
) -> Plan:
    """Sort the rows by what they need. Raises MaskError, naming the rows, for what the policies do not allow."""
    check_loss_mask(loss_mask, targets)
    key = (targets, loss_mask, on_empty, on_outside)
    plan = support.remember("plan", key, lambda: _plan(support, targets, loss_mask, on_empty, on_outside))
    outside_vocabulary = targets[plan.full_rows]
    outside_vocabulary = (outside_vocabulary < 0) | (outside_vocabulary >= vocab_size)
    if plan.full_rows.numel() and bool(outside_vocabulary.any()):
        rows = plan.full_rows[outside_vocabulary]
        raise MaskError(f"{listed_rows(rows)}: targets must be in [0, {vocab_size})")
    return plan


def _plan(
    support: Support, targets: Tensor, loss_mask: Tensor | None, on_empty: OnEmpty, on_outside: OnOutside
) -> Plan:
    counts = support.counts
    status = torch.where(counts == 1, int(RowStatus.SINGLETON), int(RowStatus.SUPPORT)).to(torch.int8)
    if on_outside == "error":
        support.check_members(targets, loss_mask)
        active = support.active(loss_mask)
    else:
        outside = (support.target_positions(targets) < 0) & (counts > 0)
        status.masked_fill_(outside, int(RowStatus.OUTSIDE))
        active = support.active(~outside if loss_mask is None else loss_mask & ~outside)
    status.masked_fill_(counts == 0, int(RowStatus.IGNORED if on_empty == "ignore" else RowStatus.FULL))
    if loss_mask is not None:
        status.masked_fill_(~loss_mask, int(RowStatus.LOSS_MASKED))
    full_rows = counts.new_zeros(0)
    if support.has_empty_rows:
        full_rows = (status == RowStatus.FULL).nonzero()[:, 0]
    if full_rows.numel() and on_empty == "error":
        raise MaskError(
            f"{listed_rows(full_rows)}: empty, which stands for the whole vocabulary; leave such tokens out with "
            'loss_mask or on_empty="ignore", or score them on the whole vocabulary with on_empty="full"'
        )
    positions = active.pairs.positions(targets[active.pairs.rows])
    return Plan(status=status, active=active, positions=positions, full_rows=full_rows)
