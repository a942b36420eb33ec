"""`Support`: the supports of T tokens as flat tensors, with the views scoring needs, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask

__all__ = ["ActiveRows", "IdOrder", "Support", "listed_rows", "places_in"]

R = TypeVar("R")

_MAX_LISTED = 8  # offending rows named in one error; the rest are counted


class IdOrder(NamedTuple):
    """The pairs of a support ordered by id, then by row. U is the number of distinct ids."""

    order: Tensor
    """[N] int64: pair numbers in that order."""
    rows: Tensor
    """[N] int64: the row of each pair, in that order."""
    ids: Tensor
    """[U] int64: the distinct ids, ascending."""
    offsets: Tensor
    """[U+1] int64: pairs `offsets[u]:offsets[u + 1]` of the order have id `ids[u]`."""


class ActiveRows(NamedTuple):
    """The rows whose log-probability depends on the logits, as a support of their own."""

    rows: Tensor
    """[A] int64, ascending: their row numbers."""
    support: Support
    """A rows."""
    pairs: Tensor
    """[M] int64: the number of each of its pairs in the support they were taken from."""


@dataclass(frozen=True, eq=False)
class Support:
    """The supports of T tokens in CSR form: row t is `ids[offsets[t]:offsets[t + 1]]`.

    A (row, id) entry is called a pair; there are N. Ids within a row are distinct, in any order. An empty row stands
    for the whole vocabulary. Never modified after construction, so derived views are cached; building one checks
    shapes and dtypes only, `check` looks at the values.

    ids: [N] int32 or int64. offsets: [T+1] int64, on the device of `ids`.
    host_offsets: the same offsets on the CPU, given by whoever has them, so that no device is asked for sizes.
    """

    ids: Tensor
    offsets: Tensor
    host_offsets: Tensor | None = field(default=None, repr=False)
    _last: dict[str, tuple[Any, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype not in (torch.int32, torch.int64):
            raise MaskError(f"ids: must be a flat int32 or int64 tensor, got {self.ids.dtype} {list(self.ids.shape)}")
        if self.offsets.ndim != 1 or self.offsets.dtype != torch.int64 or not self.offsets.numel():
            raise MaskError(
                f"offsets: must be a flat int64 tensor of T + 1 values, got {self.offsets.dtype} "
                f"{list(self.offsets.shape)}"
            )
        if self.ids.device != self.offsets.device:
            raise MaskError(f"ids are on {self.ids.device}, offsets on {self.offsets.device}; put both on one device")

    @classmethod
    def from_mask(cls, mask: SamplingMask, device: torch.device | str | None = None) -> Support:
        """The rows of a `SamplingMask`, on `device` (the CPU by default)."""
        offsets = torch.tensor(mask.offsets)
        support = cls(torch.tensor(mask.ids), offsets, offsets)
        support.id_bounds  # noqa: B018 - found here, while the ids are on the host
        support.__dict__["has_repeats"] = False  # a mask has none
        return support if device is None else support.to(device)

    @classmethod
    def cat(cls, supports: Iterable[Support]) -> Support:
        """The rows of all supports, one after the other; all on one device."""
        parts = list(supports)
        if not parts:
            return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        sizes = np.cumsum([0] + [part.num_pairs for part in parts]).tolist()
        host = None
        if all(part.host_offsets is not None or not part.ids.is_cuda for part in parts):
            host = _cat_offsets([part._offsets_on_host for part in parts], sizes)
        offsets = _cat_offsets([part.offsets for part in parts], sizes)
        whole = cls(torch.cat([part.ids for part in parts]), offsets, host)
        if all(part._known_distinct for part in parts):
            whole.__dict__["has_repeats"] = False
        return whole

    def to(self, device: torch.device | str) -> Support:
        """The same support on `device`; self when it is there already."""
        if self.ids.device == torch.device(device):
            return self
        host = self.host_offsets if self.ids.device.type != "cpu" else self.offsets
        moved = Support(self.ids.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True), host)
        moved.__dict__.update(
            {name: self.__dict__[name] for name in ("id_bounds", "has_repeats") if name in self.__dict__}
        )
        return moved

    def select(self, rows: Tensor) -> Support:
        """The support made of these rows, in this order. rows: [R] int64 row numbers, or [T] bool; on the CPU they
        serve a support on any device that was made from host data, without waiting for it."""
        return self._select(_row_numbers(rows, self.num_rows))[0]

    def active(self, rows: Tensor | None = None) -> ActiveRows:
        """The rows of more than one id, only those among `rows` ([T] bool) when it is given.

        An id alone in its row has probability 1 whatever the logits are, and an empty row is no sum over pairs.
        The answer for the last `rows` is kept, for the several passes made over one batch.
        """
        if rows is None:
            return self._active
        return self.remember("active", (rows,), lambda: self._restrict((rows & (self.counts > 1)).nonzero()[:, 0]))

    def restrict(self, ids: range) -> tuple[Support, Tensor]:
        """The same rows with only those pairs whose id is in `ids`, and their numbers [M]. Rows may become empty."""
        inside = places_in(self.ids, ids)[1]
        pairs = inside.nonzero()[:, 0]
        return Support(self.ids[pairs], _cumulative(inside)[self.offsets]), pairs

    def remember(self, name: str, inputs: tuple[object, ...], make: Callable[[], R]) -> R:
        """`make()`, or what it gave last time under this name if these are the same inputs with the same values.

        One batch is scored several times (old, reference and current policy, each epoch): its plan is made once.
        """
        last = self._last.get(name)
        if last is not None and all(map(_is_same, last[0], inputs)):
            return cast(R, last[1])
        result = make()
        self._last[name] = (tuple(map(_Seen.of, inputs)), result)
        return result

    def target_positions(self, targets: Tensor) -> Tensor:
        """[T] int64: the number of the pair (t, targets[t]), -1 where row t does not hold its target."""
        hit = self.ids == targets[self.row_index]
        # Pairs that do not match write to a slot past the end, so no number of matches is asked of the device.
        slots = torch.where(hit, self.row_index, self.num_rows)
        positions = torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=self.ids.device)
        return positions.scatter_(0, slots, torch.arange(self.num_pairs, device=self.ids.device))[:-1]

    def check(self, vocab_size: int, targets: Tensor | None = None) -> None:
        """Raise MaskError, naming the rows, for anything that makes these rows no supports of `targets`.

        That is: offsets that do not add up; ids outside [0, vocab_size) or twice in a row; another number of targets
        than rows; a target outside [0, vocab_size) or, in a row that is not empty, outside the row.
        """
        if targets is not None and targets.shape != (self.num_rows,):
            raise MaskError(
                f"{self.num_rows} rows for targets of shape {list(targets.shape)}: each token needs its own row; "
                "shard or pad the rows together with the tokens"
            )
        self.check_ids(vocab_size)
        if targets is None:
            return
        bad_targets = (targets < 0) | (targets >= vocab_size)
        if bool(bad_targets.any()):
            raise MaskError(f"{listed_rows(bad_targets.nonzero()[:, 0])}: targets must be in [0, {vocab_size})")
        self.check_members(targets)

    def check_ids(self, vocab_size: int) -> None:
        """Raise MaskError, naming the rows, unless offsets add up and ids are in [0, vocab_size), none twice in a row.

        The cheap part of `check`: looks at the values once, whatever the number of calls.
        """
        low, high = self.id_bounds
        if low < 0 or high >= vocab_size:
            bad = (self.ids < 0) | (self.ids >= vocab_size)
            raise MaskError(f"{listed_rows(self.row_index[bad])}: ids must be in [0, {vocab_size}), got {low}..{high}")
        if self.has_repeats:
            raise MaskError(f"{listed_rows(self._repeating_rows())}: an id stands twice in the row")

    def check_members(self, targets: Tensor, rows: Tensor | None = None) -> None:
        """Raise MaskError, naming the rows, where a row that is not empty lacks its target.

        targets: [T]. rows: [T] bool, the rows to look at; None looks at all.
        """
        outside = (self.target_positions(targets) < 0) & (self.counts > 0)
        outside = outside if rows is None else outside & rows
        if bool(outside.any()):
            numbers = outside.nonzero()[:, 0]
            raise MaskError(
                f"{listed_rows(numbers)}: the target is not in its row, so it cannot have been drawn from it; check "
                "that rows and targets are aligned and that the mask was not truncated"
            )

    @property
    def num_rows(self) -> int:
        """T."""
        return self.offsets.numel() - 1

    @property
    def num_pairs(self) -> int:
        """N."""
        return self.ids.numel()

    def __len__(self) -> int:
        return self.num_rows

    @cached_property
    def counts(self) -> Tensor:
        """[T] int64: ids in each row; 0 marks the whole vocabulary."""
        return self.offsets.diff()

    @cached_property
    def row_index(self) -> Tensor:
        """[N] int64: the row of each pair."""
        rows = torch.arange(self.num_rows, device=self.ids.device)
        return torch.repeat_interleave(rows, self.counts, output_size=self.num_pairs)

    @cached_property
    def by_id(self) -> IdOrder:
        """The pairs ordered by id, for sums over the rows that hold an id."""
        order = _stable_order(self.ids)
        return _id_order(order, self.ids[order], self.row_index[order])

    @cached_property
    def id_bounds(self) -> tuple[int, int]:
        """The least and the greatest id, (0, -1) when there is none. Raises MaskError if the offsets don't add up."""
        host = self._offsets_on_host
        lengths = host.diff()
        if host[0] != 0 or host[-1] != self.num_pairs or bool((lengths < 0).any()):
            raise MaskError(
                f"offsets must rise from 0 to the number of ids, {self.num_pairs}; they go from {int(host[0])} to "
                f"{int(host[-1])}, with {int((lengths < 0).sum())} rows of negative length: counts and ids do not "
                "belong together"
            )
        if not self.num_pairs:
            return 0, -1
        low, high = torch.aminmax(self.ids)
        return int(low), int(high)

    @cached_property
    def has_repeats(self) -> bool:
        """Whether an id stands twice in some row."""
        falls = (self.ids[1:] <= self.ids[:-1]) & (self.row_index[1:] == self.row_index[:-1])
        # Ascending rows, as masks have them, hold no id twice; others are sorted to see.
        return bool(falls.any()) and self._repeating_rows().numel() > 0

    @property
    def has_empty_rows(self) -> bool:
        """Whether some row stands for the whole vocabulary."""
        return self._has_empty_rows

    @cached_property
    def _has_empty_rows(self) -> bool:
        return bool((self._offsets_on_host.diff() == 0).any())

    @property
    def _known_distinct(self) -> bool:
        return self.__dict__.get("has_repeats") is False

    def _repeating_rows(self) -> Tensor:
        by_id = self.by_id
        ids = self.ids[by_id.order]
        return by_id.rows[1:][(ids[1:] == ids[:-1]) & (by_id.rows[1:] == by_id.rows[:-1])]

    @cached_property
    def _offsets_on_host(self) -> Tensor:
        if self.host_offsets is not None:
            return self.host_offsets
        return self.offsets.cpu()

    @cached_property
    def _active(self) -> ActiveRows:
        return self._restrict((self._offsets_on_host.diff() > 1).nonzero()[:, 0])

    def _restrict(self, rows: Tensor) -> ActiveRows:
        if rows.numel() == self.num_rows:
            everything = torch.arange(self.num_pairs, device=self.ids.device)
            return ActiveRows(rows.to(self.ids.device), self, everything)
        support, pairs = self._select(rows)
        if "by_id" in self.__dict__:
            support.__dict__["by_id"] = _filter_order(self.by_id, self.ids, pairs, support.row_index)
        return ActiveRows(rows.to(self.ids.device, non_blocking=True), support, pairs)

    def _select(self, rows: Tensor) -> tuple[Support, Tensor]:
        device = self.ids.device
        host = None
        if rows.device.type == "cpu" and self.host_offsets is not None:
            host = _cumulative(self.host_offsets.diff()[rows])
        rows = rows.to(device, non_blocking=True)
        offsets = _cumulative(self.counts[rows]) if host is None else host.to(device, non_blocking=True)
        total = int((offsets if host is None else host)[-1])
        pairs = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], offsets.diff(), output_size=total)
        pairs += torch.arange(total, device=device)
        selected = Support(self.ids[pairs], offsets, host)
        if self._known_distinct:
            selected.__dict__["has_repeats"] = False
        return selected, pairs


