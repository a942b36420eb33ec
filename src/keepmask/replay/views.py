"""`PaddedBatch`, the tokens of a `ReplayBatch` padded, and the index arithmetic of batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.replay.support import Support

__all__ = ["PaddedBatch", "boundaries", "counts_in", "pairs_of", "scattered", "spans_of"]


class PaddedBatch(NamedTuple):
    """The tokens of a `ReplayBatch` as [S, L]. Row r takes the logits at place logit_positions[r] of the S * L."""

    input_ids: Tensor
    """[S, L] int64."""
    attention_mask: Tensor
    """[S, L] int64: 1 at tokens, 0 at padding."""
    position_ids: Tensor
    """[S, L] int64; 0 at padding."""
    logit_positions: Tensor
    """[R] int64: `hidden.flatten(0, 1)[logit_positions]` for hidden [S, L, E]."""
    label_positions: Tensor
    """[R] int64: the place of the token each row scores."""

    def inputs(self) -> dict[str, Tensor | bool]:
        """What a model of transformers takes: `model.model(**batch.padded().inputs())`."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "use_cache": False,
        }

    def to_tokens(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[S, L]: each row's value at the token it scores, `fill` elsewhere. values: [R]. Differentiable."""
        return scattered(values, self.label_positions, self.input_ids.numel(), fill).view(self.input_ids.shape)


def boundaries(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[S+1] int32: 0, and the sums of the first 1, 2, ... lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def spans_of(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """[sum of lengths] int64: start, start + 1, ... of every (start, length)."""
    parts = [torch.arange(start, start + length, device=device) for start, length in spans]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def counts_in(numbers: Tensor, ends: list[int]) -> tuple[int, ...]:
    """How many of `numbers` fall into each of the consecutive ranges that end at `ends`."""
    if not ends:
        return ()
    index = torch.searchsorted(torch.tensor(ends, device=numbers.device), numbers, right=True)
    return tuple(torch.bincount(index, minlength=len(ends)).tolist())


def pairs_of(support: Support, rows: Tensor) -> Tensor:
    """[M] int64: the numbers of the pairs of these rows, in their order."""
    numbers = torch.arange(support.num_pairs, device=support.ids.device)
    return replace(support, ids=numbers).select(rows).ids


def scattered(values: Tensor, places: Tensor, size: int, fill: float) -> Tensor:
    """[size]: values at their places, `fill` elsewhere. Differentiable."""
    if values.shape != places.shape:
        raise MaskError(f"{list(values.shape)} values for {places.numel()} rows; each row has one")
    return values.new_full((size,), fill).index_put((places,), values)
