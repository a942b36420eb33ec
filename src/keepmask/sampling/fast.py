"""The sampler on a CPU: one pass over the vocabulary finds candidates, all later work is on those.

Draws and supports are those of `reference`, always: where a decision hangs on the last bits of a sum or a logarithm the
row is handed to it. With a half-precision head there is one exception, a mass cut (top_p) that neither top_k nor min_p
bounds: the share of the normaliser that lies outside the candidates is then summed over rounded logits. The same holds
for log-probabilities over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.kernels import candidates_cpu as candidates
from keepmask.kernels import draw_cpu as draws
from keepmask.kernels.jit import RowThreads
from keepmask.sampling.batch import RowsCache
from keepmask.sampling.capture import MAX_COMPACT_IDS
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.head import Head
from keepmask.sampling.host import HostParams
from keepmask.sampling.processors import changes_logits, changes_values, process
from keepmask.sampling.reference import draw_sorted, not_finite_error, put_reference
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

__all__ = ["FastDraw"]

Ints = NDArray[np.int64]

MAX_CANDIDATES = 4096
"""Rows with more are sorted whole."""
MAX_CONTENDERS = 256
"""Rows with more ids that may win are taken in float32."""
NUM_RESCORED = 64
"""Ids whose exact logits correct a sum over the rounded logits of a whole row."""

_SORTED_AT_ONCE = 256
"""Widest padded rows that are sorted in one call."""

SECOND_ORDER = 1.03
MARGINS = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2 * 2.0**-8 * SECOND_ORDER, 2.0**-12),
    torch.float16: (2 * 2.0**-11 * SECOND_ORDER, 2.0**-12),
}
"""(rho, alpha): a stored logit r lies within rho * abs(r) + alpha of the exact one. Rounding to nearest errs by 2**-8
(bfloat16) or 2**-11 (float16) of the value; rho allows two such roundings, of the product and of what follows it, such
as a softcap; alpha, the order of a float32 accumulation and float16's subnormal numbers."""