class _Seen(NamedTuple):
    """An input of `remember` as it was."""

    input: object
    version: int
    values: Tensor | None

    @classmethod
    def of(cls, x: object) -> _Seen:
        return cls(x, _version(x), x.clone() if isinstance(x, Tensor) else None)


def _version(x: object) -> int:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _is_same(seen: _Seen, x: object) -> bool:
    """Whether this is the input that was seen: for tensors the same with the same values, however they were written."""
    if not isinstance(x, Tensor) or seen.values is None:
        return x is seen.input or (isinstance(x, range | str) and x == seen.input)
    if x.device.type == "cpu" and seen.values.device == x.device:
        return x.dtype == seen.values.dtype and torch.equal(x, seen.values)
    if x is not seen.input or _version(x) != seen.version:
        return False
    if x.device.type == "cuda":  # without waiting for the device
        torch._assert_async((x == seen.values).all(), "targets, masks and transforms must not be written to by .data")
    return True


def _row_numbers(rows: Tensor, num_rows: int) -> Tensor:
    if rows.dtype != torch.bool:
        return rows.to(torch.int64)
    if rows.shape != (num_rows,):
        raise MaskError(f"select: a boolean selection needs one value for each of the {num_rows} rows")
    return rows.nonzero().squeeze(1)


def _cumulative(counts: Tensor) -> Tensor:
    """The offsets of rows of these lengths."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def _cat_offsets(parts: list[Tensor], starts: list[int]) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64, device=parts[0].device)
    return torch.cat([zero, *(part[1:] + start for part, start in zip(parts, starts, strict=False))])


def _stable_order(ids: Tensor) -> Tensor:
    """[N] int64: the stable sorting permutation of `ids`."""
    if ids.device.type != "cpu":
        return torch.sort(ids, stable=True).indices
    # Sorting (id, position) packed in one integer is several times faster on a CPU than a sort that carries indices.
    packed = (ids.numpy().astype(np.int64) << 32) | np.arange(ids.numel())
    packed.sort()
    packed &= 0xFFFFFFFF
    return torch.from_numpy(packed)


def _id_order(order: Tensor, sorted_ids: Tensor, rows: Tensor) -> IdOrder:
    ids, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    return IdOrder(order, rows, ids.to(torch.int64), _cumulative(counts))


def _filter_order(whole: IdOrder, ids: Tensor, pairs: Tensor, row_index: Tensor) -> IdOrder:
    """The order of a subset of pairs out of the order of all, which costs less than sorting again."""
    numbers = torch.full((ids.numel(),), -1, dtype=torch.int64, device=ids.device)
    numbers[pairs] = torch.arange(pairs.numel(), device=ids.device)
    order = numbers[whole.order]
    order = order[order >= 0]
    return _id_order(order, ids[pairs[order]], row_index[order])


def places_in(values: Tensor, ids: range) -> tuple[Tensor, Tensor]:
    """The place of each value in `ids`, a block or shard of the vocabulary (0 where it has none), and whether it has
    one."""
    places = torch.div(values - ids.start, ids.step, rounding_mode="floor")
    inside = (places >= 0) & (places < len(ids)) & (values == ids.start + places * ids.step)
    return torch.where(inside, places, 0), inside


def listed_rows(rows: Tensor) -> str:
    """`rows 1, 2, 3 and 5 more`, for an error message."""
    numbers = sorted(set(rows.tolist()))
    named = ", ".join(str(row) for row in numbers[:_MAX_LISTED])
    more = f" and {len(numbers) - _MAX_LISTED} more" if len(numbers) > _MAX_LISTED else ""
    return f"row{'s' if len(numbers) > 1 else ''} {named}{more}"
