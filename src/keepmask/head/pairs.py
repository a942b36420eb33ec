"""`Pairs`: (row, id) pairs, sorted by row, and what is derived from them once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["IdOrder", "Pairs", "offsets_of", "places_in"]


class IdOrder(NamedTuple):
    """Pairs ordered by id, then by row. U is the number of distinct ids."""

    order: Tensor
    """[M] int64: pair numbers in that order."""
    rows: Tensor
    """[M] int64: the row of each pair, in that order."""
    ids: Tensor
    """[U] int64: the distinct ids, ascending."""
    offsets: Tensor
    """[U+1] int64: pairs `offsets[u]:offsets[u + 1]` of the order have id `ids[u]`."""

    @classmethod
    def of(cls, ids: Tensor, index: Tensor) -> IdOrder:
        """The order of pairs of these ids and rows, [M] each; rows ascending."""
        order = _stable_order(ids)
        return cls._sorted(order, ids[order], index[order])

    def subset(self, numbers: Tensor, ids: Tensor, index: Tensor) -> IdOrder:
        """The order of the pairs `numbers` of all, whose own ids and rows these are, which costs less than sorting."""
        places = torch.full((self.order.numel(),), -1, dtype=torch.int64, device=ids.device)
        places[numbers] = torch.arange(numbers.numel(), device=ids.device)
        order = places[self.order]
        order = order[order >= 0]
        return self._sorted(order, ids[order], index[order])

    @classmethod
    def _sorted(cls, order: Tensor, ids: Tensor, index: Tensor) -> IdOrder:
        distinct, counts = torch.unique_consecutive(ids, return_counts=True)
        return cls(order, index, distinct.to(torch.int64), offsets_of(counts))


@dataclass(frozen=True, eq=False)
class Pairs:
    """M (row, id) pairs: row a of A is hidden state `rows[a]` of T, with head rows `ids[offsets[a]:offsets[a + 1]]`.

    Never modified after construction, so derived views are cached.
    """

    rows: Tensor
    """[A] int64, ascending."""
    ids: Tensor
    """[M] int32 or int64, rows of the head."""
    offsets: Tensor
    """[A+1] int64."""
    order: IdOrder | None = field(default=None, repr=False)
    """Where it is known."""

    @property
    def num_rows(self) -> int:
        """A."""
        return self.rows.numel()

    @property
    def num_pairs(self) -> int:
        """M."""
        return self.ids.numel()

    @cached_property
    def index(self) -> Tensor:
        """[M] int64: the row of each pair, in [0, A)."""
        rows = torch.arange(self.num_rows, device=self.ids.device)
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.num_pairs)

    @cached_property
    def by_id(self) -> IdOrder:
        """The pairs ordered by id, for sums over the rows that hold an id."""
        return IdOrder.of(self.ids, self.index) if self.order is None else self.order

    def positions(self, ids: Tensor) -> Tensor:
        """[A] int64: the number of the pair (a, ids[a]), -1 where row a does not hold that id. ids: [A]."""
        hit = self.ids == ids[self.index]
        # Pairs that do not match write to a slot past the end, so no number of matches is asked of the device.
        slots = torch.where(hit, self.index, self.num_rows)
        positions = torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=self.ids.device)
        return positions.scatter_(0, slots, torch.arange(self.num_pairs, device=self.ids.device))[:-1]

    def restrict(self, ids: range) -> tuple[Pairs, Tensor]:
        """The pairs whose id is in `ids`, by the place it has there, and their numbers [M']. Rows may become empty."""
        places, inside = places_in(self.ids, ids)
        numbers = inside.nonzero()[:, 0]
        return Pairs(self.rows, places[numbers], offsets_of(inside)[self.offsets]), numbers


def offsets_of(counts: Tensor) -> Tensor:
    """[A+1] int64: the offsets of rows of these lengths, [A]."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def places_in(values: Tensor, ids: range) -> tuple[Tensor, Tensor]:
    """The place of each value in `ids`, a block or shard of the vocabulary (0 where it has none), and whether it has
    one."""
    places = torch.div(values - ids.start, ids.step, rounding_mode="floor")
    inside = (places >= 0) & (places < len(ids)) & (values == ids.start + places * ids.step)
    return torch.where(inside, places, 0), inside


def _stable_order(ids: Tensor) -> Tensor:
    """[M] int64: the stable sorting permutation of `ids`."""
    if ids.device.type != "cpu":
        return torch.sort(ids, stable=True).indices
    # Sorting (id, position) packed in one integer is several times faster on a CPU than a sort that carries indices.
    packed = (ids.numpy().astype(np.int64) << 32) | np.arange(ids.numel())
    packed.sort()
    packed &= 0xFFFFFFFF
    return torch.from_numpy(packed)
