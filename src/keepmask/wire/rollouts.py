"""Rollouts as an Arrow table, one row a completion: the columns of a rollout file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.outputs import FinishReason, Rollout, WeightVersionSpan
from keepmask.wire.arrow import load_pyarrow

__all__ = ["conform", "from_table", "schema", "to_table"]

_EXTRA = "extra"
_PER_TOKEN = ("sampling_mask", "logprobs", "policy_logprobs", "policy_full_logprobs")


def schema() -> Any:
    """The columns of a rollout file, in order (docs/format.md)."""
    pa = load_pyarrow()

    def list_of(item: Any) -> Any:
        return pa.list_(pa.field("element", item, nullable=False))

    span = [("start", pa.int32()), ("end", pa.int32()), ("version", pa.string())]
    return pa.schema(
        [
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("completion_index", pa.int32(), nullable=False),
            pa.field("prompt", pa.string()),
            pa.field("prompt_token_ids", list_of(pa.int32()), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("token_ids", list_of(pa.int32()), nullable=False),
            pa.field("logprobs", list_of(pa.float32())),
            pa.field("sampling_mask", list_of(list_of(pa.int32()))),
            pa.field("sampling_mask_logprobs", list_of(list_of(pa.float32()))),
            pa.field("sampling_params", pa.string(), nullable=False),
            pa.field("seed", pa.decimal128(20, 0)),  # seeds reach from -2**63 to 2**64 - 1
            pa.field("finish_reason", pa.string()),
            pa.field("stop_reason", pa.string()),
            pa.field("weight_versions", list_of(pa.struct([pa.field(*part, nullable=False) for part in span]))),
            pa.field("policy_logprobs", list_of(pa.float32())),
            pa.field("policy_full_logprobs", list_of(pa.float32())),
            pa.field(_EXTRA, pa.string()),
        ]
    )


def to_table(rollouts: Sequence[Rollout]) -> Any:
    """The rollouts as one Arrow table. Raises MaskError for what docs/format.md excludes, naming the rollout."""
    pa = load_pyarrow()
    for rollout in rollouts:
        _check(rollout)
    masks = [rollout.sampling_mask for rollout in rollouts]
    columns = {
        "request_id": [rollout.request_id for rollout in rollouts],
        "completion_index": [rollout.completion_index for rollout in rollouts],
        "prompt": [rollout.prompt for rollout in rollouts],
        "prompt_token_ids": _lists([rollout.prompt_token_ids for rollout in rollouts], np.int32),
        "text": [rollout.text for rollout in rollouts],
        "token_ids": _lists([rollout.token_ids for rollout in rollouts], np.int32),
        "logprobs": _lists([rollout.logprobs for rollout in rollouts], np.float32),
        "sampling_mask": _nested_lists(masks, [None if mask is None else mask.ids for mask in masks], np.int32),
        "sampling_mask_logprobs": _nested_lists(
            masks, [None if mask is None else mask.logprobs for mask in masks], np.float32
        ),
        "sampling_params": [json.dumps(dict(rollout.sampling_params), sort_keys=True) for rollout in rollouts],
        "seed": [None if rollout.seed is None else Decimal(rollout.seed) for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "stop_reason": [
            None if rollout.stop_reason is None else json.dumps(rollout.stop_reason) for rollout in rollouts
        ],
        "weight_versions": [[span._asdict() for span in rollout.weight_versions] for rollout in rollouts],
        "policy_logprobs": _lists([rollout.policy_logprobs for rollout in rollouts], np.float32),
        "policy_full_logprobs": _lists([rollout.policy_full_logprobs for rollout in rollouts], np.float32),
        _EXTRA: [json.dumps(dict(rollout.extra)) if rollout.extra else None for rollout in rollouts],
    }
    target = schema()
    return pa.table([_column(columns[field.name], field.type) for field in target], schema=target)


def conform(table: Any) -> Any:
    """The table with the columns of `schema` and no others; raises MaskError when one is absent or not of its type."""
    target = schema()
    if _EXTRA not in table.schema.names:
        table = table.append_column(target.field(_EXTRA), load_pyarrow().nulls(len(table), target.field(_EXTRA).type))
    if missing := [name for name in target.names if name not in table.schema.names]:
        raise MaskError(f"no column{'s' * (len(missing) > 1)} {', '.join(missing)}")
    try:
        conforming = table.select(target.names).cast(target)
        conforming.validate(full=True)
    except (load_pyarrow().ArrowException, ValueError) as error:
        raise MaskError(f"a column is not of its type: {str(error)[:200]}") from None
    return conforming


def from_table(table: Any) -> Iterator[Rollout]:
    """The rollouts of a table that `conform` returned, in order.

    Raises MaskError naming the row for a value that docs/format.md excludes.
    """
    row = 0
    for batch in table.to_batches():
        columns = {name: _values(batch.column(name)) for name in batch.schema.names}
        for i in range(batch.num_rows):
            try:
                yield _rollout({name: values[i] for name, values in columns.items()})
            except RecursionError:
                raise MaskError(f"row {row + i}: JSON nested too deeply") from None
            except (MaskError, ValueError, TypeError) as error:
                raise MaskError(f"row {row + i}: {error}") from None
        row += batch.num_rows


def _rollout(values: dict[str, Any]) -> Rollout:
    rows, mask_logprobs = values.pop("sampling_mask"), values.pop("sampling_mask_logprobs")
    if rows is None and mask_logprobs is not None:
        raise MaskError("sampling_mask_logprobs without sampling_mask")
    if (reason := values["finish_reason"]) is not None and reason not in get_args(FinishReason):
        raise MaskError(f"finish_reason={reason!r}: must be one of {', '.join(get_args(FinishReason))}")
    values["sampling_mask"] = None if rows is None else _mask(rows, mask_logprobs)
    values["sampling_params"] = _params(values["sampling_params"])
    values[_EXTRA] = {} if values[_EXTRA] is None else _object(_EXTRA, values[_EXTRA])
    values["seed"] = None if values["seed"] is None else int(values["seed"])
    values["stop_reason"] = None if values["stop_reason"] is None else json.loads(values["stop_reason"])
    if values["stop_reason"] is not None and type(values["stop_reason"]) not in (int, str):
        raise MaskError("stop_reason: must be a JSON number or string")
    values["weight_versions"] = tuple(WeightVersionSpan(**span) for span in values["weight_versions"] or ())
    rollout = Rollout(**values)
    _check(rollout)
    return rollout


def _object(name: str, text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise MaskError(f"{name}: must be a JSON object")
    return value


def _params(text: str) -> Mapping[str, Any]:
    params = _object("sampling_params", text)
    if isinstance(bias := params.get("logit_bias"), dict):  # JSON spells integer keys as strings
        params["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
    return params


def _mask(rows: tuple[Any, Any], logprobs: tuple[Any, Any] | None) -> SamplingMask:
    ids, offsets = rows
    if logprobs is None:
        return SamplingMask(ids, offsets)
    if not np.array_equal(logprobs[1], offsets):
        raise MaskError("sampling_mask_logprobs: needs one value for each id of each row of sampling_mask")
    return SamplingMask(ids, offsets, logprobs[0])


def _check(rollout: Rollout) -> None:
    """Raise MaskError naming the rollout, for what docs/format.md excludes beyond types."""
    if problem := _problem(rollout):
        raise MaskError(f"request {rollout.request_id!r}, completion {rollout.completion_index}: {problem}")


def _problem(rollout: Rollout) -> str | None:
    expected = rollout.token_ids.size
    for name in _PER_TOKEN:
        values = getattr(rollout, name)
        if values is not None and len(values) != expected:
            return f"{name} has {len(values)} entries for {expected} tokens"
        if isinstance(values, np.ndarray) and (bad := np.flatnonzero(~np.isfinite(values))).size:
            return f"{name} must be finite; {values[bad[0]]} is not, at token {bad[0]}"
    for name in ("prompt_token_ids", "token_ids"):
        ids = getattr(rollout, name)
        if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
            return f"{name} must be in [0, 2147483648), got {ids.min()}..{ids.max()}"
    if not 0 <= rollout.completion_index < 2**31:
        return "completion_index must be in [0, 2147483648)"
    if rollout.seed is not None and not -(2**63) <= rollout.seed < 2**64:
        return f"seed={rollout.seed} must be in [-2**63, 2**64)"
    spans = rollout.weight_versions
    if spans and [0, *(span.end for span in spans)] != [*(span.start for span in spans), expected]:
        return f"weight_versions {_brief(spans)} must follow one another from token 0 to {expected}"
    if any(span.end < span.start for span in spans):
        return f"weight_versions {_brief(spans)} must not end before they start"
    return None


def _brief(spans: Sequence[WeightVersionSpan]) -> str:
    return ", ".join(f"[{span.start}, {span.end})" for span in spans[:4]) + (", ..." if len(spans) > 4 else "")


def _column(values: Any, dtype: Any) -> Any:
    pa = load_pyarrow()
    return pa.array(values, dtype) if isinstance(values, list) else values.cast(dtype)


def _lists(values: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> Any:
    """A list column from one flat array, or None, a row."""
    pa = load_pyarrow()
    flat = pa.array(_joined(values, dtype))
    return pa.ListArray.from_arrays(_offsets(_sizes(values)), flat, mask=_nulls(values))


def _nested_lists(
    masks: Sequence[SamplingMask | None], values: Sequence[NDArray[Any] | None], dtype: type[np.generic]
) -> Any:
    """A list<list> column: the rows of each mask over its `values`; null where it has none."""
    pa = load_pyarrow()
    counts = [None if value is None or mask is None else mask.counts for mask, value in zip(masks, values, strict=True)]
    rows = pa.ListArray.from_arrays(_offsets(_joined(counts, np.int64)), pa.array(_joined(values, dtype)))
    return pa.ListArray.from_arrays(_offsets(_sizes(counts)), rows, mask=_nulls(counts))


def _joined(values: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> NDArray[Any]:
    present = [value for value in values if value is not None]
    return np.concatenate(present).astype(dtype, copy=False) if present else np.zeros(0, dtype)


def _offsets(sizes: Sequence[int] | NDArray[np.int64]) -> Any:
    """List offsets, from 0, of lists of these sizes."""
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise MaskError(f"a table of {ends[-1]} values in one column: at most {2**31 - 1} fit; write fewer at a time")
    return load_pyarrow().array(ends.astype(np.int32))


def _sizes(values: Sequence[NDArray[Any] | None]) -> list[int]:
    return [0 if value is None else value.size for value in values]


def _nulls(values: Sequence[NDArray[Any] | None]) -> Any:
    return load_pyarrow().array([value is None for value in values], load_pyarrow().bool_())


def _values(column: Any) -> list[Any]:
    """A column's rows: numpy arrays of a list column, (values, offsets) of a nested one, else Python values."""
    pa = load_pyarrow()
    if not pa.types.is_list(column.type) or pa.types.is_struct(column.type.value_type):
        values: list[Any] = column.to_pylist()
        return values
    take = _taker(column.values)
    present, bounds = column.is_valid().to_pylist(), column.offsets.to_pylist()
    return [take(bounds[i], bounds[i + 1]) if present[i] else None for i in range(len(column))]


def _taker(values: Any) -> Callable[[int, int], Any]:
    """A function giving elements [start, stop) of the values of a list column."""
    if values.null_count:
        raise MaskError("lists must hold no nulls")
    if not load_pyarrow().types.is_list(values.type):
        flat: NDArray[Any] = values.to_numpy()
        return lambda start, stop: flat[start:stop]
    take, ends = _taker(values.values), values.offsets.to_numpy().astype(np.int64)

    def rows(start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        own = ends[start : stop + 1]
        return take(own[0], own[-1]), own - own[0]

    return rows
