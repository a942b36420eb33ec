"""`Search`: candidates, contenders and exact logits of groups of rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.compiled.team_rows import run_rows
from keepmask.head.sampled_logits import Head
from keepmask.sampling.cpu import candidates_numba, contenders_numba, draw_numba, rows_numba
from keepmask.sampling.cpu.groups import Group
from keepmask.sampling.records import MAX_CANDIDATES, Records

__all__ = ["FOUND", "Found", "Scratch", "Search", "sort_rows"]

FOUND = np.dtype(
    [
        ("status", np.int64),
        ("count", np.int64),  # candidates above -inf, and after the draw the ids in the support
        ("outside", np.float64),  # weight exp(s - shift) of all other ids, in rows that weigh; s = z / temperature
        ("shift", np.float64),  # the highest s
        ("floor", np.float64),  # no id above it is missing, in units of s
        ("full", np.int64),  # every logit is above -inf; known for contenders only
        ("token_id", np.int64),  # -1 for none
        ("rank", np.int64),  # of the token, from 1
        ("token_s", np.float32),
        ("token_logprob", np.float32),
    ]
)
"""What the kernels find of a row."""

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
        size = math.prod(shape)
        known = self._known.get(name)
        if known is None or known.size < size:
            known = self._known[name] = np.empty(size, dtype)
        return known[:size].reshape(shape)


class Found(NamedTuple):
    """Ids of M rows and their exact logits. Of entries [M, C] the first rows["count"][m] of each row count."""

    rows: Records
    """[M] of `FOUND`."""
    z: NDArray[np.float32]
    """Before temperature."""
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, z: NDArray[np.float32], ids: NDArray[np.int32]) -> Found:
        """Room for M rows, nothing found yet."""
        rows = np.zeros(len(z), FOUND)
        rows["token_id"], rows["floor"] = -1, -np.inf
        return cls(rows, z, ids)


class Search:
    """The kernels that read whole rows, for one batch."""

    def __init__(self, head: Head, scratch: Scratch) -> None:
        self._head, self._scratch = head, scratch
        self.V = head.logits.shape[1]

    def candidates(self, group: Group) -> Found:
        """What the filters of the rows may keep."""
        return self._select(group, self._room(group.items.size, MAX_CANDIDATES))

    def best(self, group: Group, k: Any, token_ids: Any, token_s: NDArray[np.float32]) -> Found:
        """The k highest logits of each row at least, the weight of the others; and the ranks of tokens.

        k, token_ids: [M]. token_s: [M], their stored logits over the temperature.
        """
        records = group.records.copy()
        records["select_k"], records["select_log_min_p"], records["select_top_p"] = k, -np.inf, 1
        records["weighs"] = 1
        found = self._room(group.items.size, MAX_CANDIDATES)
        found.rows["token_id"], found.rows["token_s"] = token_ids, token_s
        return self._select(group._replace(records=records), found)

    def contenders(self, group: Group) -> Found:
        """What may win the draw over whole rows."""
        M = group.items.size
        found = self._room(M, MAX_CONTENDERS)
        kernel = contenders_numba.run_float32 if group.x.dtype == np.float32 else contenders_numba.run_bfloat16
        run_rows(kernel, M, 4 * M * self.V, group.x, group.records, group.margin, *found)
        self._rescore(group, found)
        return found

    def exact_rows(self, group: Group) -> Tensor:
        """[M, V] float32, the group's logits, in a new tensor."""
        if group.exact:
            return group.rows()
        exact = self._head.float32(torch.from_numpy(group.items))
        return exact.masked_fill_(group.rows() == -torch.inf, -torch.inf) if group.bans else exact

    def sorted_keys(self, found: Found, records: Records) -> NDArray[np.int64]:
        """[M, width] keys of what was found, by (z / temperature descending, id ascending)."""
        M, counts = found.rows.size, found.rows["count"]
        width = max(1, int(counts.max(initial=0)))
        keys: NDArray[np.int64] = self._scratch.array("keys", (M, width), np.int64)
        run_rows(draw_numba.run_encode, M, M * width, found.z, found.ids, records, found.rows, keys)
        sort_rows(keys, counts)
        return keys

    def decide(self, found: Found, records: Records, keys: NDArray[np.int64], *best: NDArray[Any]) -> None:
        """`draw_numba.decide`. best: top_ids, top_s, top_logprobs."""
        work = 128 * int(found.rows["count"].sum())
        run_rows(draw_numba.run_decide, found.rows.size, work, keys, records, found.rows, *best)

    def all_finite(self, logits: Tensor) -> list[bool]:
        """[M], whether a row of logits [M, V] holds neither NaN nor +inf."""
        if logits.dtype != torch.float32:
            return (logits < torch.inf).all(-1).tolist()
        legal = np.empty(len(logits), np.bool_)
        run_rows(rows_numba.run_all_legal, legal.size, logits.numel(), logits.numpy(), legal)
        return legal.tolist()

    def _select(self, group: Group, found: Found) -> Found:
        M = group.items.size
        kernel = candidates_numba.run_float32 if group.x.dtype == np.float32 else candidates_numba.run_bfloat16
        run_rows(kernel, M, M * self.V, group.x, group.records, group.margin, *found)
        self._rescore(group, found)
        return found

    def _room(self, M: int, C: int) -> Found:
        return Found.of(self._scratch.array("z", (M, C), np.float32), self._scratch.array("ids", (M, C), np.int32))

    def _rescore(self, group: Group, found: Found) -> None:
        """Replace rounded logits by the exact ones."""
        if group.exact:
            return
        counts = found.rows["count"]
        width = int(counts.max(initial=0))
        inside = np.arange(width) < counts[:, None]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        ids = torch.from_numpy(found.ids[:, :width][inside])
        found.z[:, :width][inside] = self._head.rescore(torch.from_numpy(group.items), ids, torch.from_numpy(offsets))


def sort_rows(keys: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Sort each row in place; what follows its first counts[m] keys is padding already."""
    if keys.shape[1] <= SORTED_AT_ONCE or len(keys) == 1:
        keys.sort(axis=1)
        return
    for row, n in zip(keys, counts.tolist(), strict=True):
        row[:n].sort()
