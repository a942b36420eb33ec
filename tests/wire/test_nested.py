import json

import numpy as np
import pytest
from hypothesis import given
from wire_masks import CORNERS, MAX_ID, logprobs, masks

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import Limits
from keepmask.wire.nested import from_lists, logprob_lists


@given(masks())
def test_lists_make_the_mask_they_came_from(mask):
    assert from_lists(mask.token_ids, logprob_lists(mask)) == mask


@pytest.mark.parametrize("mask", CORNERS.values(), ids=CORNERS)
def test_corner_cases_round_trip(mask):
    assert from_lists(mask.token_ids, logprob_lists(mask)) == mask


def test_rows_in_any_order_are_sorted_and_their_logprobs_follow():
    mask = from_lists([[326, 187], [], [9, 8, 7]], [[-1.0, -2.0], [], [-3, -4, -5]])
    assert mask == SamplingMask([187, 326, 7, 8, 9], [0, 2, 2, 5], [-2, -1, -5, -4, -3])


@given(logprobs)
def test_written_logprobs_are_exact_and_have_at_most_nine_digits(value):
    mask = SamplingMask([3], [0, 1], [value])
    text = json.dumps(logprob_lists(mask))
    assert np.float32(json.loads(text)[0][0]) == np.float32(value)
    digits = text.strip("[]-").split("e")[0].replace(".", "").strip("0")
    assert len(digits) <= 9 or abs(value) < 1e-14 or abs(value) > 1e9


@pytest.mark.parametrize(
    ("rows", "logprobs", "message"),
    [
        (None, None, "must be a list with one list a token, got NoneType"),
        ({"0": [1]}, None, "must be a list with one list a token, got dict"),
        ([1, 2], None, "each row must be a list, got 1"),
        ([[1], None], None, "each row must be a list, got None"),
        ([[1], "23"], None, "each row must be a list, got '23'"),
        ([[1, [2]]], None, r"ids must be integers, got \[2\]"),
        ([[1, 2.0]], None, "ids must be integers, got 2.0"),
        ([[1, True]], None, "ids must be integers, got True"),
        ([[1, "2"]], None, "ids must be integers, got '2'"),
        ([[10**30]], None, "2147483648"),
        ([[MAX_ID + 1]], None, "2147483648"),
        ([[5], [-1]], None, "row 1"),
        ([[5], [7, 7]], None, "row 1"),
        ([[5]], [[-1.0], [-1.0]], "one value for each id"),
        ([[5, 6], []], [[-1.0], [-1.0]], "one value for each id"),
        ([[5]], [[float("nan")]], "finite"),
        ([[5]], [[float("-inf")]], "finite"),
        ([[5]], [[1e39]], "finite"),
        ([[5]], [[10**400]], "finite"),
        ([[5]], [["-1"]], "must be numbers, got '-1'"),
        ([[5]], [[True]], "must be numbers, got True"),
        ([[5]], 3, "must be a list"),
    ],
)
def test_anything_else_is_refused(rows, logprobs, message):
    with pytest.raises(MaskError, match=message):
        from_lists(rows, logprobs)


def test_limits_hold_before_the_lists_are_flattened():
    with pytest.raises(MaskError, match="at most 5 are decoded"):
        from_lists([[1, 2, 3]] * 2, limits=Limits(max_ids=5))
    with pytest.raises(MaskError, match="at most 1 are decoded"):
        from_lists([[]] * 2, limits=Limits(max_rows=1))
