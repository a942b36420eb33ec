"""`PendingMask`: the supports of one step on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_COMPACT_IDS", "PendingMask", "pack_ids", "unpack_ids"]

MAX_COMPACT_IDS = 2048
"""Rows wider than this are held as V bits instead of as ids."""


class PendingMask:
    """Supports of the rows of a batch that return them.

    Rows of at most `MAX_COMPACT_IDS` ids are compact: [R, K] ids, ascending, and [R] counts. Wider rows are held as
    V bits each and expanded when read. A count of 0 marks the whole vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_logprobs", "_slots", "_vocab_size", "_wide", "_wide_logprobs")

    def __init__(
        self,
        rows: Sequence[int],
        ids: NDArray[np.int32],
        counts: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        wide: dict[int, NDArray[np.uint8]],
        wide_logprobs: dict[int, NDArray[np.float32]],
        *,
        has_logprobs: Sequence[bool],
        vocab_size: int,
    ) -> None:
        self._slots = {
            row: (slot, with_logprobs) for slot, (row, with_logprobs) in enumerate(zip(rows, has_logprobs, strict=True))
        }
        self._ids = ids
        self._counts = counts
        self._logprobs = logprobs
        self._wide = wide
        self._wide_logprobs = wide_logprobs
        self._vocab_size = vocab_size

    def wait(self) -> PendingMask:
        """Return once the host arrays are complete."""
        return self

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """ids: [K] int32, ascending; empty for the whole vocabulary. logprobs: [K] float32, or None if not asked for.

        Raises KeyError where batch row i returns no mask or failed.
        """
        slot, with_logprobs = self._slots[i]
        if i in self._wide:
            return unpack_ids(self._wide[i], self._vocab_size), self._wide_logprobs.get(i)
        count = self._counts[slot]
        return self._ids[slot, :count], self._logprobs[slot, :count] if with_logprobs else None


def pack_ids(ids: NDArray[np.integer], vocab_size: int) -> NDArray[np.uint8]:
    """[ceil(V / 8)] uint8: bit i % 8 of byte i // 8 says whether id i is there."""
    keep = np.zeros(vocab_size, np.bool_)
    keep[ids] = True
    return np.packbits(keep, bitorder="little")


def unpack_ids(bits: NDArray[np.uint8], vocab_size: int) -> NDArray[np.int32]:
    """The ids `pack_ids` was given, ascending."""
    return np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little")).astype(np.int32)
