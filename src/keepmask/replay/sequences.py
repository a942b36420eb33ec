"""Sums over sequences, for tensors packed one sequence after the other, [T], and padded ones, [B, L]."""

from __future__ import annotations

import torch
from torch import Tensor

from keepmask.errors import MaskError

__all__ = ["sequence_sums", "spread_to_tokens"]


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
