import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask

MAX_ID = 2**31 - 1

token_ids = st.one_of(st.integers(0, 30), st.integers(0, MAX_ID))
supports = st.lists(st.lists(token_ids, unique=True, max_size=12), max_size=12)


def value_of(token_id):
    """A log-prob that tells which id it belongs to."""
    return float(np.float32(-1 - token_id % 1000))


def values(rows):
    return [[value_of(token_id) for token_id in row] for row in rows]


def as_dicts(mask):
    """Each row as {id: log-prob}; an empty one stands for the whole vocabulary."""
    found = []
    for t in range(len(mask)):
        ids, logprobs = mask.row(t), mask.row_logprobs(t)
        found.append({} if ids is None else dict(zip(ids.tolist(), logprobs.tolist(), strict=True)))
    return found


def mask_of(rows, with_logprobs=False):
    return SamplingMask.from_lists(rows, values(rows) if with_logprobs else None)


# ---------------------------------------------------------------- laws


@given(supports)
def test_lists_round_trip_sorted(rows):
    mask = mask_of(rows)
    assert mask.token_ids == [sorted(row) for row in rows]
    assert SamplingMask.from_lists(mask.token_ids) == mask
    assert mask.counts.tolist() == [len(row) for row in rows]
    assert len(mask) == len(rows)


@given(supports)
def test_logprobs_follow_their_ids(rows):
    mask = mask_of(rows, with_logprobs=True)
    assert as_dicts(mask) == [{token_id: value_of(token_id) for token_id in row} for row in rows]


@given(supports, st.booleans())
def test_numpy_rows_make_the_same_mask_as_lists(rows, with_logprobs):
    arrays = [np.array(row, np.int64) for row in rows]
    logprobs = [np.array(row, np.float32) for row in values(rows)] if with_logprobs else None
    assert SamplingMask.from_lists(arrays, logprobs) == mask_of(rows, with_logprobs)
    assert SamplingMask.from_lists(iter(rows), iter(values(rows)) if with_logprobs else None) == mask_of(
        rows, with_logprobs
    )


@given(supports, st.data(), st.booleans())
def test_slices_are_list_slices_and_concat_puts_them_together_again(rows, data, with_logprobs):
    mask = mask_of(rows, with_logprobs)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = list(pairwise([0, *cuts, len(rows)]))
    parts = [mask[a:b] for a, b in bounds]
    assert parts == [mask_of(rows[a:b], with_logprobs) for a, b in bounds]
    assert SamplingMask.concat(parts) == mask


@given(supports, st.slices(12))
def test_slicing_is_that_of_lists(rows, cut):
    mask = mask_of(rows)
    if cut.step not in (None, 1):
        with pytest.raises(MaskError, match="take"):
            mask[cut]
        return
    assert mask[cut].token_ids == mask.token_ids[cut]


@given(supports.filter(len), st.data(), st.booleans())
def test_take_picks_rows_in_the_order_given(rows, data, with_logprobs):
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20))
    taken = mask_of(rows, with_logprobs).take(picked)
    assert taken == mask_of([rows[t] for t in picked], with_logprobs)


@given(supports, st.data())
def test_contains_is_set_membership(rows, data):
    member = [st.sampled_from(row) if row else st.nothing() for row in rows]
    tokens = [data.draw(st.one_of(inside, st.integers(-3, 33), st.integers(-(2**62), 2**62))) for inside in member]
    expected = [token >= 0 if not row else token in set(row) for token, row in zip(tokens, rows, strict=True)]
    got = mask_of(rows).contains(tokens)
    assert got.dtype == np.bool_
    assert got.tolist() == expected


@given(supports, st.booleans())
def test_copies_are_equal_and_read_only(rows, with_logprobs):
    mask = mask_of(rows, with_logprobs)
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other == mask
        assert not other.ids.flags.writeable


def test_object_arrays_hold_masks_whole(monkeypatch):
    masks = [mask_of([[1], [2, 3]]), mask_of([[4], [5]], with_logprobs=True), mask_of([])]
    for array in (np.array(masks, object), np.array(masks), np.fromiter(masks, object, 3)):
        assert array.shape == (3,)
        assert array.dtype == object
        assert all(held is mask for held, mask in zip(array, masks, strict=True))
    array = np.array(masks, object)
    chunks = np.concatenate([np.repeat(part, 2) for part in np.array_split(array, 2)])  # as DataProto does
    assert chunks.tolist() == [masks[0], masks[0], masks[1], masks[1], masks[2], masks[2]]
    monkeypatch.setattr(SamplingMask, "__init__", None)  # nothing is checked again
    assert pickle.loads(pickle.dumps(array)).tolist() == masks
    assert copy.deepcopy(array).tolist() == masks
    assert masks[0][1:].token_ids == [[2, 3]]


# ---------------------------------------------------------------- rows


