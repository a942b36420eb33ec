"""`Search`: candidates, contenders and exact logits of groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.compiled.team_rows import run_rows
from keepmask.head.sampled_logits import Head
from keepmask.sampling.cpu import candidates_numba as candidates
from keepmask.sampling.cpu import contenders_numba as contenders
from keepmask.sampling.cpu import draw_numba as draws
from keepmask.sampling.cpu import rows_numba
from keepmask.sampling.cpu.groups import Group, Ints
from keepmask.sampling.cpu.host_params import HostParams
from keepmask.sampling.row import SamplingRow

__all__ = ["Found", "Scratch", "Search"]

MAX_CANDIDATES = 4096
"""Rows with more are sorted whole."""
MAX_CONTENDERS = 256
"""Rows with more ids that may win are taken in float32."""
SORTED_AT_ONCE = 256
"""Widest padded rows that are sorted in one call."""


class Scratch:
    """Arrays whose contents matter within one call only, and whose memory is used again."""

    def __init__(self) -> None:
        self._known: dict[str, NDArray[Any]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """An array of this shape with any contents; it replaces the last one of this name."""
        size = int(np.prod(shape))
        known = self._known.get(name)
        if known is None or known.size < size:
            known = self._known[name] = np.empty(size, dtype)
        return known[:size].reshape(shape)


@dataclass(slots=True)
class Found:
    """Ids of M rows and their exact logits. Of entries [M, C] the first counts[m] of each row count."""

    z: NDArray[np.float32]
    """Before temperature."""
    ids: NDArray[np.int32]
    counts: Ints
    sums: NDArray[np.float64]
    """[M, 3]: outside, shift, floor, as `candidates_numba.select` gives them."""
    status: Ints
    full: NDArray[np.bool_]
    """[M], whether every logit is above -inf; known for contenders only."""

    @classmethod
    def of(cls, z: NDArray[np.float32], ids: NDArray[np.int32]) -> Found:
        """Room for M rows, nothing found yet."""
        M = len(z)
        sums = np.zeros((M, 3))
        sums[:, 2] = -np.inf
        return cls(z, ids, np.zeros(M, np.int64), sums, np.zeros(M, np.int64), np.zeros(M, np.bool_))


class Search:
    """The kernels that read whole rows, for one batch."""

    def __init__(self, head: Head, rows: Sequence[SamplingRow], host: HostParams, scratch: Scratch) -> None:
        self._head, self.host, self._scratch = head, host, scratch
        self.V = head.logits.shape[1]
        self.positions = np.fromiter((row.num_output_tokens for row in rows), np.int64, len(rows))

    def candidates(self, group: Group) -> Found:
        """What the filters of the rows may keep."""
        host, M = self.host, group.items.size
        bounds = (host.temperature, host.select_k, host.select_log_min_p, host.select_top_p, host.weighs)
        return self._select(group, bounds, np.full((M, 2), -1), np.zeros(M, np.float32))

    def best(
        self, group: Group, temperature: NDArray[np.float32], k: Ints, token_ids: Ints, token_z: NDArray[np.float32]
    ) -> tuple[Found, Ints]:
        """The k highest logits of each row at least, the weight of the others; and the ranks of tokens.

        temperature, k: [B]. token_ids: [M]; token_z: [M], their stored logits over the temperature.
        """
        B = temperature.size
        bounds = (temperature, k, np.full(B, -np.inf), np.ones(B), np.ones(B, np.bool_))
        tokens = np.stack([token_ids, np.zeros_like(token_ids)], 1)
        return self._select(group, bounds, tokens, token_z), tokens[:, 1]

    def contenders(self, group: Group) -> Found:
        """What may win the draw over whole rows."""
        host, M = self.host, group.items.size
        found = self._found(M, MAX_CONTENDERS)
        kernel = contenders.run_float32 if group.x.dtype == np.float32 else contenders.run_bfloat16
        draw = (host.temperature, self.positions, host.completions, host.seeds, (group.rho, group.alpha))
        results = (found.z, found.ids, found.counts, found.full, found.status)
        run_rows(kernel, M, 4 * M * self.V, group.x, group.x_rows, group.items, *draw, *results)
        self._rescore(group, found)
        return found

    def exact_rows(self, group: Group) -> Tensor:
        """[M, V] float32, the group's logits, in a new tensor."""
        if group.exact:
            return group.rows()
        exact = self._head.float32(torch.from_numpy(group.items))
        return exact.masked_fill_(group.rows() == -torch.inf, -torch.inf) if group.bans else exact

    def sorted_keys(self, found: Found, items: Ints, temperature: NDArray[np.float32]) -> NDArray[np.int64]:
        """[M, width] keys of what was found, by (z / temperature descending, id ascending)."""
        M, width = items.size, max(1, int(found.counts.max(initial=0)))
        keys: NDArray[np.int64] = self._scratch.array("keys", (M, width), np.int64)
        values = (found.z, found.ids, found.counts, items, temperature, width)
        run_rows(draws.run_encode, M, M * width, *values, keys, found.status)
        sort_rows(keys, found.counts)
        return keys

    def decide(self, found: Found, items: Ints, keys: NDArray[np.int64], *results: NDArray[Any]) -> None:
        """`draw_numba.decide` with the parameters of the rows."""
        host = self.host
        filters = (host.profile, host.greedy, host.top_k, host.top_p, host.log_min_p, host.by_rank)
        draw = (self.positions, host.completions, host.seeds)
        work = 128 * int(found.counts.sum())
        width = keys.shape[1]
        arguments = (keys, found.counts, width, items, *filters, *draw, found.sums, found.status, *results)
        run_rows(draws.run_decide, items.size, work, *arguments)

    def settle(self, found: Found, items: Ints) -> tuple[Ints, NDArray[np.float32]]:
        """Draw among contenders: token ids [M] and their logits [M] before temperature."""
        host, M = self.host, items.size
        token_ids, token_z = np.full(M, -1, np.int64), np.zeros(M, np.float32)
        draw = (host.temperature, self.positions, host.completions, host.seeds)
        draws.settle(found.z, found.ids, found.counts, items, *draw, found.status, token_ids, token_z, 0, M)
        return token_ids, token_z

    def all_finite(self, logits: Tensor) -> list[bool]:
        """[M], whether a row of logits [M, V] holds neither NaN nor +inf."""
        if logits.dtype != torch.float32:
            return (logits < torch.inf).all(-1).tolist()
        legal = np.empty(len(logits), np.bool_)
        run_rows(rows_numba.run_all_legal, legal.size, logits.numel(), logits.numpy(), legal)
        return legal.tolist()

    def _select(
        self, group: Group, bounds: tuple[NDArray[Any], ...], tokens: Ints, token_z: NDArray[np.float32]
    ) -> Found:
        M = group.items.size
        found = self._found(M, MAX_CANDIDATES)
        kernel = candidates.run_float32 if group.x.dtype == np.float32 else candidates.run_bfloat16
        source = (group.x, group.x_rows, group.items)
        results = (found.z, found.ids, found.counts, found.sums, found.status)
        margin = (group.rho, group.alpha)
        run_rows(kernel, M, M * self.V, *source, *bounds, margin, tokens, token_z, *results)
        self._rescore(group, found)
        return found

    def _found(self, M: int, C: int) -> Found:
        z, ids = self._scratch.array("z", (M, C), np.float32), self._scratch.array("ids", (M, C), np.int32)
        return Found.of(z, ids)

    def _rescore(self, group: Group, found: Found) -> None:
        """Replace rounded logits by the exact ones."""
        if group.exact:
            return
        width = int(found.counts.max(initial=0))
        inside = np.arange(width) < found.counts[:, None]
        offsets = np.concatenate([[0], np.cumsum(found.counts)])
        ids = torch.from_numpy(found.ids[:, :width][inside])
        found.z[:, :width][inside] = self._head.rescore(torch.from_numpy(group.items), ids, torch.from_numpy(offsets))


def sort_rows(keys: NDArray[np.int64], counts: Ints) -> None:
    """Sort each row in place; what follows its first counts[m] keys is padding already."""
    if keys.shape[1] <= SORTED_AT_ONCE or len(keys) == 1:
        keys.sort(axis=1)
        return
    for row, n in zip(keys, counts.tolist(), strict=True):
        row[:n].sort()
