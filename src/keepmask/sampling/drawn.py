"""`Drawn`: what an implementation of the sampler hands back for a batch, before checks and capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import RequestError
from keepmask.sampling.capture import MAX_COMPACT_IDS
from keepmask.sampling.logprobs import BatchLogprobs, finite
from keepmask.sampling.row import SamplingRow

__all__ = ["Drawn", "WideSupport"]


@dataclass(frozen=True, slots=True)
class WideSupport:
    """A support too wide for the compact arrays. ids: [K] int32, ascending. logprobs: [K] float32."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(slots=True)
class Drawn:
    """One draw for each of B rows. Rows with an error hold nothing meaningful elsewhere."""

    token_ids: NDArray[np.int64]
    """[B]; -1 where there is nothing to draw from."""
    counts: NDArray[np.int64]
    """[B] ids in the support; 0 for the whole vocabulary."""
    ids: NDArray[np.int32]
    """[B, K], ascending, padded with -1; nothing but padding in whole and wide rows."""
    logprobs: NDArray[np.float32]
    """[B, K], finite, of `ids` over the support."""
    entries: BatchLogprobs
    """Of rows that asked for logprobs."""
    wide: dict[int, WideSupport] = field(default_factory=dict)
    """By row."""
    errors: dict[int, RequestError] = field(default_factory=dict)
    """By row."""

    @classmethod
    def empty(cls, rows: Sequence[SamplingRow]) -> Drawn:
        """Nothing drawn yet."""
        B = len(rows)
        num_logprobs = max(row.params.logprobs or 0 for row in rows)
        return cls(
            np.full(B, -1, np.int64),
            np.zeros(B, np.int64),
            np.full((B, 1), -1, np.int32),
            np.zeros((B, 1), np.float32),
            BatchLogprobs.empty(B, num_logprobs),
        )

    def put_supports(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Set the compact supports of `rows` [M], whose first counts[m] entries of ids and logprobs [M, K] count."""
        K = ids.shape[1]
        padded = np.where(np.arange(K) < counts[:, None], ids, np.int32(-1))
        self.counts[rows] = counts
        if rows.size == self.counts.size and self.ids.shape[1] <= K:
            self.ids, self.logprobs = np.empty_like(padded), np.empty_like(logprobs)
            self.ids[rows], self.logprobs[rows] = padded, finite(logprobs)
            return
        self._widen(K)
        self.ids[rows, :K], self.ids[rows, K:] = padded, -1
        self.logprobs[rows, :K] = finite(logprobs)

    def put_support(self, b: int, ids: NDArray[np.int32], logprobs: NDArray[np.float32], vocab_size: int) -> None:
        """Set the support of one row, of any width. ids: [K], ascending."""
        self.ids[b] = -1
        self.counts[b] = 0 if ids.size == vocab_size else ids.size
        if self.counts[b] > MAX_COMPACT_IDS:
            self.wide[b] = WideSupport(ids, finite(logprobs))
        elif self.counts[b]:
            self._widen(ids.size)
            self.ids[b, : ids.size], self.logprobs[b, : ids.size] = ids, finite(logprobs)

    def _widen(self, K: int) -> None:
        B, width = self.ids.shape
        if width < K:
            self.ids = np.concatenate([self.ids, np.full((B, K - width), -1, np.int32)], 1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros((B, K - width), np.float32)], 1)
