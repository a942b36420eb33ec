"""`Head`: the logits at the sampled positions, in the precision they were computed in and exactly where needed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DenseHead", "Head"]


class Head(Protocol):
    """What a language-model head gives for the B sampled positions.

    logits: [B, V]. float32 logits are exact: accumulated and stored in float32. bfloat16 or float16 logits are the
    exact ones as a half-precision product rounded them; the sampler only selects candidates with those.
    """

    @property
    def logits(self) -> Tensor:
        """[B, V] float32, bfloat16 or float16."""
        ...

    def rescore(self, rows: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Exact logits [P] float32 of ids [P] int32 or int64, each in [0, V).

        rows: [M] int64. offsets: [M+1] int64; ids[offsets[m] : offsets[m + 1]] are those of rows[m].
        """
        ...

    def float32(self, rows: Tensor) -> Tensor:
        """rows: [M] int64. Returns [M, V] float32, the exact logits, in a new tensor the caller may overwrite."""
        ...


class DenseHead:
    """A head whose exact logits are all there. logits: [B, V] float32."""

    def __init__(self, logits: Tensor) -> None:
        if logits.ndim != 2 or logits.dtype != torch.float32:
            raise ValueError(f"logits: must be [B, V] float32, got {list(logits.shape)} {logits.dtype}")
        self.logits = logits

    def rescore(self, rows: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """[P] float32: the logits of `ids` in `rows`."""
        return self.logits[rows.repeat_interleave(offsets.diff()), ids]

    def float32(self, rows: Tensor) -> Tensor:
        """[M, V] float32: a copy of `rows`."""
        return self.logits.index_select(0, rows)
