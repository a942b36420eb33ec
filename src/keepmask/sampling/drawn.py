"""`Drawn`: what an implementation of the sampler hands back for a batch, before checks and capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import RequestError
from keepmask.sampling.pending_mask import MAX_COMPACT_IDS, HostRows, PendingMask, pack_ids
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.token_logprobs import BatchLogprobs, finite

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
    def empty(cls, rows: Sequence[SamplingRow]) -> Self:
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

    def inside(self) -> NDArray[np.bool_]:
        """[B], whether a token was drawn, and is in its support."""
        inside: NDArray[np.bool_] = (self.ids == self.token_ids[:, None]).any(1) | (self.counts == 0)
        inside &= self.token_ids >= 0
        for b, wide in self.wide.items():
            at = np.searchsorted(wide.ids, self.token_ids[b])
            inside[b] = at < wide.ids.size and wide.ids[at] == self.token_ids[b]
        return inside

    def host_rows(self, captured: list[int], rows: Sequence[SamplingRow], vocab_size: int) -> HostRows:
        """The supports of the `captured` rows of the batch."""
        all_captured = len(captured) == len(rows)
        wide = {b: self.wide[b] for b in captured if b in self.wide}
        return HostRows(
            captured,
            self.ids if all_captured else self.ids[captured],
            self.counts if all_captured else self.counts[captured],
            self.logprobs if all_captured else self.logprobs[captured],
            [rows[b].returns_mask_logprobs for b in captured],
            vocab_size,
            {b: pack_ids(support.ids, vocab_size) for b, support in wide.items()},
            {b: support.logprobs for b, support in wide.items() if rows[b].returns_mask_logprobs},
        )

    def pending_mask(self, captured: list[int], rows: Sequence[SamplingRow], vocab_size: int) -> PendingMask:
        """The supports of the `captured` rows of the batch, on their way to where they can be read."""
        return PendingMask(self.host_rows(captured, rows, vocab_size))

    def _widen(self, K: int) -> None:
        B, width = self.ids.shape
        if width < K:
            self.ids = np.concatenate([self.ids, np.full((B, K - width), -1, np.int32)], 1)
            self.logprobs = np.concatenate([self.logprobs, np.zeros((B, K - width), np.float32)], 1)
