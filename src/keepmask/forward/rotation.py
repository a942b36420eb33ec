"""`Rotation`: the angles of rotary position embeddings, the same for a position whatever comes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Rotation"]

_PIECE = (
    2048  # values that torch computes on one thread: where threads divide more, the ends of their shares may differ
)
_MOVING = {"dynamic", "longrope"}  # angles of a position that depend on the longest text in the batch


class Rotation:
    """cos and sin [T, D] of positions, as a rotary module of transformers gives them.

    On CPUs they are computed once for each position, in pieces of always the same positions, and kept.
    """

    def __init__(self, module: Any, like: Tensor) -> None:
        self._module, self._like = module, like
        self._is_kept = like.device.type == "cpu" and getattr(module, "rope_type", "default") not in _MOVING
        self._kept = [torch.empty(0), torch.empty(0)]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, contiguous, of positions [T] int64."""
        if not self._is_kept:
            return self._angles(positions)
        if (missing := int(positions.max()) + 1 - len(self._kept[0])) > 0:
            self._extend(max(missing, len(self._kept[0])))
        cos, sin = (part[positions] for part in self._kept)
        return cos, sin

    def _extend(self, count: int) -> None:
        """Compute at least this many positions more."""
        start = len(self._kept[0])
        rows = max(1, _PIECE // self._angles(torch.zeros(1, dtype=torch.int64))[0].shape[1])
        pieces = [self._angles(torch.arange(at, at + rows)) for at in range(start, start + count, rows)]
        for at in range(2):
            known = [self._kept[at]] if start else []
            self._kept[at] = torch.cat([*known, *(piece[at] for piece in pieces)])

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(self._like, positions[None])
        return cos[0].contiguous(), sin[0].contiguous()
