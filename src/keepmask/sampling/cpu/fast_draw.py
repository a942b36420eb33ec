"""The sampler on a CPU: one pass over the vocabulary finds candidates, all later work is on those.

Draws and supports are those of `reference`, always: where a decision hangs on the last bits of a sum or a logarithm the
row is handed to it. With a half-precision head there is one exception, a mass cut (top_p) that neither top_k nor min_p
bounds: the share of the normaliser that lies outside the candidates is then summed over rounded logits. The same holds
for log-probabilities over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.head.sampled_logits import Head
from keepmask.sampling.batch_params import RowsCache
from keepmask.sampling.cpu.draw_numba import INSUFFICIENT, UNCERTAIN
from keepmask.sampling.cpu.entries import Entries, entries_over_all, put_entries
from keepmask.sampling.cpu.groups import Group, Ints
from keepmask.sampling.cpu.host_params import HostParams
from keepmask.sampling.cpu.rows_numba import NOT_FINITE, OK, TOO_MANY
from keepmask.sampling.cpu.search import Found, Scratch, Search, sort_rows
from keepmask.sampling.definition import draw_sorted, not_finite_error, put_reference
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.pending_mask import MAX_COMPACT_IDS
from keepmask.sampling.processors import changes_logits, changes_values, process
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.token_logprobs import finite

__all__ = ["FastDraw"]


class FastDraw:
    """`draw_reference` by way of candidates, for logits on the CPU. Holds scratch memory: one call at a time."""

    def __init__(self, spec: SamplerSpec) -> None:
        self._spec = spec
        self._scratch = Scratch()
        self._host = RowsCache(lambda rows, _: HostParams.of(rows, spec))

    def __call__(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        """Draw for every row."""
        host = self._host.get(rows, head.logits.device)
        search = Search(head, rows, host, self._scratch)
        return _Step(head, rows, self._spec, host, search).run()


class Decided(NamedTuple):
    """Draws of M rows, as `draw_numba.decide` gives them."""

    keys: NDArray[np.int64]
    counts: Ints
    token_ids: Ints
    ranks: Ints
    top_ids: NDArray[np.int32]
    top_z: NDArray[np.float32]
    top_logprobs: NDArray[np.float32]
    drawn: NDArray[np.float32]


class _Step:
    """One call of the sampler."""

    def __init__(
        self, head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec, host: HostParams, search: Search
    ) -> None:
        self.head, self.rows, self.spec, self.host, self.search = head, rows, spec, host, search
        self.processed = spec.logprobs_mode.startswith("processed")
        self.drawn = Drawn.empty(rows)
        self.overflowed: list[int] = []  # rows whose logits half precision could not hold

    def run(self) -> Drawn:
        for group in self.groups():
            whole = self.host.whole[group.items]
            if not whole.all():
                self.draw_truncated(group.take(~whole))
            if whole.any():
                self.draw_whole(group.take(whole))
        if not self.processed:
            self.put_raw_entries()
        return self.drawn

    # ------------------------------------------------------------ steps 1 to 6

    def groups(self) -> list[Group]:
        """The batch by the tensor its processed logits are in."""
        logits, rows = self.head.logits, self.rows
        changed = [b for b in self.host.changing if changes_logits(rows[b], self.spec)]
        everything = np.arange(len(rows))
        if not changed:
            return [Group.of(everything, logits, everything)]
        # Rounded logits can be banned as they are; other changes need the exact ones.
        exact = logits.dtype == torch.float32
        edited = [b for b in changed if exact or changes_values(rows[b], self.spec)]
        banned = sorted(set(changed) - set(edited))
        if banned:
            finite = self.search.all_finite(logits[torch.tensor(banned)])
            self.overflowed = [b for b, ok in zip(banned, finite, strict=True) if not ok]
            edited, banned = edited + self.overflowed, sorted(set(banned) - set(self.overflowed))
        untouched = np.setdiff1d(everything, changed)
        groups = [Group.of(untouched, logits, untouched)] if untouched.size else []
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
        return Group.of(np.asarray(items)[left], logits, left, bans=True)

    # ------------------------------------------------------------ rows that filters cut

    def draw_truncated(self, group: Group) -> None:
        """Draw for rows that a filter cuts, or that are greedy."""
        found = self.search.candidates(group)
        self.put_decided(group.items, self.decide(found, group.items), found.status)
        short = (found.status == TOO_MANY) | (found.status == INSUFFICIENT)
        if short.any():
            self.draw_by_sorting(group.take(short))
        if (close := found.status == UNCERTAIN).any():
            self.draw_by_definition(group.take(close))
        if (bad := found.status == NOT_FINITE).any():
            self.take_not_finite(group.take(bad), self.draw_truncated)

    def decide(self, found: Found, items: Ints) -> Decided:
        """Filter and draw; sets the status of rows that it cannot decide."""
        keys, M = self.search.sorted_keys(found, items, self.host.temperature), items.size
        T = max(0, int(self.host.num_logprobs[items].max())) if self.processed else 0
        token_ids, ranks, top_ids = np.full(M, -1, np.int64), np.zeros(M, np.int64), np.zeros((M, T), np.int32)
        top_z, top_logprobs = np.zeros((M, T), np.float32), np.zeros((M, T), np.float32)
        results = (token_ids, ranks, top_ids, top_z, top_logprobs, np.zeros((M, 2), np.float32))
        self.search.decide(found, items, keys, *results)
        return Decided(keys, found.counts, *results)

    def put_decided(self, items: Ints, out: Decided, status: Ints) -> None:
        """Record the rows that were decided."""
        done = status == OK
        if not done.all():
            items, out = items[done], Decided._make(x[done] for x in out)
        if not items.size:
            return
        width = int(out.counts.max())
        keys = out.keys[:, :width]
        sort_rows(keys, out.counts)
        words = np.ascontiguousarray(keys).view(np.int32).reshape(items.size, width, 2)  # low word, high word
        ids, logprobs = words[:, :, 1], words[:, :, 0].view(np.float32)
        self.drawn.token_ids[items] = out.token_ids
        if width <= MAX_COMPACT_IDS and width < self.search.V:
            self.drawn.put_supports(items, out.counts, ids, logprobs)
        else:
            for m, (b, n) in enumerate(zip(items.tolist(), out.counts.tolist(), strict=True)):
                self.drawn.put_support(b, ids[m, :n].copy(), logprobs[m, :n].copy(), self.search.V)
        if self.processed:
            num_top = np.minimum(self.host.num_logprobs[items], out.counts)
            drawn = (out.drawn[:, 0], out.drawn[:, 1], out.ranks)
            self.put_entries(items, Entries(*drawn, out.top_ids, out.top_z, out.top_logprobs, num_top))

    # ------------------------------------------------------------ rows that need more than candidates

    def draw_by_sorting(self, group: Group) -> None:
        """Draw with every possible id as a candidate, row by row."""
        exact = self.search.exact_rows(group).numpy()
        for m in range(group.items.size):
            item, ids = group.items[m : m + 1], np.flatnonzero(exact[m] > -np.inf).astype(np.int32)
            found = Found.of(exact[m : m + 1, ids], ids[None])
            found.counts[0] = ids.size
            if not (exact[m] < np.inf).all():
                self.drawn.errors[int(item[0])] = not_finite_error(self.rows[item[0]])
                continue
            self.put_decided(item, self.decide(found, item), found.status)
            if found.status[0] == UNCERTAIN:
                self.draw_by_definition(group.one(m))

    def draw_by_definition(self, group: Group) -> None:
        """Draw as `reference` does."""
        rows = [self.rows[b] for b in group.items]
        params = self.host.params.take(torch.from_numpy(group.items))
        order = draw_sorted(self.search.exact_rows(group), rows, params)
        for m, b in enumerate(group.items.tolist()):
            put_reference(self.drawn, b, order, m, None, rows[m], self.spec)

    # ------------------------------------------------------------ rows that nothing cuts

    def draw_whole(self, group: Group) -> None:
        """Draw for rows without filters: over every id that is not banned."""
        found = self.search.contenders(group)
        if not (group.exact or group.bans):
            # Half precision may have made -inf of a finite logit, which belongs to the support.
            found.status[(found.status == OK) & ~found.full] = NOT_FINITE
        token_ids, token_z = self.search.settle(found, group.items)
        done = found.status == OK
        if done.any():
            self.put_whole(group.take(done), found.full[done], token_ids[done], token_z[done])
        many, close = found.status == TOO_MANY, found.status == UNCERTAIN
        if many.any() and not group.exact:
            self.draw_whole(self.exact_group(group.take(many)))
        elif many.any():
            close |= many
        if close.any():
            self.draw_by_definition(group.take(close))
        if (bad := found.status == NOT_FINITE).any():
            self.take_not_finite(group.take(bad), self.draw_whole)

    def put_whole(self, group: Group, full: NDArray[np.bool_], token_ids: Ints, token_z: NDArray[np.float32]) -> None:
        """Record rows drawn from every id that is not banned. full: [M], nothing is."""
        items, temperature = group.items, self.host.temperature
        self.drawn.token_ids[items] = token_ids
        self.drawn.counts[items] = 0
        with_entries = self.host.num_logprobs[items] >= 0 if self.processed else np.zeros(items.size, np.bool_)
        with_logprobs = ~full & np.asarray([self.rows[b].returns_mask_logprobs for b in items])
        log_totals = np.zeros(items.size)
        if (summed := with_entries | with_logprobs).any():
            asking = group.take(summed)
            entries, log_totals[summed] = entries_over_all(
                self.search, asking, temperature, token_ids[summed], token_z[summed]
            )
            if self.processed:
                self.put_entries(asking.items, entries)
        for m in np.flatnonzero(~full).tolist():
            one = group.one(m)
            logits = self.search.exact_rows(one) if with_logprobs[m] else one.rows().float()
            z = (logits[0] / torch.from_numpy(temperature[items[m : m + 1]])).numpy()
            ids = np.flatnonzero(z > -np.inf).astype(np.int32)
            logprobs = finite(z[ids].astype(np.float64) - log_totals[m])
            self.drawn.put_support(int(items[m]), ids, logprobs, self.search.V)

    # ------------------------------------------------------------ common

    def exact_group(self, group: Group) -> Group:
        """The same rows with exact logits."""
        return Group.of(group.items, self.search.exact_rows(group), np.arange(group.items.size), bans=group.bans)

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
        asks = (self.host.num_logprobs >= 0) & (self.drawn.token_ids >= 0)
        asks[list(self.drawn.errors)] = False
        overflowed = np.zeros_like(asks)
        overflowed[self.overflowed] = True
        for items in (np.flatnonzero(asks & ~overflowed), np.flatnonzero(asks & overflowed)):
            if not items.size:
                continue
            group = Group.of(items, self.head.logits, items)
            if overflowed[items[0]]:
                group = self.exact_group(group)
            token_ids = self.drawn.token_ids[items]
            each = torch.arange(items.size + 1)
            z = self.head.rescore(torch.from_numpy(items), torch.from_numpy(token_ids), each).numpy()
            entries, _ = entries_over_all(self.search, group, np.ones(len(self.rows), np.float32), token_ids, z)
            self.put_entries(items, entries)

    def put_entries(self, items: Ints, entries: Entries) -> None:
        """Record the entries of those rows that ask for any."""
        asks = self.host.num_logprobs[items] >= 0
        if not asks.all():
            items, entries = items[asks], Entries._make(x[asks] for x in entries)
        if items.size:
            put_entries(self.drawn.entries, items, self.drawn.token_ids[items], entries, self.spec.logprobs_mode)
