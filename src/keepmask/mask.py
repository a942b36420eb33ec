"""`SamplingMask`: the supports of one completion, one row a generated token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError

__all__ = ["SamplingMask"]

_MAX_LISTED = 8  # offending rows named in one error; the rest are counted
_ID_LIMIT = 2**31  # ids are int32


class SamplingMask:
    """All supports of one completion, in CSR form: row t is `ids[offsets[t]:offsets[t + 1]]`.

    A row holds the ids that could be drawn at output position t, ascending and distinct. An empty row stands for the
    whole vocabulary (no filter and no ban applied there), which `row` returns as None.

    ids: [N] int32. offsets: [T+1] int64. logprobs: [N] float32, in nats, or None: log-probability of each id under
    the distribution the draw used, in the order of `ids`.

    The arrays are checked at construction and read-only afterwards: an array that is read-only and of the right type
    is shared, any other is copied, so the mask never changes with the caller's. Raises MaskError naming the offending
    rows.
    """

    __slots__ = ("ids", "logprobs", "offsets")

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None

    def __init__(self, ids: ArrayLike, offsets: ArrayLike, logprobs: ArrayLike | None = None) -> None:
        given_ids, given_offsets = _integers("ids", ids), _integers("offsets", offsets)
        _check_offsets(given_offsets, given_ids.size)
        self.offsets = _frozen(given_offsets, np.int64)
        self._check_ids(given_ids)
        self.ids = _frozen(given_ids, np.int32)
        self.logprobs = None if logprobs is None else self._checked_logprobs(logprobs)

    @classmethod
    def adopt(
        cls, ids: NDArray[np.int32], offsets: NDArray[np.int64], logprobs: NDArray[np.float32] | None = None
    ) -> SamplingMask:
        """The mask of arrays that are known to be right, such as rows a sampler captured: nothing is checked or copied.

        The arrays become read-only; nobody may hold a writable view of them.
        """
        mask = cls.__new__(cls)
        mask.ids, mask.offsets, mask.logprobs = ids, offsets, logprobs
        for array in (ids, offsets, logprobs):
            if array is not None:
                array.flags.writeable = False
        return mask

    @classmethod
    def from_lists(
        cls, token_ids: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]] | None = None
    ) -> SamplingMask:
        """The mask with these rows; ids may come in any order, and `logprobs` rows follow theirs.

        Raises MaskError for an id given twice in a row, a negative id, or logprobs of other lengths than the ids.
        """
        ids, counts = _flattened("row", list(token_ids), np.int64)
        values = None
        if logprobs is not None:
            values, value_counts = _flattened("logprobs row", list(logprobs), np.float64)
            _check_paired(counts, value_counts)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        row_of_id = np.repeat(np.arange(counts.size), counts)
        if ((np.diff(ids) < 0) & (np.diff(row_of_id) == 0)).any():
            order = np.lexsort((ids, row_of_id))
            ids, values = ids[order], None if values is None else values[order]
        return cls(ids, offsets, values)

    @classmethod
    def concat(cls, masks: Iterable[SamplingMask]) -> SamplingMask:
        """The rows of all masks, one after the other; masks without rows add nothing.

        Raises MaskError when only some of the others carry logprobs.
        """
        given = list(masks)
        parts = [mask for mask in given if len(mask)] or given[:1]
        if not parts:
            return cls([], [0])
        starts = np.cumsum([0] + [part.ids.size for part in parts])
        offsets = np.concatenate([[0], *(part.offsets[1:] + start for part, start in zip(parts, starts, strict=False))])
        with_logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        if len(with_logprobs) not in (0, len(parts)):
            raise MaskError(
                f"concat: {len(with_logprobs)} of {len(parts)} masks carry logprobs; give them to all or to none"
            )
        logprobs = np.concatenate(with_logprobs) if with_logprobs else None
        return cls.adopt(np.concatenate([part.ids for part in parts]), offsets, logprobs)

    def __len__(self) -> int:
        """Number of rows, one a generated token."""
        return self.offsets.size - 1

    def __getitem__(self, rows: slice) -> SamplingMask:
        """The mask of a contiguous run of rows (step 1)."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"mask[{rows!r}]: a mask is cut by slices, mask[a:b]; use mask.row(t) for the ids of one row"
            )
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise MaskError(f"slice step {step}: rows are taken with step 1; use `take` for any other selection")
        stop = max(start, stop)
        low, high = self.offsets[start], self.offsets[stop]
        logprobs = None if self.logprobs is None else self.logprobs[low:high]
        return SamplingMask.adopt(self.ids[low:high], self.offsets[start : stop + 1] - low, logprobs)

    def take(self, rows: ArrayLike) -> SamplingMask:
        """The mask made of these rows, in this order."""
        index = _integers("take", rows)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise MaskError(f"take: row numbers must be in [0, {len(self)}), got {index.min()}..{index.max()}")
        index = index.astype(np.int64)
        counts = self.counts[index]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        flat = np.repeat(self.offsets[index] - offsets[:-1], counts) + np.arange(offsets[-1])
        return SamplingMask.adopt(self.ids[flat], offsets, None if self.logprobs is None else self.logprobs[flat])

    def row(self, t: int) -> NDArray[np.int32] | None:
        """The support at position t, ascending; None where it is the whole vocabulary."""
        start, stop = self._bounds(t)
        return self.ids[start:stop] if stop > start else None

    def row_logprobs(self, t: int) -> NDArray[np.float32] | None:
        """The log-probabilities of `row(t)`; None where the row is the whole vocabulary or none were recorded."""
        start, stop = self._bounds(t)
        return self.logprobs[start:stop] if self.logprobs is not None and stop > start else None

    def contains(self, token_ids: ArrayLike) -> NDArray[np.bool_]:
        """[T] bool: whether token t is in its own row. A whole-vocabulary row holds every id >= 0."""
        tokens = _integers("contains", token_ids)
        if tokens.size != len(self):
            raise MaskError(f"contains: {tokens.size} tokens for {len(self)} rows; each token has its row")
        counts = self.counts
        possible = (tokens >= 0) & (tokens < _ID_LIMIT)
        # Rows are ascending, so (row, id) keys ascend over the whole mask.
        first_key = np.arange(len(self)) * _ID_LIMIT
        keys = np.repeat(first_key, counts) + self.ids
        wanted = first_key + np.where(possible, tokens, 0).astype(np.int64)
        at = np.searchsorted(keys, wanted)
        found: NDArray[np.bool_] = possible & (np.append(keys, -1)[at] == wanted)
        whole: NDArray[np.bool_] = (counts == 0) & (tokens >= 0)
        return found | whole

    @property
    def counts(self) -> NDArray[np.int64]:
        """[T] int64: ids stored in each row; 0 marks the whole vocabulary."""
        return np.diff(self.offsets)

    @property
    def token_ids(self) -> list[list[int]]:
        """The rows as nested lists, which is the form vLLM sends."""
        flat, bounds = self.ids.tolist(), self.offsets.tolist()
        return [flat[bounds[t] : bounds[t + 1]] for t in range(len(self))]

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self.ids.nbytes + self.offsets.nbytes + (0 if self.logprobs is None else self.logprobs.nbytes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        if (self.logprobs is None) != (other.logprobs is None):
            return False
        same = np.array_equal(self.offsets, other.offsets) and np.array_equal(self.ids, other.ids)
        if self.logprobs is None or other.logprobs is None:
            return same
        return same and np.array_equal(self.logprobs, other.logprobs)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return SamplingMask.adopt, (self.ids, self.offsets, self.logprobs)  # checked when they were made

    def __copy__(self) -> SamplingMask:
        return self  # nothing of it can change

    def __deepcopy__(self, _memo: object) -> SamplingMask:
        return self

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.object_]:
        """One item of an object array: containers that make arrays of their items keep each mask whole."""
        array = np.empty((), np.object_)
        array[()] = self
        return array

    def __repr__(self) -> str:
        extra = ", with logprobs" if self.logprobs is not None else ""
        return f"SamplingMask({len(self)} rows, {self.ids.size} ids{extra})"

    def _bounds(self, t: int) -> tuple[int, int]:
        if not -len(self) <= t < len(self):
            raise IndexError(f"row {t}: the mask has {len(self)} rows")
        t %= len(self)
        return int(self.offsets[t]), int(self.offsets[t + 1])

    def _check_ids(self, ids: NDArray[np.integer[Any]]) -> None:
        if (outside := np.flatnonzero((ids < 0) | (ids >= _ID_LIMIT))).size:
            raise MaskError(
                f"ids: must be in [0, {_ID_LIMIT}); {ids[outside[0]]} is not, in {_listed(self._rows_of(outside))}"
            )
        falls = ids[1:] <= ids[:-1]
        starts = self.offsets[(self.offsets > 0) & (self.offsets < ids.size)]
        falls[starts - 1] = False  # between two rows
        if (inside := np.flatnonzero(falls) + 1).size:
            raise MaskError(
                f"ids: must ascend without repeats within a row; they do not in {_listed(self._rows_of(inside))}"
            )

    def _checked_logprobs(self, logprobs: ArrayLike) -> NDArray[np.float32]:
        given = _array("logprobs", logprobs)
        if given.size and given.dtype.kind not in "fiu":
            raise MaskError(f"logprobs: must be numbers, got {given.dtype}")
        if given.size != self.ids.size:
            raise MaskError(f"logprobs: {given.size} values for {self.ids.size} ids; each id has its log-probability")
        with np.errstate(over="ignore"):
            values = _frozen(given, np.float32)
        if (bad := np.flatnonzero(~np.isfinite(values))).size:
            raise MaskError(
                f"logprobs: must be finite float32; {given[bad[0]]} is not, in {_listed(self._rows_of(bad))}"
            )
        return values

    def _rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.unique(np.searchsorted(self.offsets, positions, side="right") - 1)