def test_an_empty_row_is_the_whole_vocabulary():
    mask = SamplingMask.from_lists([[3, 1], [], [0]], [[-2.0, -1.0], [], [0.0]])
    assert mask.row(0).tolist() == [1, 3]
    assert mask.row_logprobs(0).tolist() == [-1.0, -2.0]
    assert mask.row(1) is None
    assert mask.row_logprobs(1) is None
    assert mask.row(-1).tolist() == [0]
    assert SamplingMask.from_lists([[5]]).row_logprobs(0) is None
    for t in (3, -4):
        with pytest.raises(IndexError, match="3 rows"):
            mask.row(t)


def test_arrays_have_the_documented_types():
    mask = SamplingMask.from_lists([[5, 2], [], [9]], [[-0.5, -1.5], [], [0]])
    assert (mask.ids.dtype, mask.offsets.dtype, mask.logprobs.dtype) == (np.int32, np.int64, np.float32)
    assert mask.offsets.tolist() == [0, 2, 2, 3]
    assert mask.nbytes == 3 * 4 + 4 * 8 + 3 * 4
    assert repr(mask) == "SamplingMask(3 rows, 3 ids, with logprobs)"


def test_masks_without_rows():
    empty = SamplingMask([], [0])
    assert len(empty) == 0
    assert empty.token_ids == []
    assert empty.contains([]).tolist() == []
    assert SamplingMask.from_lists([]) == empty == SamplingMask.concat([]) == empty[0:0] == empty.take([])
    some = mask_of([[1], [2, 3]], with_logprobs=True)
    assert SamplingMask.concat([empty, some, empty]) == some
    assert SamplingMask.concat([some[:0]]).logprobs is not None


def test_masks_compare_by_value_and_are_not_hashable():
    rows = [[1, 2], [3]]
    assert mask_of(rows) != mask_of([[1, 2, 3], []])
    assert mask_of(rows) != mask_of(rows, with_logprobs=True)
    assert SamplingMask.from_lists([[1]], [[-1.0]]) != SamplingMask.from_lists([[1]], [[-2.0]])
    assert mask_of(rows) != rows
    with pytest.raises(TypeError, match="unhashable"):
        hash(mask_of(rows))


def test_the_largest_id_is_held_and_found():
    mask = SamplingMask.from_lists([[MAX_ID, 0]])
    assert mask.row(0).tolist() == [0, MAX_ID]
    assert mask.contains([MAX_ID]).tolist() == [True]
    assert mask.contains([2**31]).tolist() == [False]
    assert mask.contains(np.array([2**63], np.uint64)).tolist() == [False]


# ---------------------------------------------------------------- whose arrays


def test_arrays_are_read_only():
    mask = mask_of([[1, 2]], with_logprobs=True)
    for array in (mask.ids, mask.offsets, mask.logprobs, mask.row(0), mask[0:1].ids, mask.take([0]).ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_callers_arrays_stay_writable_and_changing_them_does_not_change_the_mask():
    whole = np.arange(10, dtype=np.int32)
    ids, offsets, logprobs = whole[2:5], np.array([0, 1, 3]), np.array([-1, -2, -3], np.float32)
    mask = SamplingMask(ids, offsets, logprobs)
    for array in (ids, offsets, logprobs):
        assert array.flags.writeable
    whole[:], offsets[:], logprobs[:] = 0, 0, 0
    assert mask.token_ids == [[2], [3, 4]]
    assert mask.logprobs.tolist() == [-1, -2, -3]


def test_read_only_arrays_are_shared_not_copied():
    ids = np.arange(5, dtype=np.int32)
    ids.flags.writeable = False
    mask = SamplingMask(ids, [0, 2, 5])
    assert np.shares_memory(mask.ids, ids)
    assert np.shares_memory(mask[1:].ids, mask.ids)


def test_strided_and_other_integer_types_are_taken():
    for dtype in (np.uint8, np.int16, np.uint32, np.int64, np.uint64):
        mask = SamplingMask(np.arange(10).astype(dtype)[::2], np.array([0, 2, 5], dtype))
        assert mask.token_ids == [[0, 2], [4, 6, 8]]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "offsets", "logprobs", "says"),
    [
        ([1, 2], [], None, "offsets: must hold 0 and the end of each row, got none"),
        ([1, 2], [1, 2], None, "start at 0 and end at the number of ids, 2; they run from 1 to 2"),
        ([1, 2], [0, 3], None, "they run from 0 to 3"),
        ([1, 2, 3], [0, 2, 1, 3], None, "must not decrease; they do at row 1"),
        ([], [0, 2**63 - 1, -(2**63) + 1, 0], None, "must not decrease; they do at row 1"),
        ([1, -1, 2, -2], [0, 1, 2, 4], None, r"must be in \[0, 2147483648\); -1 is not, in rows 1, 2"),
        ([0, 2**31], [0, 1, 2], None, r"must be in \[0, 2147483648\); 2147483648 is not, in row 1"),
        (np.array([2**63], np.uint64), [0, 1], None, "9223372036854775808 is not, in row 0"),
        ([1, 2, 2, 5, 4], [0, 1, 3, 5], None, "ascend without repeats within a row; they do not in rows 1, 2"),
        ([1], [0, 1], [-1.0, -2.0], "logprobs: 2 values for 1 ids"),
        ([1, 2], [0, 1, 2], [-1.0, np.nan], "logprobs: must be finite float32; nan is not, in row 1"),
        ([1, 2], [0, 1, 2], [-np.inf, 0], "-inf is not, in row 0"),
        ([1], [0, 1], [-1e300], "-1e.300 is not, in row 0"),
        ([1], [0, 1], ["-1"], "logprobs: must be numbers"),
        ([1], [0, 1], [1j], "logprobs: must be numbers"),
        ([1.0], [0, 1], None, "ids: must be integers, got float64"),
        ([True], [0, 1], None, "ids: must be integers, got bool"),
        ([1], [0.0, 1.0], None, "offsets: must be integers, got float64"),
        ([[1]], [0, 1], None, "ids: must be flat, got 2 dimensions"),
        ([[1], [1, 2]], [0, 1], None, "ids: must be flat"),
        (None, [0], None, "ids: must be flat, got 0 dimensions"),
        ([1], 1, None, "offsets: must be flat"),
    ],
)
def test_arrays_that_do_not_add_up_are_refused_naming_their_rows(ids, offsets, logprobs, says):
    with pytest.raises(MaskError, match=says):
        SamplingMask(ids, offsets, logprobs)


