"""The sampler on a CUDA device: candidates first, all in kernels, and one wait for the draws.

A step queues everything it knows it needs: the upload of its parameters, the kernels, the copy of the draws to the
host. Only then does it wait, for that copy. Draws and supports are those of `reference` on a CPU, always: where a
decision hangs on the last bits of a sum or a logarithm the row's logits are brought to the host and decided there, and
so is a row with too many equal logits to list the best of. These rare rows wait a second time.

Half-precision logits are not used: the head is asked for float32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.errors import ConfigError
from keepmask.head.sampled_logits import Head
from keepmask.sampling.cuda import candidates, compaction, draw_table
from keepmask.sampling.cuda.compaction import Cut, Supports
from keepmask.sampling.cuda.device_entries import DeviceEntries, entries_of_supports, entries_over_all
from keepmask.sampling.cuda.device_mask import DeviceDrawn, DeviceSupports
from keepmask.sampling.cuda.draw_columns import draw_columns
from keepmask.sampling.cuda.draw_table import Candidates, Draws, DrawTable, Impl
from keepmask.sampling.definition import draw_by_definition, not_finite_error
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.pending_mask import MAX_COMPACT_IDS
from keepmask.sampling.processors import changes_logits, process
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.row_records import MAX_CANDIDATES, Ints, Records, RowRecords
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.transfer import HostCopies, to_device

__all__ = ["DeviceDraw"]


class DeviceDraw:
    """`draw_reference` by way of candidates, for logits on a CUDA device. One call at a time.

    impl: of the kernels; "torch" and, under Triton's interpreter, "triton" also take logits on a CPU.
    """

    def __init__(self, spec: SamplerSpec, *, impl: Impl = "triton") -> None:
        self._spec = spec
        self._impl: Impl = impl
        self._records = RowRecords(spec)
        self._copies: dict[torch.device, HostCopies] = {}

    def __call__(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        """Draw for every row."""
        device = head.logits.device
        if device not in self._copies:
            self._check(device)
            self._copies[device] = HostCopies(device)
        records = self._records.of(rows)
        changed = [b for b in self._records.changing if changes_logits(rows[b], self._spec)]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _Step(head, rows, self._spec, records, self._copies[device], self._impl).run(changed)

    def _check(self, device: torch.device) -> None:
        if self._impl == "triton" and device.type == "cpu":
            from keepmask.sampling.cuda.ops_triton import interpreted

            if not interpreted():
                raise ConfigError(
                    "impl='triton' with logits on cpu: needs Triton's interpreter; use impl='auto', or set "
                    "TRITON_INTERPRET=1 in the environment of the process"
                )


class Group(NamedTuple):
    """M rows of a batch whose logits lie in one tensor of R >= M rows."""

    items: Ints
    """[M], their rows in the batch."""
    logits: Tensor
    """[R, V] float32, before temperature."""
    source: Ints
    """[M], their rows in `logits`."""
    legal: Tensor | None
    """[R] bool, rows that held neither NaN nor +inf before they were changed; None where nothing was changed."""


class Queued(NamedTuple):
    """The draws of a group, on their way."""

    group: Group
    tensors: list[Tensor]
    """status [M], token ids [M], counts [M]."""
    supports: DeviceSupports
    entries: list[DeviceEntries]


class _Step:
    """One call of the sampler."""

    def __init__(
        self,
        head: Head,
        rows: Sequence[SamplingRow],
        spec: SamplerSpec,
        records: Records,
        copies: HostCopies,
        impl: Impl,
    ) -> None:
        self.head, self.rows, self.spec, self.records, self.copies, self.impl = head, rows, spec, records, copies, impl
        self.device = head.logits.device
        self.processed = spec.logprobs_mode.startswith("processed")
        self.raw = self.exact_logits()
        self.drawn = DeviceDrawn.of(rows, copies, spec.vocab_size)

    def run(self, changed_rows: list[int]) -> Drawn:
        """Queue the whole step, wait for the draws, and decide what the device could not."""
        queued = [self.queue(group) for group in self.groups(changed_rows)]
        pieces = [(q.tensors, [entries.tensors for entries in q.entries]) for q in queued]
        transfer = self.copies.start([t for own, entries in pieces for t in (*own, *(t for e in entries for t in e))])
        arrays = iter(transfer.wait())
        for q in queued:
            own = [next(arrays) for _ in q.tensors]
            self.put(q, own, [[next(arrays) for _ in entries.tensors] for entries in q.entries])
        return self.drawn

    # ------------------------------------------------------------ steps 1 to 6

    def exact_logits(self) -> Tensor:
        """[B, V] float32 with adjacent columns, before any step; not to be overwritten."""
        logits = self.head.logits
        if logits.dtype != torch.float32:
            logits = self.head.float32(self.index(np.arange(len(self.rows))))
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def groups(self, changed_rows: list[int]) -> list[Group]:
        """The batch by the tensor its processed logits are in."""
        everything = np.arange(len(self.rows))
        changed = np.asarray(changed_rows, np.int64)
        untouched = np.setdiff1d(everything, changed)
        groups = [Group(untouched, self.raw, untouched, None)]
        if changed.size:
            logits = self.raw.index_select(0, self.index(changed))
            legal = (logits < torch.inf).all(-1)
            errors = process(logits, [self.rows[b] for b in changed], self.spec)
            self.drawn.errors |= {int(changed[m]): error for m, error in errors.items()}
            left = np.setdiff1d(np.arange(changed.size), list(errors))
            groups.append(Group(changed[left], logits, left, legal))
        return [group for group in groups if group.items.size]

    def index(self, rows: Ints) -> Tensor:
        """[M] int64, on the device."""
        return to_device(rows, self.device)

    # ------------------------------------------------------------ what the device does

    def queue(self, group: Group) -> Queued:
        """Draw for the rows of a group."""
        V, impl = self.spec.vocab_size, self.impl
        columns = draw_columns(self.records, self.spec, group.items, group.source)
        table = DrawTable(to_device(DrawTable.pack(columns), self.device))
        found = candidates.select(group.logits, table, capacity=MAX_CANDIDATES, impl=impl)
        if group.legal is not None:
            found.status.masked_fill_(~group.legal[table["source"]], draw_table.NOT_FINITE)
        slots, logprobs_slots = columns["mask_slot"], columns["logprobs_slot"]
        room = (int(slots.max()) + 1, int(logprobs_slots.max()) + 1, MAX_COMPACT_IDS, V)
        supports = Supports.empty(*room, self.device)
        draws, cut = candidates.decide(found, table, V, supports, impl=impl)
        candidates.decide_all(group.logits, found, table, draws, cut, supports, impl=impl)
        left = (found.status == draw_table.OK) & (draws.over_all != 0) & (table["mask_slot"] >= 0)
        compaction.compact(group.logits, table, cut, left.int(), draws.counts, supports, impl=impl)
        return Queued(
            group,
            [found.status, draws.token_ids, draws.counts],
            DeviceSupports(group.items, slots, logprobs_slots, supports, group.logits, group.source, table, cut),
            self.queue_entries(group, columns, table, found, draws, cut),
        )

    def queue_entries(
        self,
        group: Group,
        columns: dict[str, NDArray[Any]],
        table: DrawTable,
        found: Candidates,
        draws: Draws,
        cut: Cut,
    ) -> list[DeviceEntries]:
        """Entries of the rows that ask for any: of the support, or of the vocabulary where that is what they are of."""
        asks, items = columns["num_top"] >= 0, group.items
        of_support = np.flatnonzero(asks & ~columns["whole"]) if self.processed else np.zeros(0, np.int64)
        over_all = np.setdiff1d(np.flatnonzero(asks), of_support)
        entries = []
        if of_support.size:
            cuts = (columns, table, found, draws, cut)
            entries.append(entries_of_supports(items[of_support], of_support, group.logits, *cuts, impl=self.impl))
        if over_all.size:
            m = over_all
            logits, source, temperature = self.raw, items[m], np.ones(m.size, np.float32)
            if self.processed:
                logits, source, temperature = group.logits, group.source[m], columns["temperature"][m]
            rows = {name: column[m] for name, column in columns.items()}
            rows |= {"source": source, "temperature": temperature}
            token_ids = draws.token_ids.index_select(0, self.index(m))
            entries.append(entries_over_all(items[m], logits, rows, token_ids, capacity=MAX_CANDIDATES, impl=self.impl))
        return entries

    # ------------------------------------------------------------ what the host learns

    def put(self, q: Queued, own: list[NDArray[Any]], of_entries: list[list[NDArray[Any]]]) -> None:
        """Record a group's draws, and decide on the host what the device could not."""
        status, token_ids, counts = own
        items, drawn = q.group.items, self.drawn
        for b in items[status == draw_table.NOT_FINITE].tolist():
            drawn.errors[b] = not_finite_error(self.rows[b])
        known = np.isin(status, (draw_table.OK, draw_table.OUTSIDE))
        drawn.token_ids[items[known]], drawn.counts[items[known]] = token_ids[known], counts[known]
        drawn.on_device[items[status == draw_table.OK]] = True
        drawn.parts.append(q.supports)
        unknown = [items[np.isin(status, (draw_table.UNCERTAIN, draw_table.TOO_MANY))]]
        for entries, arrays in zip(q.entries, of_entries, strict=True):
            entries.put(drawn.entries, drawn.token_ids, arrays, self.spec.logprobs_mode)
            unknown.append(entries.unknown(arrays, drawn.token_ids))
        if (rows := np.unique(np.concatenate(unknown))).size:
            self.decide_on_host(q.group, np.flatnonzero(np.isin(items, rows)))

    def decide_on_host(self, group: Group, m: Ints) -> None:
        """Draw for rows m of the group as `reference` does. This waits for their logits."""
        items = group.items[m]
        tensors = [group.logits.index_select(0, self.index(group.source[m]))]
        if not self.processed:
            tensors.append(self.raw.index_select(0, self.index(items)))
        z, *raw = (torch.from_numpy(array) for array in self.copies.start(tensors).wait())
        for i, b in enumerate(items.tolist()):
            self.drawn.on_device[b] = False
            draw_by_definition(self.drawn, b, z[i], raw[0][i] if raw else None, self.rows[b], self.spec)