def _flattened(
    name: str, rows: list[Sequence[Any]], dtype: type[np.int64] | type[np.float64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All values of the rows in one array of `dtype`, and the length of each row."""
    plain = {int} if dtype is np.int64 else {int, float}
    if set(map(type, rows)) <= {list, tuple}:
        values = list(chain.from_iterable(rows))
        if set(map(type, values)) <= plain:
            try:
                return np.array(values, dtype), np.fromiter(map(len, rows), np.int64, len(rows))
            except OverflowError:
                pass  # row by row below, which names the row
    arrays = [_row(f"{name} {t}", row, dtype) for t, row in enumerate(rows)]
    counts = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
    return np.concatenate([np.zeros(0, dtype), *arrays]), counts


def _row(name: str, values: Sequence[Any], dtype: type[np.int64] | type[np.float64]) -> NDArray[Any]:
    row = _array(name, values)
    kinds, of_what = ("iu", "integer token ids") if dtype is np.int64 else ("fiu", "numbers")
    if row.size and row.dtype.kind not in kinds:
        raise MaskError(f"{name}: must be a flat list of {of_what}, got {_brief(row.tolist())}")
    if row.size and row.dtype.kind == "u" and row.max() >= _ID_LIMIT:
        raise MaskError(
            f"{name}: ids must be in [0, {_ID_LIMIT}), got {row.max()}"
        )  # int64 could not hold all of uint64
    return row.astype(dtype)


def _check_offsets(offsets: NDArray[np.integer[Any]], num_ids: int) -> None:
    if not offsets.size:
        raise MaskError("offsets: must hold 0 and the end of each row, got none")
    if offsets[0] != 0 or offsets[-1] != num_ids:
        raise MaskError(
            f"offsets: must start at 0 and end at the number of ids, {num_ids}; "
            f"they run from {offsets[0]} to {offsets[-1]}"
        )
    # Compared, not subtracted: a difference can overflow and look positive.
    if (falling := np.flatnonzero(offsets[1:] < offsets[:-1])).size:
        raise MaskError(f"offsets: must not decrease; they do at {_listed(falling)}")


def _check_paired(counts: NDArray[np.int64], value_counts: NDArray[np.int64]) -> None:
    if value_counts.size != counts.size:
        raise MaskError(f"logprobs: {value_counts.size} rows for {counts.size} rows of ids; each row has its own")
    if (unequal := np.flatnonzero(counts != value_counts)).size:
        t = unequal[0]
        raise MaskError(
            f"logprobs: {value_counts[t]} values for {counts[t]} ids; each id has its log-probability; "
            f"counts differ in {_listed(unequal)}"
        )


def _array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise MaskError(f"{name}: must be flat, got {_brief(values)}") from error
    if array.ndim != 1:
        raise MaskError(f"{name}: must be flat, got {array.ndim} dimensions")
    return array


def _integers(name: str, values: ArrayLike) -> NDArray[np.integer[Any]]:
    array = _array(name, values)
    if not array.size:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise MaskError(f"{name}: must be integers, got {array.dtype}")
    return array


def _frozen(array: NDArray[Any], dtype: type[np.int32] | type[np.int64] | type[np.float32]) -> NDArray[Any]:
    """A read-only contiguous array of `dtype`: the same one if it is that already, else a copy."""
    frozen = array.astype(dtype, order="C", copy=array.flags.writeable)
    frozen.flags.writeable = False
    return frozen


def _listed(rows: NDArray[np.int64]) -> str:
    named = ", ".join(str(row) for row in rows[:_MAX_LISTED].tolist())
    more = f" and {rows.size - _MAX_LISTED} more" if rows.size > _MAX_LISTED else ""
    return f"row{'s' if rows.size > 1 else ''} {named}{more}"


def _brief(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 80 else f"{text[:77]}..."
