"""Ranges of token ids: blocks and shards of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["places_in"]


def places_in(values: Tensor, ids: range) -> tuple[Tensor, Tensor]:
    """The place of each value in `ids` (0 where it has none), and whether it has one."""
    places = torch.div(values - ids.start, ids.step, rounding_mode="floor")
    inside = (places >= 0) & (places < len(ids)) & (values == ids.start + places * ids.step)
    return torch.where(inside, places, 0), inside