class FastDraw:
    """`draw_reference` by way of candidates, for logits on the CPU. Holds scratch memory: one call at a time."""

    def __init__(self, spec: SamplerSpec) -> None:
        self.spec = spec
        self.threads = RowThreads(torch.get_num_threads())
        self._host = RowsCache(lambda rows, _: HostParams.of(rows, spec))
        self._scratch: dict[str, NDArray[Any]] = {}

    def __call__(self, head: Head, rows: Sequence[SamplingRow]) -> Drawn:
        """Draw for every row."""
        return Step(self, head, rows, self._host.get(rows, head.logits.device)).run()

    def scratch(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """Memory for an array whose contents matter within one call only."""
        size = int(np.prod(shape))
        known = self._scratch.get(name)
        if known is None or known.size < size:
            known = self._scratch[name] = np.empty(size, dtype)
        return known[:size].reshape(shape)


class Group(NamedTuple):
    """Rows of a batch that are read from one tensor of logits."""

    items: Ints
    """[M], their rows in the batch."""
    logits: Tensor
    """[R, V], before temperature: float32, or rounded to bfloat16 or float16."""
    x: NDArray[Any]
    """[R, V], `logits` as the kernels read them: float32, or the bits of bfloat16."""
    x_rows: Ints
    """[M], their rows in `logits`."""
    rho: float
    alpha: float

    @classmethod
    def of(cls, items: Ints, logits: Tensor, x_rows: Ints) -> Group:
        rho, alpha = MARGINS[logits.dtype]
        if logits.dtype == torch.bfloat16:
            x = logits.contiguous().view(torch.int16).numpy().view(np.uint16)
        else:
            x = logits.float().contiguous().numpy()
        return cls(items, logits, x, x_rows, rho, alpha)

    @property
    def exact(self) -> bool:
        """Whether the logits are the exact ones."""
        return self.rho == 0

    def take(self, which: NDArray[np.bool_]) -> Group:
        """Some of the rows."""
        return self if which.all() else self._replace(items=self.items[which], x_rows=self.x_rows[which])


@dataclass(slots=True)
class Found:
    """Candidates of M rows. Of entries [M, C] the first counts[m] of each row count."""

    z: NDArray[np.float32]
    """Exact logits before temperature."""
    ids: NDArray[np.int32]
    counts: Ints
    sums: NDArray[np.float64]
    """[M, 3]: outside, shift, floor, as `candidates_cpu.select` gives them."""
    status: Ints


class Decided(NamedTuple):
    """Draws of M rows, as `draw_cpu.decide` gives them."""

    keys: NDArray[np.int64]
    counts: Ints
    token_ids: Ints
    ranks: Ints
    top_ids: NDArray[np.int32]
    top_z: NDArray[np.float32]
    top_logprobs: NDArray[np.float32]
    drawn: NDArray[np.float32]


class Entries(NamedTuple):
    """What logprobs entries are made of, for M rows: the drawn token's, and the best T."""

    z: NDArray[np.float32]
    """[M], over the temperature."""
    logprobs: NDArray[np.float32]
    """[M]."""
    ranks: Ints
    top_ids: NDArray[np.int32]
    top_z: NDArray[np.float32]
    top_logprobs: NDArray[np.float32]
    num_top: Ints


class Step:
    """One call of the sampler."""

    def __init__(self, owner: FastDraw, head: Head, rows: Sequence[SamplingRow], host: HostParams) -> None:
        self.owner, self.head, self.rows, self.host, self.spec = owner, head, rows, host, owner.spec
        self.V = owner.spec.vocab_size
        self.processed = owner.spec.logprobs_mode.startswith("processed")
        self.positions = np.fromiter((row.num_output_tokens for row in rows), np.int64, len(rows))
        self.drawn = Drawn.empty(rows)

    def run(self) -> Drawn:
        """The whole of it."""
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
        untouched = np.setdiff1d(everything, changed)
        groups = [Group.of(untouched, logits, untouched)] if untouched.size else []
        if edited:
            groups.append(self.process(edited, self.head.float32(torch.tensor(edited))))
        if banned:
            groups.append(self.process(banned, logits[torch.tensor(banned)]))
        return [group for group in groups if group.items.size]

    def process(self, items: list[int], logits: Tensor) -> Group:
        """The rows as `processors.STEPS` change them, without those that fail. logits: [M, V], their own copy."""
        finite = self.all_finite(logits)
        errors = process(logits, [self.rows[b] for b in items], self.spec)
        self.drawn.errors |= {items[m]: error for m, error in errors.items()}
        self.drawn.errors |= {b: not_finite_error(self.rows[b]) for b, ok in zip(items, finite, strict=True) if not ok}
        left = np.asarray([m for m, b in enumerate(items) if b not in self.drawn.errors], np.int64)
        return Group.of(np.asarray(items)[left], logits, left)

    def all_finite(self, logits: Tensor) -> list[bool]:
        """[M], whether a row of logits [M, V] holds neither NaN nor +inf."""
        if logits.dtype != torch.float32:
            return (logits < torch.inf).all(-1).tolist()
        legal = np.empty(len(logits), np.bool_)
        self.owner.threads.run(candidates.all_legal, legal.size, logits.numel(), logits.numpy(), legal)
        return legal.tolist()

    # ------------------------------------------------------------ rows that filters cut

    def draw_truncated(self, group: Group) -> None:
        """Draw for rows that a filter cuts, or that are greedy."""
        host = self.host
        found = self.select(
            group, host.temperature, host.select_k, host.select_log_min_p, host.select_top_p, host.weighs
        )
        self.put_decided(group.items, self.decide(found, group.items), found.status)
        short = (found.status == candidates.TOO_MANY) | (found.status == draws.INSUFFICIENT)
        if short.any():
            self.draw_sorted_rows(group.take(short))
        if (found.status == draws.UNCERTAIN).any():
            self.draw_reference(group.take(found.status == draws.UNCERTAIN))

    def select(
        self,
        group: Group,
        temperature: NDArray[np.float32],
        top_k: Ints,
        log_min_p: NDArray[np.float64],
        top_p: NDArray[np.float64],
        weighs: NDArray[np.bool_],
        tokens: Ints | None = None,
        token_z: NDArray[np.float32] | None = None,
    ) -> Found:
        """`candidates_cpu.select` with exact logits. The parameters are [B] arrays; tokens: [M, 2], token_z: [M]."""
        M = group.items.size
        found = self.found(M)
        if tokens is None or token_z is None:
            tokens, token_z = np.full((M, 2), -1), np.zeros(M, np.float32)
        kernel = candidates.select if group.x.dtype == np.float32 else candidates.select_bfloat16
        arguments: tuple[Any, ...] = (group.x, group.x_rows, group.items, temperature, top_k, log_min_p, top_p, weighs)
        arguments += (
            (group.rho, group.alpha),
            tokens,
            token_z,
            found.z,
            found.ids,
            found.counts,
            found.sums,
            found.status,
        )
        self.owner.threads.run(kernel, M, M * self.V, *arguments)
        self.rescore(group, found)
        return found

    def found(self, M: int) -> Found:
        """Room for the candidates of M rows."""
        shape, scratch = (M, MAX_CANDIDATES), self.owner.scratch
        z, ids = scratch("z", shape, np.float32), scratch("ids", shape, np.int32)
        return Found(z, ids, np.zeros(M, np.int64), np.zeros((M, 3)), np.zeros(M, np.int64))

    def rescore(self, group: Group, found: Found) -> None:
        """Replace rounded logits by the exact ones."""
        width = int(found.counts.max())
        if group.exact or not width:
            return
        ids = np.where(np.arange(width) < found.counts[:, None], found.ids[:, :width], 0).astype(np.int64)
        found.z[:, :width] = self.head.rescore(torch.from_numpy(group.items), torch.from_numpy(ids)).numpy()

    def sorted_keys(self, found: Found, items: Ints, temperature: NDArray[np.float32]) -> NDArray[np.int64]:
        """[M, width] keys of the candidates by (z / temperature descending, id ascending)."""
        M, width = items.size, max(1, int(found.counts.max(initial=0)))
        keys: NDArray[np.int64] = self.owner.scratch("keys", (M, width), np.int64)
        arguments: tuple[Any, ...] = (found.z, found.ids, found.counts, items, temperature, width, keys, found.status)
        self.owner.threads.run(draws.encode, M, M * width, *arguments)
        _sort_rows(keys, found.counts)
        return keys

    def decide(self, found: Found, items: Ints) -> Decided:
        """Filter and draw; sets the status of rows that it cannot decide."""
        host, M = self.host, items.size
        keys = self.sorted_keys(found, items, host.temperature)
        T = max(0, int(host.num_logprobs[items].max())) if self.processed else 0
        out = Decided(
            keys,
            found.counts,
            np.full(M, -1, np.int64),
            np.zeros(M, np.int64),
            np.zeros((M, T), np.int32),
            np.zeros((M, T), np.float32),
            np.zeros((M, T), np.float32),
            np.zeros((M, 2), np.float32),
        )
        arguments: tuple[Any, ...] = (
            keys,
            found.counts,
            keys.shape[1],
            items,
            host.profile,
            host.greedy,
            host.top_k,
            host.top_p,
        )
        arguments += (host.log_min_p, host.by_rank, self.positions, host.completions, host.seeds, found.sums)
        arguments += (found.status, out.token_ids, out.ranks, out.top_ids, out.top_z, out.top_logprobs, out.drawn)
        self.owner.threads.run(draws.decide, M, 128 * int(found.counts.sum()), *arguments)
        return out

    def put_decided(self, items: Ints, out: Decided, status: Ints) -> None:
        """Record the rows that were decided, and the errors of those that hold no numbers."""
        for m in np.flatnonzero(status == candidates.NOT_FINITE).tolist():
            self.drawn.errors[int(items[m])] = not_finite_error(self.rows[items[m]])
        done = status == candidates.OK
        if not done.all():
            items, out = items[done], Decided._make(x[done] for x in out)
        if not items.size:
            return
        width = int(out.counts.max())
        keys = out.keys[:, :width]
        _sort_rows(keys, out.counts)
        words = np.ascontiguousarray(keys).view(np.int32).reshape(items.size, width, 2)  # low word, high word
        ids, logprobs = words[:, :, 1], words[:, :, 0].view(np.float32)
        self.drawn.token_ids[items] = out.token_ids
        compact = (out.counts <= MAX_COMPACT_IDS) & (out.counts < self.V)
        if compact.all():
            self.drawn.put_supports(items, out.counts, ids, logprobs)
        else:
            for m, b in enumerate(items.tolist()):
                n = out.counts[m]
                self.drawn.put_support(b, ids[m, :n].copy(), logprobs[m, :n].copy(), self.V)
        asked = self.host.num_logprobs[items]
        if self.processed and asked.max() >= 0:
            z, logprobs = out.drawn[:, 0], out.drawn[:, 1]
            num_top = np.minimum(asked, out.counts)
            entries = Entries(z, logprobs, out.ranks, out.top_ids, out.top_z, out.top_logprobs, num_top)
            self.put_entries(items, entries)

    # ------------------------------------------------------------ rows that need more than candidates

    def exact_rows(self, group: Group) -> Tensor:
        """[M, V] float32, the group's processed logits."""
        rows = group.logits[torch.from_numpy(group.x_rows)]
        if group.exact:
            return rows
        return self.head.float32(torch.from_numpy(group.items)).masked_fill_(rows == -torch.inf, -torch.inf)

    def draw_sorted_rows(self, group: Group) -> None:
        """Draw with every possible id as a candidate, row by row."""
        exact = self.exact_rows(group).numpy()
        for m in range(group.items.size):
            item = group.items[m : m + 1]
            ids = np.flatnonzero(exact[m] > -np.inf).astype(np.int32)
            found = Found(exact[m : m + 1, ids], ids[None], np.asarray([ids.size]), np.zeros((1, 3)), np.zeros(1, int))
            found.sums[0, 2] = -np.inf
            if not (exact[m] < np.inf).all():
                found.status[0] = candidates.NOT_FINITE
            self.put_decided(item, self.decide(found, item), found.status)
            if found.status[0] == draws.UNCERTAIN:
                self.draw_reference(group.take(np.arange(group.items.size) == m))

    def draw_reference(self, group: Group) -> None:
        """Draw by definition."""
        rows = [self.rows[b] for b in group.items]
        order = draw_sorted(self.exact_rows(group), rows, self.host.params.take(torch.from_numpy(group.items)))
        for m, b in enumerate(group.items.tolist()):
            put_reference(self.drawn, b, order, m, None, rows[m], self.spec)

    # ------------------------------------------------------------ rows that nothing cuts

    def draw_whole(self, group: Group) -> None:
        """Draw for rows without filters: over every id that is not banned."""
        M, host = group.items.size, self.host
        shape, scratch = (M, MAX_CONTENDERS), self.owner.scratch
        z, ids = scratch("z", shape, np.float32), scratch("ids", shape, np.int32)
        found = Found(z, ids, np.zeros(M, np.int64), np.zeros((M, 3)), np.zeros(M, np.int64))
        full = np.zeros(M, np.bool_)
        kernel = candidates.contenders if group.x.dtype == np.float32 else candidates.contenders_bfloat16
        arguments: tuple[Any, ...] = (
            group.x,
            group.x_rows,
            group.items,
            host.temperature,
            self.positions,
            host.completions,
            host.seeds,
        )
        arguments += ((group.rho, group.alpha), z, ids, found.counts, full, found.status)
        self.owner.threads.run(kernel, M, 4 * M * self.V, *arguments)
        self.rescore(group, found)
        token_ids, token_z = np.full(M, -1, np.int64), np.zeros(M, np.float32)
        arguments = (z, ids, found.counts, group.items, host.temperature, self.positions, host.completions, host.seeds)
        draws.settle(*arguments, found.status, token_ids, token_z, 0, M)
        self.put_whole(group, found.status, full, token_ids, token_z)
        if (short := found.status == candidates.TOO_MANY).any():
            wide = group.take(short)
            if group.exact:
                self.draw_reference(wide)
            else:
                self.draw_whole(Group.of(wide.items, self.exact_rows(wide), np.arange(wide.items.size)))
        if (close := found.status == draws.UNCERTAIN).any():
            self.draw_reference(group.take(close))

    def put_whole(
        self,
        group: Group,
        status: Ints,
        full: NDArray[np.bool_],
        token_ids: Ints,
        token_z: NDArray[np.float32],
    ) -> None:
        """Record the rows drawn from every id that is not banned."""
        for b in group.items[status == candidates.NOT_FINITE].tolist():
            self.drawn.errors[b] = not_finite_error(self.rows[b])
        done = status == candidates.OK
        group, full, token_ids, token_z = group.take(done), full[done], token_ids[done], token_z[done]
        if not group.items.size:
            return
        self.drawn.token_ids[group.items] = token_ids
        self.drawn.counts[group.items] = 0
        asks_entries = self.host.num_logprobs[group.items] >= 0 if self.processed else np.zeros(full.size, np.bool_)
        if asks_entries.any():
            asking = group.take(asks_entries)
            entries, _ = self.entries_over_all(
                asking, self.host.temperature, token_ids[asks_entries], token_z[asks_entries]
            )
            self.put_entries(asking.items, entries)
        for m in np.flatnonzero(~full).tolist():
            self.put_unbanned(group.take(np.arange(full.size) == m), token_ids[m : m + 1], token_z[m : m + 1])

    def put_unbanned(self, group: Group, token_ids: Ints, token_z: NDArray[np.float32]) -> None:
        """Record the support of one row that bans some ids and cuts none."""
        b = int(group.items[0])
        ids = (group.logits[int(group.x_rows[0])] > -torch.inf).nonzero().squeeze(1).numpy().astype(np.int32)
        logprobs = np.zeros(ids.size, np.float32)
        if self.rows[b].returns_mask_logprobs:
            _, log_total = self.entries_over_all(group, self.host.temperature, token_ids, token_z)
            z = self.exact_rows(group)[0].numpy()[ids] / self.host.temperature[b]
            logprobs = (z.astype(np.float64) - log_total[0]).astype(np.float32)
        self.drawn.put_support(b, ids, logprobs, self.V)

    # ------------------------------------------------------------ logprobs entries

    def put_raw_entries(self) -> None:
        """Entries of the raw modes, for rows that ask and have drawn."""
        asks = (self.host.num_logprobs >= 0) & (self.drawn.token_ids >= 0)
        asks[list(self.drawn.errors)] = False
        if not asks.any():
            return
        items = np.flatnonzero(asks)
        group = Group.of(items, self.head.logits, items)
        token_ids = self.drawn.token_ids[items]
        z = self.head.rescore(torch.from_numpy(items), torch.from_numpy(token_ids)[:, None]).view(-1).numpy()
        entries, _ = self.entries_over_all(group, np.ones(len(self.rows), np.float32), token_ids, z)
        self.put_entries(items, entries)

    def entries_over_all(
        self, group: Group, temperature: NDArray[np.float32], token_ids: Ints, token_z: NDArray[np.float32]
    ) -> tuple[Entries, NDArray[np.float64]]:
        """Entries over the whole vocabulary, and [M] log sum exp(z / temperature). token_z: before temperature."""
        B, asked = len(self.rows), self.host.num_logprobs
        least = 1 if group.exact else NUM_RESCORED
        off, on = np.full(B, -np.inf), np.ones(B)
        z = token_z / temperature[group.items]
        tokens = np.stack([token_ids, np.zeros_like(token_ids)], 1)
        own = z if group.exact else self.rounded(group, token_ids) / temperature[group.items]
        found = self.select(
            group, temperature, np.clip(asked, least, self.V), off, on, np.ones(B, np.bool_), tokens, own
        )
        if (found.status == candidates.TOO_MANY).any():
            found = self.best_by_sorting(group, found, temperature)
        keys = self.sorted_keys(found, group.items, temperature)
        inside = np.arange(keys.shape[1]) < found.counts[:, None]
        top_z = np.where(inside, _key_values(keys), np.float32(-np.inf))
        highest = top_z[:, :1].astype(np.float64)
        totals = np.exp(top_z - highest).sum(1) + found.sums[:, 0] * np.exp(found.sums[:, 1] - highest[:, 0])
        log_totals = highest[:, 0] + np.log(totals)
        num_top = np.minimum(asked[group.items], found.counts)
        width = max(0, int(num_top.max()))
        top_ids = (keys[:, :width] & 0xFFFFFFFF).astype(np.int32)
        logprobs = (z - log_totals).astype(np.float32)
        top_logprobs = (top_z[:, :width] - log_totals[:, None]).astype(np.float32)
        ranks = tokens[:, 1]
        if not group.exact:
            # Among the candidates the exact order is known; other ids are ranked by their rounded logits.
            here = ((keys & 0xFFFFFFFF) == token_ids[:, None]) & inside
            ranks = np.where(here.any(1), 1 + here.argmax(1), ranks)
        return Entries(z, logprobs, ranks, top_ids, top_z[:, :width], top_logprobs, num_top), log_totals

    def best_by_sorting(self, group: Group, found: Found, temperature: NDArray[np.float32]) -> Found:
        """Candidates for rows that hold more equal logits than there is room for: just as many as are asked for."""
        for m in np.flatnonzero(found.status == candidates.TOO_MANY).tolist():
            exact = self.exact_rows(group.take(np.arange(group.items.size) == m))[0].numpy()
            z = (exact / temperature[group.items[m]]).astype(np.float64)
            n = min(max(1, int(self.host.num_logprobs[group.items[m]])), int((z > -np.inf).sum()))
            best = np.argsort(-z, kind="stable")[:n]
            weights = np.exp(z - z[best[0]])
            found.z[m, :n], found.ids[m, :n], found.counts[m] = exact[best], best, n
            found.sums[m, :2] = max(weights.sum() - weights[best].sum(), 0.0), z[best[0]]
            found.status[m] = candidates.OK
        return found

    def rounded(self, group: Group, token_ids: Ints) -> NDArray[np.float32]:
        """[M] logits of tokens as they are stored."""
        return group.logits[torch.from_numpy(group.x_rows), torch.from_numpy(token_ids)].float().numpy()

    def put_entries(self, items: Ints, entries: Entries) -> None:
        """Record the entries of those rows that ask for any, as the mode wants them."""
        asks = self.host.num_logprobs[items] >= 0
        if not asks.all():
            items, entries = items[asks], Entries._make(x[asks] for x in entries)
        logits = self.spec.logprobs_mode.endswith("logits")
        self.drawn.entries.put(
            items,
            self.drawn.token_ids[items],
            entries.z if logits else entries.logprobs,
            entries.ranks,
            entries.top_ids,
            entries.top_z if logits else entries.top_logprobs,
            entries.num_top,
        )


def _sort_rows(keys: NDArray[np.int64], counts: Ints) -> None:
    """Sort each row in place; what follows its first counts[m] keys is padding already."""
    if keys.shape[1] <= _SORTED_AT_ONCE or len(keys) == 1:
        keys.sort(axis=1)
        return
    for row, n in zip(keys, counts.tolist(), strict=True):
        row[:n].sort()


def _key_values(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """The scaled logits of keys, as `draw_cpu.key_value` of one."""
    order = ~(keys >> 32).astype(np.int32)
    return (order ^ ((order >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
