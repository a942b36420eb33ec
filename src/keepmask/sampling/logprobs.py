"""Log-probabilities of generated and prompt tokens, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BatchLogprobs", "TokenLogprobs", "finite", "prompt_logprobs", "token_logprobs"]


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
    """`TokenLogprobs` of the rows of a batch that asked for them, by row index."""

    rows: Mapping[int, TokenLogprobs]

    def row_logprobs(self, i: int) -> TokenLogprobs | None:
        """Entries of row i; None where it asked for none or failed."""
        return self.rows.get(i)


def token_logprobs(
    token_id: int, value: float, rank: int, top_ids: NDArray[np.int64], top_values: NDArray[np.float32]
) -> TokenLogprobs:
    """Put the token's own entry before the top ones, which are sorted, and leave it out of those."""
    others = top_ids != token_id
    return TokenLogprobs(
        np.concatenate([[token_id], top_ids[others]]),
        finite(np.concatenate([np.asarray([value], np.float32), top_values[others]])),
        np.concatenate([[rank], 1 + np.flatnonzero(others)]),
    )


def finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """-inf, the rounding of a value below float32's range or of an impossible id, becomes float32's lowest number."""
    return np.maximum(values, np.finfo(np.float32).min)


def prompt_logprobs(logits: Tensor, targets: Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """Raw log-softmax of each target and of the `num_logprobs` most likely ids beside it.

    logits: [T, V], upcast to float32. targets: [T] int64, each in [0, V). Returns T entries.
    """
    z = logits.float()
    lse = torch.logsumexp(z.double(), -1)
    value = z.gather(-1, targets.unsqueeze(1))
    ids = torch.arange(z.shape[-1], device=z.device)
    rank = 1 + ((z > value) | ((z == value) & (ids < targets.unsqueeze(1)))).sum(-1)
    order = torch.sort(z, dim=-1, descending=True, stable=True).indices[:, :num_logprobs]
    own = (value.squeeze(1).double() - lse).float().cpu().numpy()
    top = (z.gather(-1, order).double() - lse.unsqueeze(1)).float().cpu().numpy()
    columns = zip(targets.cpu().numpy(), own, rank.cpu().numpy(), order.cpu().numpy(), top, strict=True)
    return [token_logprobs(*column) for column in columns]