@pytest.mark.parametrize(
    ("rows", "logprobs", "says"),
    [
        ([[1], [3, 3], [2], [4, 5, 4]], None, "they do not in rows 1, 3"),
        ([[1], [-3]], None, "-3 is not, in row 1"),
        ([[1], [2**31]], None, "2147483648 is not, in row 1"),
        ([[1], [2**63]], None, r"row 1: ids must be in \[0, 2147483648\), got 9223372036854775808"),
        ([[1], [2**64]], None, "row 1: must be a flat list of integer token ids"),
        ([[1], [2.0]], None, r"row 1: must be a flat list of integer token ids, got \[2.0\]"),
        ([[1], [True]], None, "row 1: must be a flat list"),
        ([[1], ["2"]], None, "row 1: must be a flat list"),
        ([[1], [[2], [3, 4]]], None, "row 1: must be flat"),
        ([[1], 2], None, "row 1: must be flat"),
        ([[1], None], None, "row 1: must be flat"),
        ([[1], "ab"], None, "row 1: must be flat"),
        ([[1], [2]], [[-1.0]], "logprobs: 1 rows for 2 rows of ids"),
        ([[1], [2], [3, 4]], [[-1.0], [], [-1.0]], "logprobs: 0 values for 1 ids; .* differ in rows 1, 2"),
        ([[1], [2]], [[-1.0], ["x"]], "logprobs row 1: must be a flat list of numbers"),
        ([[1], [2]], [[-1.0], [None]], "logprobs row 1: must be a flat list of numbers"),
        ([[1], [2, 3]], [[-1.0], [0.0, np.nan]], "nan is not, in row 1"),
    ],
)
def test_lists_that_are_no_mask_are_refused_naming_their_rows(rows, logprobs, says):
    with pytest.raises(MaskError, match=says):
        SamplingMask.from_lists(rows, logprobs)


def test_many_bad_rows_are_counted_not_listed():
    with pytest.raises(MaskError, match=r"in rows 0, 1, 2, 3, 4, 5, 6, 7 and 992 more$"):
        SamplingMask.from_lists([[-1]] * 1000)


def test_concat_needs_logprobs_of_all_or_of_none():
    with pytest.raises(MaskError, match="1 of 2 masks carry logprobs"):
        SamplingMask.concat([mask_of([[1]]), mask_of([[1]], with_logprobs=True)])


def test_rows_are_not_indexed_or_iterated_by_accident():
    mask = mask_of([[1], [2]])
    with pytest.raises(TypeError, match=r"mask.row\(t\)"):
        mask[0]
    with pytest.raises(TypeError, match=r"mask.row\(t\)"):
        list(mask)


def test_take_and_contains_refuse_what_is_no_row_number_or_token():
    mask = mask_of([[1], [2]])
    for rows in ([2], [-1]):
        with pytest.raises(MaskError, match=r"row numbers must be in \[0, 2\)"):
            mask.take(rows)
    with pytest.raises(MaskError, match="take: must be integers, got bool"):
        mask.take([True, False])
    with pytest.raises(MaskError, match="3 tokens for 2 rows"):
        mask.contains([1, 2, 3])
    with pytest.raises(MaskError, match="contains: must be integers"):
        mask.contains([1.5, 2.0])
    with pytest.raises(MaskError, match="contains: must be flat"):
        mask.contains([[1], [2]])
