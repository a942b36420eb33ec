"""`Support`: the supports of T tokens as flat tensors, with the views scoring needs, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.head.pairs import Pairs, offsets_of
from keepmask.mask import SamplingMask

__all__ = ["Active", "Known", "Support", "listed_rows"]

R = TypeVar("R")

_MAX_LISTED = 8  # offending rows named in one error; the rest are counted


class Active(NamedTuple):
    """The pairs of the rows whose log-probability depends on the logits."""

    pairs: Pairs
    """Of A rows."""
    numbers: Tensor
    """[M] int64: the number of each pair in the support they were taken from."""


class Known(NamedTuple):
    """What whoever makes a support knows about it, so that it is not found again."""

    host_offsets: Tensor | None = None
    """The offsets on the CPU, so that no device is asked for sizes."""
    id_bounds: tuple[int, int] | None = None
    distinct: bool = False
    """Whether surely no id stands twice in a row."""


@dataclass(frozen=True, eq=False)
class Support:
    """The supports of T tokens in CSR form: row t is `ids[offsets[t]:offsets[t + 1]]`.

    A (row, id) entry is called a pair; there are N. Ids within a row are distinct, in any order. An empty row stands
    for the whole vocabulary. Never modified after construction, so derived views are cached; building one checks
    shapes and dtypes only, `check` looks at the values.

    ids: [N] int32 or int64. offsets: [T+1] int64, on the device of `ids`.
    """

    ids: Tensor
    offsets: Tensor
    known: Known = field(default=Known(), repr=False)
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
        ids, offsets = torch.tensor(mask.ids), torch.tensor(mask.offsets)
        bounds = tuple(map(int, torch.aminmax(ids))) if ids.numel() else (0, -1)
        support = cls(ids, offsets, Known(offsets, (bounds[0], bounds[1]), distinct=True))
        return support if device is None else support.to(device)

    @classmethod
    def cat(cls, supports: Iterable[Support]) -> Support:
        """The rows of all supports, one after the other; all on one device."""
        parts = list(supports)
        if not parts:
            return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        starts = np.cumsum([0] + [part.num_pairs for part in parts]).tolist()
        host = None
        if all(part.known.host_offsets is not None or not part.ids.is_cuda for part in parts):
            host = _cat_offsets([part._offsets_on_host for part in parts], starts)
        offsets = _cat_offsets([part.offsets for part in parts], starts)
        known = Known(host, distinct=all(part.known.distinct for part in parts))
        return cls(torch.cat([part.ids for part in parts]), offsets, known)

    def to(self, device: torch.device | str) -> Support:
        """The same support on `device`; self when it is there already."""
        if self.ids.device == torch.device(device):
            return self
        host = self.known.host_offsets if self.ids.device.type != "cpu" else self.offsets
        ids, offsets = (tensor.to(device, non_blocking=True) for tensor in (self.ids, self.offsets))
        found = vars(self)
        distinct = self.known.distinct or found.get("has_repeats") is False
        return Support(ids, offsets, Known(host, found.get("id_bounds", self.known.id_bounds), distinct))

    def select(self, rows: Tensor) -> Support:
        """The support made of these rows, in this order. rows: [R] int64 row numbers, or [T] bool; on the CPU they
        serve a support on any device that was made from host data, without waiting for it."""
        offsets, host, numbers = self._take(_row_numbers(rows, self.num_rows))
        return Support(self.ids[numbers], offsets, Known(host, distinct=self.known.distinct))

    def active(self, rows: Tensor | None = None) -> Active:
        """The rows of more than one id, only those among `rows` ([T] bool) when it is given.

        An id alone in its row has probability 1 whatever the logits are, and an empty row is no sum over pairs.
        The answer for the last `rows` is kept, for the several passes made over one batch.
        """
        if rows is None:
            return self._active
        return self.remember("active", (rows,), lambda: self._restrict((rows & (self.counts > 1)).nonzero()[:, 0]))

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
        return self.pairs.positions(targets)

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
    def pairs(self) -> Pairs:
        """All of them."""
        return Pairs(torch.arange(self.num_rows, device=self.ids.device), self.ids, self.offsets)

    @property
    def row_index(self) -> Tensor:
        """[N] int64: the row of each pair."""
        return self.pairs.index

    @cached_property
    def id_bounds(self) -> tuple[int, int]:
        """The least and the greatest id, (0, -1) when there is none. Raises MaskError if the offsets don't add up."""
        if self.known.id_bounds is not None:
            return self.known.id_bounds
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
        if self.known.distinct:
            return False
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

    def _repeating_rows(self) -> Tensor:
        order, index, _, _ = self.pairs.by_id
        ids = self.ids[order]
        return index[1:][(ids[1:] == ids[:-1]) & (index[1:] == index[:-1])]

    @cached_property
    def _offsets_on_host(self) -> Tensor:
        return self.offsets.cpu() if self.known.host_offsets is None else self.known.host_offsets

    @cached_property
    def _active(self) -> Active:
        return self._restrict((self._offsets_on_host.diff() > 1).nonzero()[:, 0])

    def _restrict(self, rows: Tensor) -> Active:
        if rows.numel() == self.num_rows:
            return Active(self.pairs, torch.arange(self.num_pairs, device=self.ids.device))
        offsets, _, numbers = self._take(rows)
        pairs = Pairs(rows.to(self.ids.device, non_blocking=True), self.ids[numbers], offsets)
        if "by_id" in vars(self.pairs):
            pairs = replace(pairs, order=self.pairs.by_id.subset(numbers, pairs.ids, pairs.index))
        return Active(pairs, numbers)

    def _take(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of a support of these rows: its offsets, they on the CPU if known, and the numbers of its pairs here."""
        device, host = self.ids.device, None
        if rows.device.type == "cpu" and self.known.host_offsets is not None:
            host = offsets_of(self.known.host_offsets.diff()[rows])
        rows = rows.to(device, non_blocking=True)
        offsets = offsets_of(self.counts[rows]) if host is None else host.to(device, non_blocking=True)
        total = int((offsets if host is None else host)[-1])
        numbers = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], offsets.diff(), output_size=total)
        return offsets, host, numbers + torch.arange(total, device=device)


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


def _cat_offsets(parts: list[Tensor], starts: list[int]) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64, device=parts[0].device)
    return torch.cat([zero, *(part[1:] + start for part, start in zip(parts, starts, strict=False))])


def listed_rows(rows: Tensor) -> str:
    """`rows 1, 2, 3 and 5 more`, for an error message."""
    numbers = sorted(set(rows.tolist()))
    named = ", ".join(str(row) for row in numbers[:_MAX_LISTED])
    more = f" and {len(numbers) - _MAX_LISTED} more" if len(numbers) > _MAX_LISTED else ""
    return f"row{'s' if len(numbers) > 1 else ''} {named}{more}"
