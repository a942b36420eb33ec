"""`LogitSource`: where the raw logits of some pairs, or of whole rows, come from and where their gradients go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from keepmask.head.form import PairTransforms
from keepmask.head.pair_products import wide
from keepmask.head.pair_rows import RowImpl, row_stats
from keepmask.head.pairs import Pairs

__all__ = ["Block", "LogitSource", "PairScores", "TableLogits"]

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


class PairScores(NamedTuple):
    """What a source says about M pairs of A rows."""

    logits: Tensor
    """[M], raw."""
    z: Tensor
    """[M], transformed."""
    stats: tuple[Tensor, Tensor, Tensor, Tensor]
    """`row_stats` of z, [A] each."""
    jacobian: Tensor | None
    """[A, E] of the type of the hidden states: the derivative of each target's log-probability by its hidden state."""


class LogitSource(Protocol):
    """Raw logits of T tokens, and the gradients they send back."""

    dtype: torch.dtype
    """The type of the arithmetic and of the logits given: float32 or float64."""
    row_impl: RowImpl
    """How to compute on the pairs of rows (`pair_rows`)."""

    def score_pairs(self, pairs: Pairs, positions: Tensor, transforms: PairTransforms, *, jacobian: bool) -> PairScores:
        """The scores of these pairs; positions: [A], those of the targets, -1 where there is none.

        jacobian: whether `backward_pairs` could use the derivative of the log-probabilities by the hidden states; it
        comes only where it costs little.
        """

    def backward_pairs(self, pairs: Pairs, logits: Tensor, grad: Tensor, by_row: tuple[Tensor, Tensor] | None) -> None:
        """Take in the gradient [M] of the pairs' logits, whose values were `logits`.

        by_row: where it is that of the targets' log-probabilities alone: their weights [A], and their derivative by
        the hidden states as `score_pairs` gave it.
        """

    def blocks(self) -> Iterator[Block]:
        """The vocabulary, or this process's share of it, piece by piece."""


class TableLogits:
    """Logits that exist: a [T, V] tensor."""

    def __init__(self, logits: Tensor, grad: Tensor | None = None) -> None:
        """grad: [T, V] zeros of the type of `logits`, written to by the backward methods."""
        self.table = logits
        self.grad = grad
        self.dtype = wide(logits.dtype)
        self.row_impl: RowImpl = "gather"
        self.ids = range(logits.shape[1])

    def score_pairs(self, pairs: Pairs, positions: Tensor, transforms: PairTransforms, *, jacobian: bool) -> PairScores:
        """`LogitSource.score_pairs`; there are no hidden states here."""
        logits = self.table[pairs.rows[pairs.index], pairs.ids.long()].to(self.dtype)
        z = transforms.apply(logits).to(self.dtype)
        return PairScores(logits, z, row_stats(z, pairs.index, pairs.offsets, positions, impl="gather"), None)

    def backward_pairs(self, pairs: Pairs, logits: Tensor, grad: Tensor, by_row: tuple[Tensor, Tensor] | None) -> None:
        """`LogitSource.backward_pairs`."""
        if self.grad is not None:
            self.grad[pairs.rows[pairs.index], pairs.ids.long()] = grad.to(self.grad.dtype)

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
