"""`SamplingMask`: the supports of one completion, one row a generated token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError

__all__ = ["SamplingMask"]

_MAX_LISTED = 8  # offending rows named in one error; the rest are counted


class SamplingMask:
    """All supports of one completion, in CSR form: row t is `ids[offsets[t]:offsets[t + 1]]`.

    A row holds the ids that could be drawn at output position t, ascending and distinct. An empty row stands for the
    whole vocabulary (no filter and no ban applied there), which `row` returns as None.

    ids: [N] int32. offsets: [T+1] int64. logprobs: [N] float32, in nats, or None: log-probability of each id under
    the distribution the draw used, in the order of `ids`.

    The arrays are checked at construction and read-only afterwards. Raises MaskError naming the offending rows.
    """

    __slots__ = ("ids", "logprobs", "offsets")

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None

    def __init__(self, ids: ArrayLike, offsets: ArrayLike, logprobs: ArrayLike | None = None) -> None:
        self.ids = _frozen(ids, np.int32, "ids")
        self.offsets = _frozen(offsets, np.int64, "offsets")
        self.logprobs = None if logprobs is None else _frozen(logprobs, np.float32, "logprobs")
        self._check()

    @classmethod
    def from_lists(
        cls, token_ids: Iterable[Sequence[int]], logprobs: Iterable[Sequence[float]] | None = None
    ) -> SamplingMask:
        """The mask with these rows; ids may come in any order, and `logprobs` rows follow theirs.

        Raises MaskError for an id given twice in a row, a negative id, or logprobs of other lengths than the ids.
        """
        rows = [_row(t, row) for t, row in enumerate(token_ids)]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([row.size for row in rows], out=offsets[1:])
        ids = np.concatenate(rows) if offsets[-1] else np.zeros(0, np.int64)
        order = np.lexsort((ids, np.repeat(np.arange(len(rows)), np.diff(offsets))))
        if logprobs is None:
            return cls(ids[order], offsets)
        values = [np.asarray(row, np.float32) for row in logprobs]
        lengths = [value.shape for value in values]
        if lengths != [row.shape for row in rows]:
            raise MaskError("logprobs: needs one value for each id of each row; got rows of other lengths")
        flat = np.concatenate(values) if offsets[-1] else np.zeros(0, np.float32)
        return cls(ids[order], offsets, flat[order])

    @classmethod
    def concat(cls, masks: Iterable[SamplingMask]) -> SamplingMask:
        """The rows of all masks, one after the other. Raises MaskError when only some of them carry logprobs."""
        parts = list(masks)
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
        return cls(np.concatenate([part.ids for part in parts]), offsets, logprobs)

    def __len__(self) -> int:
        """Number of rows, one a generated token."""
        return self.offsets.size - 1

    def __getitem__(self, rows: slice) -> SamplingMask:
        """The mask of a contiguous run of rows (step 1)."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise MaskError(f"slice step {step}: rows are taken with step 1; use `take` for any other selection")
        stop = max(start, stop)
        low, high = self.offsets[start], self.offsets[stop]
        logprobs = None if self.logprobs is None else self.logprobs[low:high]
        return SamplingMask(self.ids[low:high], self.offsets[start : stop + 1] - low, logprobs)

    def take(self, rows: ArrayLike) -> SamplingMask:
        """The mask made of these rows, in this order."""
        index = np.asarray(rows, np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise MaskError(f"take: row numbers must be in [0, {len(self)}), got {index.min()}..{index.max()}")
        counts = self.counts[index]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        flat = np.repeat(self.offsets[index] - offsets[:-1], counts) + np.arange(offsets[-1])
        return SamplingMask(self.ids[flat], offsets, None if self.logprobs is None else self.logprobs[flat])

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
        tokens = np.asarray(token_ids, np.int64).reshape(-1)
        if tokens.size != len(self):
            raise MaskError(f"contains: {tokens.size} tokens for {len(self)} rows; each token has its row")
        if not tokens.size:
            return np.zeros(0, np.bool_)
        counts = self.counts
        # Rows are ascending, so (row, id) keys ascend over the whole mask; 2**31 bounds an id.
        keys = np.repeat(np.arange(len(self)) << 31, counts) + self.ids
        wanted = (np.arange(len(self)) << 31) + np.clip(tokens, 0, 2**31 - 1)
        at = np.searchsorted(keys, wanted)
        found = np.zeros(tokens.size, np.bool_)
        inside = at < keys.size
        found[inside] = keys[at[inside]] == wanted[inside]
        return (found | (counts == 0)) & (tokens >= 0)

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

    def __repr__(self) -> str:
        extra = ", with logprobs" if self.logprobs is not None else ""
        return f"SamplingMask({len(self)} rows, {self.ids.size} ids{extra})"

    def _bounds(self, t: int) -> tuple[int, int]:
        if not -len(self) <= t < len(self):
            raise IndexError(f"row {t}: the mask has {len(self)} rows")
        t %= len(self)
        return int(self.offsets[t]), int(self.offsets[t + 1])

    def _check(self) -> None:
        ids, offsets = self.ids, self.offsets
        if not offsets.size or offsets[0] != 0 or offsets[-1] != ids.size:
            raise MaskError(
                f"offsets: must start at 0 and end at the number of ids, {ids.size}; "
                f"got {_brief(offsets.tolist()) if offsets.size else 'none'}"
            )
        if (falling := np.flatnonzero(np.diff(offsets) < 0)).size:
            raise MaskError(f"offsets: must not decrease; they do at {_listed(falling)}")
        if self.logprobs is not None and self.logprobs.size != ids.size:
            raise MaskError(
                f"logprobs: {self.logprobs.size} values for {ids.size} ids; each id has its log-probability"
            )
        if (negative := np.flatnonzero(ids < 0)).size:
            raise MaskError(f"ids: must be >= 0; negative in {_listed(self._rows_of(negative))}")
        falls = np.flatnonzero(np.diff(ids) <= 0) + 1
        if (inside := falls[~np.isin(falls, offsets)]).size:
            raise MaskError(
                f"ids: must ascend without repeats within a row; they do not in {_listed(self._rows_of(inside))}"
            )

    def _rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.unique(np.searchsorted(self.offsets, positions, side="right") - 1)


def _row(t: int, values: Sequence[int]) -> NDArray[np.integer[Any]]:
    row = np.asarray(values)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise MaskError(f"row {t}: a row is a flat list of integer token ids, got {_brief(row.tolist())}")
    return row if row.size else np.zeros(0, np.int64)


def _frozen(values: ArrayLike, dtype: type[np.generic], name: str) -> NDArray[Any]:
    """A read-only flat array of `dtype` with the same values; refuses values the dtype cannot hold."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise MaskError(f"{name}: must be one flat array, got {array.ndim} dimensions")
    if not array.size:
        array = array.astype(dtype)
    if np.issubdtype(dtype, np.integer) and array.size:
        if array.dtype.kind not in "iu":
            raise MaskError(f"{name}: must be integers, got {array.dtype}")
        limit = np.iinfo(dtype).max
        if array.dtype.itemsize >= np.dtype(dtype).itemsize and (array.max() > limit or array.min() < -limit):
            raise MaskError(f"{name}: values must fit in {np.dtype(dtype)}, got {array.min()}..{array.max()}")
    converted = np.ascontiguousarray(array, dtype)
    if converted is values or converted.base is not None:
        converted = converted.view()
    converted.flags.writeable = False
    return converted


def _listed(rows: NDArray[np.int64]) -> str:
    named = ", ".join(str(row) for row in rows[:_MAX_LISTED].tolist())
    more = f" and {rows.size - _MAX_LISTED} more" if rows.size > _MAX_LISTED else ""
    return f"row{'s' if rows.size > 1 else ''} {named}{more}"


def _brief(values: object) -> str:
    text = repr(values)
    return text if len(text) <= 80 else f"{text[:77]}..."
