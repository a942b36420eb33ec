import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from wire_masks import CORNERS

import keepmask.wire.rollouts as rollouts_module
from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout, WeightVersionSpan
from keepmask.wire.rollouts import conform, from_table, schema, to_table
from made_rollouts import made_rollout, made_rollouts


def round_trip(*rollouts):
    return list(from_table(conform(to_table(rollouts))))


def test_every_field_round_trips():
    rollouts = made_rollouts(num_requests=4, n=2)
    assert round_trip(*rollouts) == rollouts


def test_absent_fields_stay_absent():
    bare = Rollout(prompt_token_ids=np.zeros(0, np.int32), token_ids=np.array([4, 5], np.int32))
    full = made_rollout()
    assert round_trip(bare, full, bare) == [bare, full, bare]


@pytest.mark.parametrize("mask", CORNERS.values(), ids=CORNERS)
def test_masks_of_every_shape_round_trip(mask):
    rollout = Rollout(
        prompt_token_ids=np.array([1], np.int32), token_ids=np.zeros(len(mask), np.int32), sampling_mask=mask
    )
    assert round_trip(rollout, made_rollout(), rollout)[::2] == [rollout, rollout]


@pytest.mark.parametrize("seed", [None, 0, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("reason", [None, 2, "\n\n", "2"])
def test_seeds_and_stop_reasons_keep_value_and_type(seed, reason):
    rollout = made_rollout(seed=0) if seed is None else made_rollout()
    rollout = Rollout(
        prompt_token_ids=rollout.prompt_token_ids, token_ids=rollout.token_ids, seed=seed, stop_reason=reason
    )
    (read,) = round_trip(rollout)
    assert (read.seed, read.stop_reason) == (seed, reason)
    assert type(read.stop_reason) is type(reason)


def test_weight_versions_round_trip():
    spans = (WeightVersionSpan(0, 5, "a"), WeightVersionSpan(5, 12, "b"))
    assert round_trip(made_rollout(weight_versions=spans))[0].weight_versions == spans


def test_a_table_has_plain_types_that_other_readers_know():
    types = {field.name: str(field.type) for field in schema()}
    assert types["token_ids"] == "list<element: int32 not null>"
    assert types["sampling_mask"] == "list<element: list<element: int32 not null> not null>"
    assert types["sampling_mask_logprobs"] == "list<element: list<element: float not null> not null>"
    assert to_table(made_rollouts())["token_ids"].to_pylist()[0] == made_rollout().token_ids.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_mask": SamplingMask.from_lists([[1]])},
        {"logprobs": np.zeros(11, np.float32)},
        {"policy_logprobs": np.zeros(13, np.float32)},
        {"policy_full_logprobs": np.zeros(0, np.float32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_field_without_one_entry_a_token_is_refused_on_writing(changes):
    with pytest.raises(MaskError, match=rf"request '0', completion 0: {next(iter(changes))} has \d+ entries for 12"):
        to_table([made_rollout(**changes)])


def changed(name, values, rows=2):
    base = to_table(made_rollouts(num_requests=1, n=rows))
    field = base.schema.field(name)
    nullable = pa.field(name, values.type)
    return base.set_column(base.schema.get_field_index(field.name), nullable, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.full(12, -1, np.int32)}, r"token_ids must be in \[0, 2147483648\), got -1..-1"),
        ({"prompt_token_ids": np.array([3, -2], np.int32)}, r"prompt_token_ids must be in .*, got -2..3"),
        ({"completion_index": -1}, r"completion_index must be in \[0, 2147483648\)"),
        ({"seed": 2**64}, r"seed=18446744073709551616 must be in \[-2\*\*63, 2\*\*64\)"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809"),
        (
            {"logprobs": np.array([0.0] * 5 + [np.nan] * 7, np.float32)},
            "logprobs must be finite; nan is not, at token 5",
        ),
        ({"policy_logprobs": np.full(12, -np.inf, np.float32)}, "policy_logprobs must be finite; -inf is not"),
        ({"weight_versions": ((0, 5, "a"), (6, 12, "b"))}, r"\[0, 5\), \[6, 12\) must follow one another"),
        ({"weight_versions": ((0, 5, "a"), (5, 11, "b"))}, "from token 0 to 12"),
        ({"weight_versions": ((1, 12, "a"),)}, "from token 0 to 12"),
        ({"weight_versions": ((0, 13, "a"), (13, 12, "b"))}, "must not end before they start"),
    ],
)
def test_what_the_format_excludes_is_refused_on_writing_and_on_reading(changes, message, monkeypatch):
    if "weight_versions" in changes:
        changes = {"weight_versions": tuple(WeightVersionSpan(*span) for span in changes["weight_versions"])}
    wrong = dataclasses.replace(made_rollout(), **changes)
    with pytest.raises(MaskError, match=f"request '0', completion .*: .*{message}"):
        to_table([wrong])
    monkeypatch.setattr(rollouts_module, "_check", lambda _rollout: None)  # another writer
    table = to_table([made_rollout("good"), wrong])
    monkeypatch.undo()
    with pytest.raises(MaskError, match=f"row 1: request '0', completion .*: .*{message}"):
        list(from_table(conform(table)))


def test_nested_json_in_a_column_is_refused_not_overflown():
    for name in ("sampling_params", "stop_reason", "extra"):
        deep = pa.array(["{}", "[" * 100_000])
        with pytest.raises(MaskError, match=r"row 1: JSON nested too deeply|row 0: stop_reason"):
            list(from_table(conform(changed(name, deep))))


def test_what_came_with_the_prompt_round_trips():
    extra = {"answer": 4, "source": {"name": "gsm8k", "rows": [1, 2]}, "text": "\u2028"}
    assert round_trip(made_rollout(extra=extra), made_rollout("1"))[0].extra == extra
    older = to_table(made_rollouts()).drop_columns(["extra"])
    assert list(from_table(conform(older))) == made_rollouts()


BAD_TABLES = {
    "rows of the mask missing": (
        changed("sampling_mask", pa.array([[[1]], [[2]]], pa.list_(pa.list_(pa.int32())))),
        "row 0: ",
    ),
    "null id": (
        changed("token_ids", pa.array([[1, None], []], pa.list_(pa.int32()))),
        "no nulls",
    ),
    "null row of a mask": (
        changed("sampling_mask", pa.array([[None], []], pa.list_(pa.list_(pa.int32())))),
        "no nulls",
    ),
    "unknown finish reason": (changed("finish_reason", pa.array(["stop", "tired"])), "row 1: finish_reason='tired'"),
    "params that are no object": (changed("sampling_params", pa.array(["[]", "{}"])), "row 0: sampling_params"),
    "params that are no JSON": (changed("sampling_params", pa.array(["{}", "{"])), "row 1: "),
    "text for ids": (changed("token_ids", pa.array(["a", "b"])), "not of its type"),
    "64-bit ids beyond 32": (changed("token_ids", pa.array([[2**40], []], pa.list_(pa.int64()))), "not of its type"),
    "a null request id": (changed("request_id", pa.array(["a", None])), "not of its type"),
    "no such column": (to_table(made_rollouts()).drop_columns(["seed", "text"]), "no columns text, seed"),
}


@pytest.mark.parametrize(("table", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_table_that_is_not_of_rollouts_is_refused(table, message):
    with pytest.raises(MaskError, match=message):
        list(from_table(conform(table)))


def test_wider_types_and_more_columns_are_read():
    table = to_table(made_rollouts(num_requests=1, n=2))
    wide = table["token_ids"].cast(pa.list_(pa.int64()))
    table = table.set_column(table.schema.get_field_index("token_ids"), "token_ids", wide)
    table = table.append_column("reward", pa.array([1.0, 0.0]))
    assert list(from_table(conform(table))) == made_rollouts(num_requests=1, n=2)
