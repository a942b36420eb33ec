"""`LogitSource`: where the raw logits of some pairs, or of whole rows, come from and where their gradients go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from keepmask.kernels.replay_pairs import Impl, wide
from keepmask.replay.support import Support

__all__ = ["Block", "LogitSource", "TableLogits"]

BLOCK_FLOATS = 2**21
"""Most logits of whole rows held at a time: 8 MB, so that what is made of them stays in reach of the caches."""


class Block(Protocol):
    """The raw logits of some ids of the vocabulary, for any rows."""

    ids: range
    """The ids, W of them."""

    def logits(self, rows: Tensor) -> Tensor:
        """[R, W] float32 or float64. rows: [R] int64."""

    def backward(self, rows: Tensor, logits: Tensor, grad: Tensor) -> None:
        """Take in the gradient [R, W] of what `logits(rows)` gave, `logits`."""


class LogitSource(Protocol):
    """Raw logits of T tokens, and the gradients they send back."""

    dtype: torch.dtype
    """The type of the arithmetic and of the logits given: float32 or float64."""
    row_impl: Impl
    """How to compute on the pairs of rows (`replay_rows`)."""

    def pairs(self, rows: Tensor, support: Support) -> Tensor:
        """[M]: the logit of every pair of `support`, whose row a is token `rows[a]`."""

    def backward_pairs(self, rows: Tensor, support: Support, logits: Tensor, grad: Tensor) -> None:
        """Take in the gradient [M] of what `pairs` gave, `logits`."""

    def blocks(self) -> Iterator[Block]:
        """The vocabulary, or this process's share of it, piece by piece."""


class TableLogits:
    """Logits that exist: a [T, V] tensor."""

    def __init__(self, logits: Tensor, grad: Tensor | None = None) -> None:
        """grad: [T, V] zeros of the type of `logits`, written to by the backward methods."""
        self.table = logits
        self.grad = grad
        self.dtype = wide(logits.dtype)
        self.row_impl: Impl = "gather"
        self.ids = range(logits.shape[1])

    def pairs(self, rows: Tensor, support: Support) -> Tensor:
        """`LogitSource.pairs`."""
        return self.table[rows[support.row_index], support.ids.long()].to(self.dtype)

    def backward_pairs(self, rows: Tensor, support: Support, logits: Tensor, grad: Tensor) -> None:
        """`LogitSource.backward_pairs`."""
        if self.grad is not None:
            self.grad[rows[support.row_index], support.ids.long()] = grad.to(self.grad.dtype)

    def blocks(self) -> Iterator[Block]:
        """The table is its own and only block."""
        yield self

    def logits(self, rows: Tensor) -> Tensor:
        """`Block.logits`."""
        return self.table[rows].to(self.dtype)

    def backward(self, rows: Tensor, logits: Tensor, grad: Tensor) -> None:
        """`Block.backward`."""
        if self.grad is not None:
            self.grad[rows] = grad.to(self.grad.dtype)
