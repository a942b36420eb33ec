"""Log-probabilities of generated and prompt tokens, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BatchLogprobs", "TokenLogprobs", "finite", "prompt_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entries of one position: its token first, then the most likely other ids. No id comes twice.

    ids: [N] int64. values: [N] float32, finite, in nats (or the logits themselves, in the logits modes).
    ranks: [N] int64 from 1, by (value descending, id ascending) over the vocabulary, or over the support in the
    processed modes.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    ranks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLogprobs:
    """`TokenLogprobs` of a batch of B rows, padded. Row i has counts[i] entries, none where it asked for none."""

    ids: NDArray[np.int64]
    """[B, N]."""
    values: NDArray[np.float32]
    """[B, N]."""
    ranks: NDArray[np.int64]
    """[B, N]."""
    counts: NDArray[np.int64]
    """[B]."""

    @classmethod
    def empty(cls, B: int, num_logprobs: int) -> BatchLogprobs:
        """No entries yet; room for a token and `num_logprobs` others a row."""
        shape = (B, 1 + num_logprobs)
        return cls(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64), np.zeros(B, int))

    def put(
        self,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        values: NDArray[np.float32],
        ranks: NDArray[np.int64],
        top_ids: NDArray[np.int64] | NDArray[np.int32],
        top_values: NDArray[np.float32],
        num_top: NDArray[np.int64],
    ) -> None:
        """Set the entries of `rows` [M]: the tokens' own [M], then the first num_top [M] of the best ones [M, T]."""
        self.ids[rows, 0], self.values[rows, 0], self.ranks[rows, 0] = token_ids, finite(values), ranks
        self.counts[rows] = 1
        width = int(num_top.max(initial=0))
        if not width:
            return
        top_ids, top_values = top_ids[:, :width], top_values[:, :width]
        others = (np.arange(width) < num_top[:, None]) & (top_ids != token_ids[:, None])
        self.counts[rows] += others.sum(1)
        order = np.argsort(~others, axis=1, kind="stable")
        columns = slice(1, 1 + width)
        self.ids[rows, columns] = np.take_along_axis(top_ids, order, 1)
        self.values[rows, columns] = finite(np.take_along_axis(top_values, order, 1))
        self.ranks[rows, columns] = order + 1

    def row_logprobs(self, i: int) -> TokenLogprobs | None:
        """Entries of row i; None where it asked for none or failed."""
        n = self.counts[i]
        return TokenLogprobs(self.ids[i, :n], self.values[i, :n], self.ranks[i, :n]) if n else None


def finite(values: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 values, where -inf and what lies below float32's range become its lowest number."""
    return np.maximum(values, np.finfo(np.float32).min).astype(np.float32, copy=False)


def prompt_logprobs(logits: Tensor, targets: Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """Raw log-softmax of each target and of the `num_logprobs` most likely ids beside it.

    logits: [T, V], upcast to float32. targets: [T] int64, each in [0, V). Returns T entries.
    """
    T, V = logits.shape
    z = logits.float()
    logprobs = z.double().log_softmax(-1)
    own = z.gather(-1, targets.unsqueeze(1))
    before = torch.arange(V, device=z.device) < targets.unsqueeze(1)
    ranks = 1 + ((z > own) | ((z == own) & before)).sum(-1)
    top_ids = best_ids(z, min(num_logprobs, V))
    top = logprobs.gather(-1, top_ids).float()
    entries = BatchLogprobs.empty(T, num_logprobs)
    entries.put(
        np.arange(T),
        targets.cpu().numpy(),
        logprobs.gather(-1, targets.unsqueeze(1)).float().squeeze(1).cpu().numpy(),
        ranks.cpu().numpy(),
        top_ids.cpu().numpy(),
        top.cpu().numpy(),
        (z.gather(-1, top_ids) > -torch.inf).sum(-1).cpu().numpy(),
    )
    return [entry for t in range(T) if (entry := entries.row_logprobs(t)) is not None]


def best_ids(z: Tensor, k: int) -> Tensor:
    """The first k ids of each row by (logit descending, id ascending). z: [T, V]. Returns [T, k] int64."""
    if not k:
        return torch.zeros((z.shape[0], 0), dtype=torch.int64, device=z.device)
    values, ids = z.topk(min(k + 1, z.shape[1]))
    tied_at_cut = (values[:, k - 1] == values[:, -1]) & (values.shape[1] > k)
    # topk takes any of the ids tied at the cut and in any order; within the cut, order by id first, then by value.
    ids, by_id = ids[:, :k].sort(-1)
    by_value = values[:, :k].gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, by_value)
    if tied := tied_at_cut.nonzero().squeeze(1).tolist():
        ids[tied] = z[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids
