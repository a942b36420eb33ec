"""Nested lists, `[[187, 326], [42]]`: the form vLLM sends, one inner list a generated token."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["from_lists", "logprob_lists"]

_FLOAT32_DIGITS = 9  # significant decimal digits that name a float32 uniquely
_MAX_SCALE = 22  # powers of ten up to 10**22 are exact in float64


def from_lists(
    rows: Any, logprobs: Any = None, *, limits: Limits = DEFAULT_LIMITS, name: str = "sampling_mask"
) -> SamplingMask:
    """The mask of parsed JSON: `rows` a list of lists of ids, `logprobs` a list of lists of numbers, or None.

    Ids may come in any order within a row; the logprobs follow them. An empty list is the whole vocabulary. Raises
    MaskError for anything else than lists of integers (of finite numbers), other lengths, repeated ids, or a mask
    beyond the limits. name: of the field, for errors; its log-probabilities are `<name>_logprobs`.
    """
    counts = _counts(rows, name)
    limits.check(num_rows=counts.size, num_ids=int(counts.sum()))
    flat = list(chain.from_iterable(rows))
    if not set(map(type, flat)) <= {int}:
        raise MaskError(f"{name}: ids must be integers, {_first_other(flat, (int,))}")
    try:
        ids = np.array(flat, np.int64)
    except OverflowError:
        raise MaskError(f"{name}: ids must be in [0, 2147483648)") from None
    offsets = np.concatenate([[0], np.cumsum(counts)])
    values = None if logprobs is None else _logprobs(logprobs, counts, f"{name}_logprobs")
    order = _ascending_order(ids, offsets)
    if order is not None:
        ids, values = ids[order], None if values is None else values[order]
    try:
        return SamplingMask(ids, offsets, values)
    except MaskError as error:
        raise MaskError(f"{name}: {error}") from None


def logprob_lists(mask: SamplingMask) -> list[list[float]] | None:
    """The log-probabilities as nested lists, in the shortest decimals that give the same float32; None without any."""
    if mask.logprobs is None:
        return None
    flat, bounds = _short_floats(mask.logprobs), mask.offsets.tolist()
    return [flat[bounds[t] : bounds[t + 1]] for t in range(len(mask))]


def _counts(rows: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(rows, list):
        raise MaskError(f"{name}: must be a list with one list a token, got {type(rows).__name__}")
    if not set(map(type, rows)) <= {list}:
        raise MaskError(f"{name}: each row must be a list, {_first_other(rows, (list,))}")
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _logprobs(rows: Any, counts: NDArray[np.int64], name: str) -> NDArray[np.float64]:
    given = _counts(rows, name)
    if not np.array_equal(given, counts):
        raise MaskError(f"{name}: needs one value for each id of each row")
    flat = list(chain.from_iterable(rows))
    if not set(map(type, flat)) <= {int, float}:
        raise MaskError(f"{name}: must be numbers, {_first_other(flat, (int, float))}")
    try:
        return np.array(flat, np.float64)
    except OverflowError:
        raise MaskError(f"{name}: must be finite") from None


def _ascending_order(ids: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The order that sorts each row; None where every row ascends already."""
    falls = np.flatnonzero(np.diff(ids) < 0) + 1
    if not falls.size or np.isin(falls, offsets).all():
        return None
    return np.lexsort((ids, np.repeat(np.arange(offsets.size - 1), np.diff(offsets))))


def _short_floats(values: NDArray[np.float32]) -> list[float]:
    """Float64s whose shortest decimals have at most nine digits and that round to the same float32s."""
    exact = values.astype(np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log10(np.abs(exact)))
    scale = 10.0 ** np.clip(_FLOAT32_DIGITS - 1 - exponent, 0, _MAX_SCALE)
    short = np.round(exact * scale) / scale
    short = np.where(short.astype(np.float32) == values, short, exact)
    flat: list[float] = short.tolist()
    return flat


def _first_other(values: list[Any], types: tuple[type, ...]) -> str:
    value = next(value for value in values if type(value) not in types)
    text = repr(value)
    return f"got {text if len(text) <= 40 else text[:37] + '...'}"
