"""The sampler on a CUDA device: candidates first, all in kernels, and one wait for the draws.

A step queues everything it knows it needs: the upload of its parameters, the kernels, the copy of the draws to the
host. Only then does it wait, for that copy. The supports follow as CSR, whose size the draws tell, and nothing waits
for them but `DeviceMask.wait`. Draws and supports are those of `reference` on a CPU, always: where a decision hangs on
the last bits of a sum or a logarithm the row's logits are brought to the host and decided there, and so is a row with
too many equal logits to list the best of. These rare rows wait a second time.

Half-precision logits are not used: the head is asked for float32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.errors import ConfigError
from keepmask.head.sampled_logits import Head
from keepmask.sampling.cuda import capture_triton, decide_triton, select_triton
from keepmask.sampling.cuda.device_entries import DeviceEntries, entries_of_supports, entries_over_all
from keepmask.sampling.cuda.draw_records import DRAW, Candidates, column, words_of
from keepmask.sampling.cuda.ops_triton import interpreted
from keepmask.sampling.definition import draw_by_definition, not_finite_error
from keepmask.sampling.drawn import Drawn, PendingMask, Supports
from keepmask.sampling.processors import changes_logits, process
from keepmask.sampling.records import MAX_CANDIDATES, NOT_FINITE, OK, OUTSIDE, TOO_MANY, UNCERTAIN, Ints, Records
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.row_records import RowRecords
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.transfer import HostCopies, Transfer, to_device

__all__ = ["DeviceDraw", "DeviceMask"]


class DeviceDraw:
    """`draw_reference` by way of candidates, for logits on a CUDA device. One call at a time.

    Under Triton's interpreter it takes logits on a CPU.
    """

    def __init__(self, spec: SamplerSpec) -> None:
        self._spec = spec
        self._records = RowRecords(spec)
        self._copies: dict[torch.device, HostCopies] = {}

    def __call__(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        """Draw for every row."""
        device = head.logits.device
        if device not in self._copies:
            if device.type == "cpu" and not interpreted():
                raise ConfigError(
                    "impl='triton' with logits on cpu: needs Triton's interpreter; use impl='auto', or set "
                    "TRITON_INTERPRET=1 in the environment of the process"
                )
            self._copies[device] = HostCopies(device)
        records = self._records.of(rows)
        changed = [b for b in self._records.changing if changes_logits(rows[b], self._spec)]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _CudaStep(head, rows, self._spec, records, self._copies[device]).run(changed)


class DeviceGroup(NamedTuple):
    """M rows of a batch whose logits lie in one tensor of R >= M rows."""

    items: Ints
    """[M], their rows in the batch."""
    records: Records
    """[M] of `RECORD`; source is the row in `logits`."""
    logits: Tensor
    """[R, V] float32, before temperature."""
    legal: Tensor | None
    """[R] bool, rows that held neither NaN nor +inf before they were changed; None where nothing was changed."""


class Queued(NamedTuple):
    """The draws of a group, on their way."""

    group: DeviceGroup
    words: Tensor
    """The records, on the device."""
    found: Candidates
    entries: list[DeviceEntries]


class DeviceMask:
    """Supports on their way to the host. parts: the rows of each two arrays, ids and log-probs, and their counts."""

    def __init__(
        self, drawn: Drawn, rows: Sequence[SamplingRow], parts: list[tuple[Ints, Ints]], transfer: Transfer
    ) -> None:
        self._drawn, self._rows, self._parts, self._transfer = drawn, rows, parts, transfer
        self._supports: Supports | None = None

    def wait(self) -> Supports:
        """The supports, once their copy is complete. Waiting again costs nothing."""
        if self._supports is None:
            arrays = iter(self._transfer.wait())
            for items, counts in self._parts:
                self._drawn.put_supports(items, counts, *_ids_and_logprobs(next(arrays), next(arrays)))
            self._supports = self._drawn.supports(self._rows)
        return self._supports


@dataclass(slots=True)
class DeviceDrawn(Drawn):
    """`Drawn`, with the supports of some rows still on the device, where their tokens were found in them."""

    copies: HostCopies | None = None
    queued: list[tuple[Queued, NDArray[Any], NDArray[np.bool_]]] = field(default_factory=list)
    """Draws, their records on the host, and which of the rows have their supports on the device."""

    def pending_mask(self, rows: Sequence[SamplingRow]) -> PendingMask:
        """The supports of the rows that return them, which `capture` writes side by side."""
        parts: list[tuple[Ints, Ints]] = []
        tensors: list[Tensor] = []
        for q, draws, on_device in self.queued:
            items = q.group.items
            failed = np.isin(items, list(self.errors))
            counts = np.where(on_device & ~failed & (q.group.records["returns_mask"] != 0), draws["count"], 0)
            if (returned := counts > 0).any():
                tensors += self._capture(q, counts, set(draws["over_all"][returned].tolist()))
                parts.append((items[returned], counts[returned]))
        self.queued = []  # their memory may be used again behind the kernels that read it
        if not parts:
            return self.supports(rows)
        assert self.copies is not None
        return DeviceMask(self, rows, parts, self.copies.start(tensors))

    def _capture(self, q: Queued, counts: Ints, over_all: set[int]) -> tuple[Tensor, Tensor]:
        """ids [N] int32 and log-probs [N] float32, or [0] where no row returns them."""
        logits, N = q.group.logits, int(counts.sum())
        offsets = to_device(np.concatenate([[0], np.cumsum(counts)]), logits.device)
        with_logprobs = bool(((q.group.records["returns_mask_logprobs"] != 0) & (counts > 0)).any())
        ids = torch.empty(N, dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(N if with_logprobs else 0, dtype=torch.float32, device=logits.device)
        for way in over_all:
            capture_triton.capture(logits, q.found, q.words, offsets, (ids, logprobs), over_all=bool(way))
        return ids, logprobs


class _CudaStep:
    """One call of the sampler."""

    def __init__(
        self, head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec, records: Records, copies: HostCopies
    ) -> None:
        self.head, self.rows, self.spec, self.records, self.copies = head, rows, spec, records, copies
        self.device = head.logits.device
        self.processed = spec.logprobs_mode.startswith("processed")
        self.raw = self.exact_logits()
        self.drawn = DeviceDrawn.empty(rows)
        self.drawn.copies = copies

    def run(self, changed: list[int]) -> Drawn:
        """Queue the whole step, wait for the draws, and decide what the device could not.

        changed: rows that some step before the filters changes.
        """
        queued = [self.queue(group) for group in self.groups(changed)]
        tensors = [t for q in queued for t in (q.found.draws, *(t for entries in q.entries for t in entries.tensors))]
        arrays = iter(self.copies.start(tensors).wait())
        for q in queued:
            draws = next(arrays).view(DRAW)[:, 0]
            self.put(q, draws, [[next(arrays) for _ in entries.tensors] for entries in q.entries])
        return self.drawn

    # ------------------------------------------------------------ steps 1 to 6

    def exact_logits(self) -> Tensor:
        """[B, V] float32 with adjacent columns, before any step; not to be overwritten."""
        logits = self.head.logits
        if logits.dtype != torch.float32:
            logits = self.head.float32(self.index(np.arange(len(self.rows))))
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def groups(self, changed_rows: list[int]) -> list[DeviceGroup]:
        """The batch by the tensor its processed logits are in."""
        changed = np.asarray(changed_rows, np.int64)
        untouched = np.setdiff1d(np.arange(len(self.rows)), changed)
        groups = [self.group_of(untouched, self.raw, untouched, None)]
        if changed.size:
            logits = self.raw.index_select(0, self.index(changed))
            legal = (logits < torch.inf).all(-1)
            errors = process(logits, [self.rows[b] for b in changed], self.spec)
            self.drawn.errors |= {int(changed[m]): error for m, error in errors.items()}
            left = np.setdiff1d(np.arange(changed.size), list(errors))
            groups.append(self.group_of(changed[left], logits, left, legal))
        return [group for group in groups if group.items.size]

    def group_of(self, items: Ints, logits: Tensor, source: Ints, legal: Tensor | None) -> DeviceGroup:
        """Rows `items` of the batch, in rows `source` of logits."""
        records = self.records[items]
        records["source"] = source
        # Without filters the support is all there is, and so is the normaliser of its log-probs.
        entries = (records["num_logprobs"] >= 0) & self.processed
        records["weighs"] |= (records["whole"] != 0) & (entries | (records["returns_mask_logprobs"] != 0))
        return DeviceGroup(items, records, logits, legal)

    def index(self, rows: Ints) -> Tensor:
        """[M] int64, on the device."""
        return to_device(rows, self.device)

    # ------------------------------------------------------------ what the device does

    def queue(self, group: DeviceGroup) -> Queued:
        """Draw for the rows of a group."""
        words = to_device(words_of(group.records), self.device)
        found = select_triton.select(group.logits, words, capacity=MAX_CANDIDATES)
        if group.legal is not None:
            found.field("status").masked_fill_(~group.legal[column(words, "source")], NOT_FINITE)
        decide_triton.decide(found, words, self.spec.vocab_size)
        decide_triton.decide_all(group.logits, found, words)
        return Queued(group, words, found, self.queue_entries(group, words, found))

    def queue_entries(self, group: DeviceGroup, words: Tensor, found: Candidates) -> list[DeviceEntries]:
        """Entries of the rows that ask for any: of the support, or of the vocabulary where that is what they are of."""
        records, items = group.records, group.items
        asks = records["num_logprobs"] >= 0
        of_support = np.flatnonzero(asks & (records["whole"] == 0)) if self.processed else np.zeros(0, np.int64)
        over_all = np.setdiff1d(np.flatnonzero(asks), of_support)
        entries = []
        if of_support.size:
            m = of_support
            entries.append(entries_of_supports(items[m], m, group.logits, records, words, found))
        if over_all.size:
            m, chosen, logits = over_all, records[over_all], group.logits
            if not self.processed:
                logits, chosen["source"], chosen["temperature"] = self.raw, items[m], 1
            token_ids = found.field("token_id").index_select(0, self.index(m))
            entries.append(entries_over_all(items[m], logits, chosen, token_ids, capacity=MAX_CANDIDATES))
        return entries

    # ------------------------------------------------------------ what the host learns

    def put(self, q: Queued, draws: Records, of_entries: list[list[NDArray[Any]]]) -> None:
        """Record a group's draws, and decide on the host what the device could not."""
        status, items, drawn = draws["status"], q.group.items, self.drawn
        for b in items[status == NOT_FINITE].tolist():
            drawn.errors[b] = not_finite_error(self.rows[b])
        known = status == OK
        drawn.token_ids[items[known]], drawn.counts[items[known]] = draws["token_id"][known], draws["count"][known]
        for m in np.flatnonzero(status == OUTSIDE):  # a support without it, which fails the row
            drawn.token_ids[items[m]] = draws["token_id"][m]
            drawn.put_supports(
                items[m : m + 1], np.ones(1, np.int64), np.full(1, -1, np.int32), np.zeros(1, np.float32)
            )
        unknown = [items[(status == UNCERTAIN) | (status == TOO_MANY)]]
        for entries, arrays in zip(q.entries, of_entries, strict=True):
            entries.put(drawn.entries, drawn.token_ids, arrays, self.spec.logprobs_mode)
            unknown.append(entries.unknown(arrays, drawn.token_ids))
        on_host = np.isin(items, np.concatenate(unknown))
        if on_host.any():
            self.decide_on_host(q.group, np.flatnonzero(on_host))
        drawn.queued.append((q, draws, known & ~on_host))

    def decide_on_host(self, group: DeviceGroup, m: Ints) -> None:
        """Draw for rows m of the group as `reference` does. This waits for their logits."""
        items = group.items[m]
        tensors = [group.logits.index_select(0, self.index(group.records["source"][m]))]
        if not self.processed:
            tensors.append(self.raw.index_select(0, self.index(items)))
        z, *raw = (torch.from_numpy(array) for array in self.copies.start(tensors).wait())
        for i, b in enumerate(items.tolist()):
            draw_by_definition(self.drawn, b, z[i], raw[0][i] if raw else None, self.rows[b], self.spec)


def _ids_and_logprobs(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
    return ids, logprobs if logprobs.size else np.zeros(ids.size, np.float32)
