"""`Drawn`: what an implementation of the sampler hands back for a batch; `Supports`: the rows that return theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import RequestError
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.token_logprobs import BatchLogprobs, finite

__all__ = ["Drawn", "PendingMask", "Supports"]


@dataclass(frozen=True, slots=True)
class Supports:
    """The supports of a batch of B rows, on the host: row b is ids[offsets[b] : offsets[b + 1]].

    Ids ascend within a row. An empty row stands for the whole vocabulary.
    """

    ids: NDArray[np.int32]
    """[N]."""
    offsets: NDArray[np.int64]
    """[B+1]."""
    logprobs: NDArray[np.float32]
    """[N], finite, of `ids` over the support, in rows that were asked for with log-probabilities."""
    captured: NDArray[np.bool_]
    """[B], rows that return their support; the others are empty."""
    with_logprobs: NDArray[np.bool_]
    """[B]."""

    def wait(self) -> Supports:
        """These supports, which are here."""
        return self

    def row(self, b: int) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """ids: [K] int32; empty for the whole vocabulary. logprobs: [K] float32, or None if not asked for.

        Raises KeyError where row b of the batch returns no mask or failed.
        """
        if not self.captured[b]:
            raise KeyError(b)
        start, end = self.offsets[b], self.offsets[b + 1]
        return self.ids[start:end], self.logprobs[start:end] if self.with_logprobs[b] else None


class PendingMask(Protocol):
    """The supports of a step, which may still be on their way to the host."""

    def wait(self) -> Supports:
        """Return them once they are here. Waiting again costs nothing."""
        ...


class _Piece(NamedTuple):
    """Supports of M rows of a batch, one after the other."""

    rows: NDArray[np.int64]
    """[M], ascending."""
    counts: NDArray[np.int64]
    """[M], none of them 0."""
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(slots=True)
class Drawn:
    """One draw for each of B rows. Rows with an error hold nothing meaningful elsewhere."""

    token_ids: NDArray[np.int64]
    """[B]; -1 where there is nothing to draw from."""
    counts: NDArray[np.int64]
    """[B] ids in the support; 0 for the whole vocabulary."""
    entries: BatchLogprobs
    """Of rows that asked for logprobs."""
    errors: dict[int, RequestError] = field(default_factory=dict)
    """By row."""
    pieces: list[_Piece] = field(default_factory=list)
    """Supports that are not whole: of every row that returns its own, and maybe of others."""

    @classmethod
    def empty(cls, rows: Sequence[SamplingRow]) -> Self:
        """Nothing drawn yet."""
        B = len(rows)
        num_logprobs = max(row.params.logprobs or 0 for row in rows)
        return cls(np.full(B, -1, np.int64), np.zeros(B, np.int64), BatchLogprobs.empty(B, num_logprobs))

    def put_supports(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Set the supports of `rows` [M], which ascend, of counts [M] ids each, with their log-probs: [N] in a row."""
        self.pieces.append(_Piece(rows, counts, ids, logprobs))

    def put_support(self, b: int, ids: NDArray[Any], logprobs: NDArray[Any], vocab_size: int) -> None:
        """Set the support of one row. ids: [K], ascending."""
        self.counts[b] = 0 if ids.size == vocab_size else ids.size
        if self.counts[b]:
            row, count = np.asarray([b]), np.asarray([ids.size])
            self.put_supports(row, count, ids.astype(np.int32, copy=False), finite(logprobs))

    def outside(self) -> NDArray[np.int64]:
        """Rows whose support was put without their token."""
        outside = []
        for piece in self.pieces:
            here = piece.ids == np.repeat(self.token_ids[piece.rows], piece.counts)
            outside.append(piece.rows[np.add.reduceat(here, np.cumsum(piece.counts) - piece.counts) == 0])
        return _joined(outside, np.int64)

    def pending_mask(self, rows: Sequence[SamplingRow]) -> PendingMask:
        """`supports`, or what will be."""
        return self.supports(rows)

    def supports(self, rows: Sequence[SamplingRow]) -> Supports:
        """The supports of the rows of the batch that return them and have no error."""
        captured = np.fromiter((row.returns_mask for row in rows), np.bool_, len(rows))
        if self.errors:
            captured[list(self.errors)] = False
        with_logprobs = np.fromiter((row.returns_mask_logprobs for row in rows), np.bool_, len(rows))
        offsets = np.zeros(len(rows) + 1, np.int64)
        for piece in self.pieces:
            offsets[1 + piece.rows] = piece.counts * captured[piece.rows]
        counts = offsets[1:].copy()
        np.cumsum(counts, out=offsets[1:])
        ids = _joined([piece.ids for piece in self.pieces], np.int32)
        logprobs = _joined([piece.logprobs for piece in self.pieces], np.float32)
        if len(self.pieces) > 1 or offsets[-1] != ids.size:
            starts, end = np.zeros(len(rows), np.int64), 0
            for piece in self.pieces:
                starts[piece.rows] = end + np.cumsum(piece.counts) - piece.counts
                end += piece.ids.size
            order = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
            ids, logprobs = ids[order], logprobs[order]
        return Supports(ids, offsets, logprobs, captured, with_logprobs)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.int32] | type[np.int64] | type[np.float32]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, dtype), *arrays])
