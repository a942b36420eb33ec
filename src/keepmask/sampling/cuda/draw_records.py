"""What the kernels write: a record of the draw of each row, and its candidates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.sampling.records import BAND, RECORD, Records

__all__ = ["DRAW", "REACHED", "Best", "Candidates", "column", "words_of"]

DRAW = np.dtype(
    [
        ("status", np.int64),  # the fields up to num_possible are those of selection
        ("num_candidates", np.int64),  # 0 where the status is not OK
        ("highest", np.float64),  # the highest s = float32(z / temperature) of the row
        ("total", np.float64),  # the weight exp(s - highest) of all ids, 0 where the row does not weigh
        ("weight", np.float64),  # the weight of the candidates
        ("num_possible", np.int64),  # how many of all logits are above -inf
        ("token_id", np.int64),  # -1 for none
        ("count", np.int64),  # ids in the support; 0 for the whole vocabulary
        ("over_all", np.int64),  # 1 where the support has yet to be read off all V logits
        ("bound", np.float64),  # numbers s above it are in the support, NaN and +inf never; -inf keeps all above that
        ("first", np.int64),  # ids at the bound stay if they are in [first, last]
        ("last", np.int64),
        ("log_weight", np.float64),  # of the support: a log-prob is s - highest - log_weight
        ("token_s", np.float64),
        ("token_logprob", np.float64),  # over the support
        ("rank", np.int64),  # of the token within its support, from 1, by (s descending, id ascending)
    ]
)
"""The draw of one row, in words of 8 bytes. Where the status is not OK what follows selection means nothing."""

REACHED = 1 + BAND
"""Candidates weigh this much more than a mass cut asks for, so that it lies among them however sums round."""


def words_of(records: Records) -> NDArray[np.int64]:
    """[M, fields] int64: records of words, as a matrix."""
    return records.view(np.int64).reshape(records.size, records.itemsize // 8)


def column(words: Tensor, name: str, dtype: np.dtype[np.void] = RECORD) -> Tensor:
    """[M], a field of [M, fields] words, in its type: a view."""
    assert dtype.names is not None
    typed = words.view(torch.float64) if dtype[name] == np.float64 else words
    return typed[:, dtype.names.index(name)]


class Candidates(NamedTuple):
    """Candidates of M rows, by ascending id. Of [M, C] arrays the first num_candidates of row m count."""

    z: Tensor
    """[M, C] float32, logits before temperature, all above -inf."""
    ids: Tensor
    """[M, C] int32."""
    draws: Tensor
    """[M, fields] int64, records of `DRAW`."""

    @classmethod
    def empty(cls, M: int, capacity: int, device: torch.device) -> Candidates:
        """Room for them."""
        return cls(
            torch.empty((M, capacity), dtype=torch.float32, device=device),
            torch.empty((M, capacity), dtype=torch.int32, device=device),
            torch.zeros((M, DRAW.itemsize // 8), dtype=torch.int64, device=device),
        )

    def field(self, name: str) -> Tensor:
        """[M], a field of the draws."""
        return column(self.draws, name, DRAW)


class Best(NamedTuple):
    """The best of the supports of M rows, by (s descending, id ascending), num[m] of them in row m."""

    num: Tensor
    """[M] int32."""
    ids: Tensor
    """[M, T] int32."""
    s: Tensor
    """[M, T] float32."""
    logprobs: Tensor
    """[M, T] float32."""

    @classmethod
    def none(cls, M: int, T: int, device: torch.device) -> Best:
        """None found yet."""
        types = (torch.int32, torch.float32, torch.float32)
        arrays = (torch.zeros((M, T), dtype=dtype, device=device) for dtype in types)
        return cls(torch.zeros(M, dtype=torch.int32, device=device), *arrays)
