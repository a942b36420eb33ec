"""`DeviceMask`: the supports of one step on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keepmask.sampling.drawn import Supports

__all__ = ["MAX_COMPACT_IDS", "DeviceMask", "Event", "HostRows", "pack_ids", "unpack_ids"]

MAX_COMPACT_IDS = 2048
"""Rows wider than this are held as V bits instead of as ids."""


class Event(Protocol):
    """What says that a copy is complete, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Return once it is."""
        ...


@dataclass(frozen=True, slots=True)
class HostRows:
    """Supports of R rows of a batch, in host memory. Rows of more than `MAX_COMPACT_IDS` ids are in `wide`."""

    rows: Sequence[int]
    """[R], their rows in the batch."""
    ids: NDArray[np.int32]
    """[R, K], ascending; the first counts[r] count."""
    counts: NDArray[np.int64]
    """[R] ids in the support; 0 marks the whole vocabulary."""
    logprobs: NDArray[np.float32]
    """[R, K], of `ids`."""
    with_logprobs: Sequence[bool]
    """[R], whether the row was asked for with log-probabilities."""
    vocab_size: int
    wide: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    """By row of the batch, `pack_ids` of the support."""
    wide_logprobs: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    """By row of the batch, of the ids in ascending order."""

    def copied(self) -> HostRows:
        """The same rows in memory of their own."""
        return HostRows(
            self.rows,
            self.ids.copy(),
            self.counts.copy(),
            self.logprobs.copy(),
            self.with_logprobs,
            self.vocab_size,
            {b: bits.copy() for b, bits in self.wide.items()},
            {b: logprobs.copy() for b, logprobs in self.wide_logprobs.items()},
        )


class DeviceMask:
    """Supports of the rows of a batch that return them; `row` reads them once `wait` has returned.

    parts: where the host copies of the rows are, or will be. ready: says when all are complete; None where they are
    already. release: called once the rows were copied out of `parts`, so that their memory, and the device memory they
    were copied from, may be used again; None where `parts` are theirs to keep.
    """

    __slots__ = ("_others", "_parts", "_ready", "_release", "_slots")

    def __init__(
        self,
        *parts: HostRows,
        others: Supports,
        ready: Event | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._others = others
        self._parts = parts
        self._ready = ready
        self._release = release
        self._slots = {b: (i, slot) for i, part in enumerate(parts) for slot, b in enumerate(part.rows)}

    def wait(self) -> DeviceMask:
        """Return once the host copy is complete. Waiting again costs nothing."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        if self._release is not None:
            self._parts = tuple(part.copied() for part in self._parts)
            self._release()
            self._release = None
        return self

    def row(self, b: int) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
        """ids: [K] int32, ascending; empty for the whole vocabulary. logprobs: [K] float32, or None if not asked for.

        Raises KeyError where row b of the batch returns no mask or failed.
        """
        assert self._ready is None, "wait first"
        if b not in self._slots:
            return self._others.row(b)
        part, slot = self._slots[b]
        rows = self._parts[part]
        if b in rows.wide:
            return unpack_ids(rows.wide[b], rows.vocab_size), rows.wide_logprobs.get(b)
        count = rows.counts[slot]
        return rows.ids[slot, :count], rows.logprobs[slot, :count] if rows.with_logprobs[slot] else None


def pack_ids(ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
    """[ceil(V / 8)] uint8: bit i % 8 of byte i // 8 says whether id i is there."""
    keep = np.zeros(vocab_size, np.bool_)
    keep[ids] = True
    return np.packbits(keep, bitorder="little")


def unpack_ids(bits: NDArray[np.uint8], vocab_size: int) -> NDArray[np.int32]:
    """The ids `pack_ids` was given, ascending."""
    return np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little")).astype(np.int32)
