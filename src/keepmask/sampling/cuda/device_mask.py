"""`DeviceDrawn`: draws whose supports are still on the device, and how they get to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from keepmask.sampling.cuda.compaction import Cut, Supports, wide_logprobs
from keepmask.sampling.cuda.draw_table import DrawTable
from keepmask.sampling.drawn import Drawn, PendingMask
from keepmask.sampling.pending_mask import MAX_COMPACT_IDS, DeviceMask, HostRows
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.transfer import HostCopies, to_device

__all__ = ["DeviceDrawn", "DeviceSupports"]

Ints = NDArray[np.int64]


class DeviceSupports(NamedTuple):
    """Where the supports of M rows of a batch are on the device."""

    items: Ints
    """[M], the rows in the batch."""
    slots: Ints
    """[M], the rows of `supports.ids` and `supports.bits`; -1 for none."""
    logprobs_slots: Ints
    """[M], the rows of `supports.logprobs`; -1 for none."""
    supports: Supports
    logits: Tensor
    """[R, V]."""
    source: Ints
    """[M], the rows in `logits`."""
    table: DrawTable
    cut: Cut


@dataclass(slots=True)
class DeviceDrawn(Drawn):
    """`Drawn`, with the supports of some rows on the device, where their tokens were found in them."""

    copies: HostCopies | None = None
    on_device: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[B]."""
    parts: list[DeviceSupports] = field(default_factory=list)
    vocab_size: int = 0

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], copies: HostCopies, vocab_size: int) -> DeviceDrawn:
        """Nothing drawn yet."""
        drawn = cls.empty(rows)
        drawn.copies, drawn.on_device, drawn.vocab_size = copies, np.zeros(len(rows), np.bool_), vocab_size
        return drawn

    def pending_mask(self, rows: Sequence[SamplingRow]) -> PendingMask:
        """The supports of the rows that return them, as ids or, above the cap, as bits; no other rows, and of ids no
        more columns than the widest of them has."""
        others = self.supports(rows)
        loads = [load for part in self.parts for load in self._loads(part, others.captured, self.vocab_size)]
        if not loads:
            return others
        assert self.copies is not None
        transfer = self.copies.start([tensor for load in loads for tensor in load.tensors])
        parts, arrays = [], transfer.arrays
        for load in loads:
            own, arrays = arrays[: len(load.tensors)], arrays[len(load.tensors) :]
            parts.append(load.host_rows(own))
        return DeviceMask(*parts, others=others, ready=transfer.ready, release=transfer.release)  # type: ignore[return-value]

    def _loads(self, part: DeviceSupports, wanted: NDArray[np.bool_], vocab_size: int) -> list[_Load]:
        here = wanted[part.items] & self.on_device[part.items]
        with_logprobs = part.logprobs_slots >= 0
        chosen = [np.flatnonzero(here & ~with_logprobs), np.flatnonzero(here & with_logprobs)]
        return [_Load.of(part, m, self.counts[part.items[m]], vocab_size) for m in chosen if m.size]


class _Load(NamedTuple):
    """Rows of one part, all with or all without log-probs: what is copied of them, and what it becomes on the host."""

    items: Ints
    """[R]."""
    counts: Ints
    """[R]."""
    wide: Ints
    """Which of the R rows are wider than the cap."""
    with_logprobs: bool
    vocab_size: int
    tensors: list[Tensor]
    """ids [R, K], logprobs [R, K] or [R, 0], bits of the wide rows, log-probs of each wide row."""

    @classmethod
    def of(cls, part: DeviceSupports, m: Ints, counts: Ints, vocab_size: int) -> _Load:
        """Rows m of the part."""
        compact = counts[counts <= MAX_COMPACT_IDS]
        K, wide = int(compact.max(initial=0)), np.flatnonzero(counts > MAX_COMPACT_IDS)
        slots, logprobs_slots = part.slots[m], part.logprobs_slots[m]
        with_logprobs = bool(logprobs_slots[0] >= 0)
        supports = part.supports
        tensors = [_rows(supports.ids, slots, K), _rows(supports.bits, slots[wide], supports.bits.shape[1])]
        if with_logprobs:
            tensors.append(_rows(supports.logprobs, logprobs_slots, K))
            for w in wide.tolist():
                row = part.logits[int(part.source[m[w]])]
                tensors.append(wide_logprobs(row, part.table, part.cut, int(m[w]), int(counts[w])))
        return cls(part.items[m], counts, wide, with_logprobs, vocab_size, tensors)

    def host_rows(self, arrays: list[NDArray[Any]]) -> HostRows:
        """Over the arrays that the tensors become."""
        ids, bits, *logprobs = arrays
        wide = self.items[self.wide].tolist()
        return HostRows(
            self.items.tolist(),
            ids,
            self.counts,
            logprobs[0] if self.with_logprobs else np.zeros((ids.shape[0], 0), np.float32),
            [self.with_logprobs] * len(self.items),
            self.vocab_size,
            {b: words.view(np.uint8) for b, words in zip(wide, bits, strict=True)},
            dict(zip(wide, logprobs[1:], strict=True)) if self.with_logprobs else {},
        )


def _rows(array: Tensor, rows: Ints, width: int) -> Tensor:
    """array[rows, :width]."""
    if np.array_equal(rows, np.arange(array.shape[0])):
        return array[:, :width]
    return array[:, :width].index_select(0, to_device(rows, array.device))
