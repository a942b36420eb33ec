"""The sampler on a CPU: one pass over the vocabulary finds candidates, all later work is on those.

Draws and supports are those of `reference`, always: where a decision hangs on the last bits of a sum or a logarithm the
row is handed to it. With a half-precision head there is one exception, a mass cut (top_p) that neither top_k nor min_p
bounds: the share of the normaliser that lies outside the candidates is then summed over rounded logits. The same holds
for log-probabilities over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.head.sampled_logits import Head
from keepmask.sampling.cpu.draw_numba import settle
from keepmask.sampling.cpu.entries import Entries, entries_over_all, put_entries
from keepmask.sampling.cpu.groups import Group
from keepmask.sampling.cpu.search import Found, Scratch, Search, sort_rows
from keepmask.sampling.definition import draw_by_definition, not_finite_error
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.processors import changes_logits, changes_values, process
from keepmask.sampling.records import INSUFFICIENT, NOT_FINITE, OK, TOO_MANY, UNCERTAIN, Records
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.row_records import RowRecords
from keepmask.sampling.spec import SamplerSpec

__all__ = ["FastDraw"]


class FastDraw:
    """`draw_reference` by way of candidates, for logits on the CPU. Holds scratch memory: one call at a time."""

    def __init__(self, spec: SamplerSpec) -> None:
        self._spec = spec
        self._scratch = Scratch()
        self._records = RowRecords(spec)

    def __call__(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        """Draw for every row."""
        records = self._records.of(rows)
        step = _CpuStep(head, rows, self._spec, records, Search(head, self._scratch))
        changed = [b for b in self._records.changing if changes_logits(rows[b], self._spec)]
        return step.run(changed)


class _CpuStep:
    """One call of the sampler."""

    def __init__(
        self, head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec, records: Records, search: Search
    ) -> None:
        self.head, self.rows, self.spec, self.records, self.search = head, rows, spec, records, search
        self.processed = spec.logprobs_mode.startswith("processed")
        self.drawn = Drawn.empty(rows)
        self.overflowed: list[int] = []  # rows whose logits half precision could not hold

    def run(self, changed: list[int]) -> Drawn:
        """changed: rows that some step before the filters may change."""
        for group in self.groups(changed):
            whole = group.records["whole"] != 0
            if not whole.all():
                self.draw_truncated(group.take(~whole))
            if whole.any():
                self.draw_whole(group.take(whole))
        if not self.processed:
            self.put_raw_entries()
        return self.drawn

    # ------------------------------------------------------------ steps 1 to 6

    def groups(self, changed: list[int]) -> list[Group]:
        """The batch by the tensor its processed logits are in."""
        logits, rows = self.head.logits, self.rows
        everything = np.arange(len(rows))
        if not changed:
            return [Group.of(everything, self.records, logits)]
        # Rounded logits can be banned as they are; other changes need the exact ones.
        exact = logits.dtype == torch.float32
        edited = [b for b in changed if exact or changes_values(rows[b], self.spec)]
        banned = sorted(set(changed) - set(edited))
        if banned:
            finite = self.search.all_finite(logits[torch.tensor(banned)])
            self.overflowed = [b for b, ok in zip(banned, finite, strict=True) if not ok]
            edited, banned = sorted(edited + self.overflowed), sorted(set(banned) - set(self.overflowed))
        untouched = np.setdiff1d(everything, changed)
        groups = [Group.of(untouched, self.records[untouched], logits)] if untouched.size else []
        if edited:
            groups.append(self.processed_group(edited, self.head.float32(torch.tensor(edited))))
        if banned:
            groups.append(self.processed_group(banned, logits[torch.tensor(banned)]))
        return [group for group in groups if group.items.size]

    def processed_group(self, items: list[int], logits: Tensor) -> Group:
        """The rows as `processors.STEPS` change them, without those that fail. logits: [M, V], their own copy."""
        finite = self.search.all_finite(logits)
        errors = process(logits, [self.rows[b] for b in items], self.spec)
        self.drawn.errors |= {items[m]: error for m, error in errors.items()}
        self.drawn.errors |= {b: not_finite_error(self.rows[b]) for b, ok in zip(items, finite, strict=True) if not ok}
        left = np.asarray([m for m, b in enumerate(items) if b not in self.drawn.errors], np.int64)
        return self.group_of(np.asarray(items)[left], logits, left, bans=True)

    def group_of(self, items: NDArray[np.int64], logits: Tensor, source: NDArray[np.int64], *, bans: bool) -> Group:
        """Rows `items` of the batch, in rows `source` of logits."""
        records = self.records[items]
        records["source"] = source
        return Group.of(items, records, logits, bans=bans)

    # ------------------------------------------------------------ rows that filters cut

    def draw_truncated(self, group: Group) -> None:
        """Draw for rows that a filter cuts, or that are greedy."""
        found = self.search.candidates(group)
        if self.decide(group, found):
            return
        status = found.rows["status"]
        short = (status == TOO_MANY) | (status == INSUFFICIENT)
        if short.any():
            self.draw_by_sorting(group.take(short))
        if (close := status == UNCERTAIN).any():
            self.draw_by_definition(group.take(close))
        if (bad := status == NOT_FINITE).any():
            self.take_not_finite(group.take(bad), self.draw_truncated)

    def decide(self, group: Group, found: Found) -> bool:
        """Filter, draw and record; sets the status of rows that it cannot decide. Whether it decided all."""
        M, asked = group.items.size, group.records["num_logprobs"]
        keys = self.search.sorted_keys(found, group.records)
        T = max(0, int(asked.max())) if self.processed else 0
        top_ids, top_s, top_logprobs = np.zeros((M, T), np.int32), *np.zeros((2, M, T), np.float32)
        self.search.decide(found, group.records, keys, top_ids, top_s, top_logprobs)
        rows = found.rows
        done = rows["status"] == OK
        if all_done := bool(done.all()):
            self.put_decided(group, rows, keys)
        else:
            self.put_decided(group.take(done), rows[done], keys[done])
        if self.processed:
            own = (rows["token_s"], rows["token_logprob"], rows["rank"])
            num_top = np.minimum(asked, rows["count"])
            self.put_entries(group.items, Entries(*own, top_ids, top_s, top_logprobs, num_top), done)
        return all_done

    def put_decided(self, group: Group, rows: Records, keys: NDArray[np.int64]) -> None:
        """Record decided rows, and the supports of those that return them. keys: [M, width], of `draw_numba.decide`."""
        counts = rows["count"] % self.search.V  # 0 for the whole vocabulary
        self.drawn.token_ids[group.items] = rows["token_id"]
        self.drawn.counts[group.items] = counts
        returned = (group.records["returns_mask"] != 0) & (counts > 0)
        if not returned.any():
            return
        if not returned.all():
            keys, counts = keys[returned], counts[returned]
        keys = keys[:, : int(counts.max())]
        sort_rows(keys, counts)
        flat = keys[np.arange(keys.shape[1]) < counts[:, None]]  # [N]
        words = flat.view(np.int32).reshape(-1, 2)  # low word, high word
        self.drawn.put_supports(group.items[returned], counts, words[:, 1].copy(), words[:, 0].copy().view(np.float32))

    # ------------------------------------------------------------ rows that need more than candidates

    def draw_by_sorting(self, group: Group) -> None:
        """Draw with every possible id as a candidate, row by row."""
        exact = self.search.exact_rows(group).numpy()
        for m, b in enumerate(group.items.tolist()):
            if not (exact[m] < np.inf).all():
                self.drawn.errors[b] = not_finite_error(self.rows[b])
                continue
            ids = np.flatnonzero(exact[m] > -np.inf).astype(np.int32)
            found = Found.of(exact[m : m + 1, ids], ids[None])
            found.rows["count"] = ids.size
            self.decide(group.one(m), found)
            if found.rows["status"][0] == UNCERTAIN:
                self.draw_by_definition(group.one(m))

    def draw_by_definition(self, group: Group) -> None:
        """Draw as `reference` does."""
        for b, z in zip(group.items.tolist(), self.search.exact_rows(group), strict=True):
            draw_by_definition(self.drawn, b, z, None, self.rows[b], self.spec)

    # ------------------------------------------------------------ rows that nothing cuts

    def draw_whole(self, group: Group) -> None:
        """Draw for rows without filters: over every id that is not banned."""
        found = self.search.contenders(group)
        status = found.rows["status"]
        if not (group.exact or group.bans):
            # Half precision may have made -inf of a finite logit, which belongs to the support.
            status[(status == OK) & (found.rows["full"] == 0)] = NOT_FINITE
        settle(found.z, found.ids, group.records, found.rows)
        done = status == OK
        if done.any():
            self.put_whole(group.take(done), found.rows[done])
        many, close = status == TOO_MANY, status == UNCERTAIN
        if many.any() and not group.exact:
            self.draw_whole(self.exact_group(group.take(many)))
        elif many.any():
            close |= many
        if close.any():
            self.draw_by_definition(group.take(close))
        if (bad := status == NOT_FINITE).any():
            self.take_not_finite(group.take(bad), self.draw_whole)

    def put_whole(self, group: Group, rows: Records) -> None:
        """Record rows drawn from every id that is not banned."""
        items, records = group.items, group.records
        self.drawn.token_ids[items], self.drawn.counts[items] = rows["token_id"], 0
        asks, full = records["num_logprobs"] >= 0, rows["full"] != 0
        summed = (asks & self.processed) | (~full & (records["returns_mask_logprobs"] != 0))
        log_totals = np.zeros(items.size)
        if summed.any():
            asking = group.take(summed)
            token_ids, token_s = rows["token_id"][summed], rows["token_s"][summed]
            entries, log_totals[summed] = entries_over_all(self.search, asking, token_ids, token_s)
            if self.processed:
                self.put_entries(asking.items, entries, asks[summed])
        for m in np.flatnonzero(~full).tolist():
            one = group.one(m)
            logits = self.search.exact_rows(one) if records["returns_mask_logprobs"][m] else one.rows().float()
            with np.errstate(over="ignore"):  # beyond float32 is -inf, an id without weight
                s = logits[0].numpy() / np.float32(records["temperature"][m])
            ids = np.flatnonzero(s > -np.inf)
            self.drawn.put_support(int(items[m]), ids, s[ids].astype(np.float64) - log_totals[m], self.search.V)

    # ------------------------------------------------------------ common

    def exact_group(self, group: Group) -> Group:
        """The same rows with exact logits."""
        exact = self.search.exact_rows(group)
        return self.group_of(group.items, exact, np.arange(group.items.size), bans=group.bans)

    def take_not_finite(self, group: Group, draw: Callable[[Group], None]) -> None:
        """Fail rows that hold NaN or +inf; draw those where only half precision made them so."""
        if not group.exact:
            self.overflowed += group.items.tolist()
            draw(self.exact_group(group))
            return
        for b in group.items.tolist():
            self.drawn.errors[b] = not_finite_error(self.rows[b])

    def put_raw_entries(self) -> None:
        """Entries of the raw modes, for rows that ask and have drawn."""
        asks = (self.records["num_logprobs"] >= 0) & (self.drawn.token_ids >= 0)
        asks[list(self.drawn.errors)] = False
        overflowed = np.zeros_like(asks)
        overflowed[self.overflowed] = True
        for items in (np.flatnonzero(asks & ~overflowed), np.flatnonzero(asks & overflowed)):
            if not items.size:
                continue
            group = self.group_of(items, self.head.logits, items, bans=False)
            if overflowed[items[0]]:
                group = self.exact_group(group)
            group.records["temperature"] = 1
            token_ids, each = self.drawn.token_ids[items], torch.arange(items.size + 1)
            z = self.head.rescore(torch.from_numpy(items), torch.from_numpy(token_ids), each).numpy()
            entries, _ = entries_over_all(self.search, group, token_ids, z)
            self.put_entries(items, entries, np.ones_like(items, np.bool_))

    def put_entries(self, items: NDArray[np.int64], entries: Entries, chosen: NDArray[np.bool_]) -> None:
        """Record the entries of the chosen rows [M] that ask for any."""
        chosen = chosen & (self.records["num_logprobs"][items] >= 0)
        if not chosen.all():
            items, entries = items[chosen], Entries._make(x[chosen] for x in entries)
        if items.size:
            put_entries(self.drawn.entries, items, self.drawn.token_ids[items], entries, self.spec.logprobs_mode)
