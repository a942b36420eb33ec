"""Keys order as logits and ids do, and rows that candidates cannot decide are handed back, not guessed."""

import numpy as np
import pytest
from cpu_rows import record, room
from hypothesis import given
from hypothesis import strategies as st

from keepmask.sampling.cpu import draw_numba as draws
from keepmask.sampling.records import INSUFFICIENT, NOT_FINITE, OK, SGLANG, UNCERTAIN

LOGITS = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126))


def encode(z, ids, T=1.0, width=None):
    keys, found = np.zeros((1, width or len(z)), np.int64), room(len(z))
    found.rows["count"] = len(z)
    arrays = (np.asarray([z], np.float32), np.asarray([ids], np.int32), record(temperature=np.float32(T)))
    draws.encode(*arrays, found.rows, keys, 0, 1)
    return keys[0], int(found.rows["status"][0])


def decide(z, ids, *, sums=(0.0, 0.0, -np.inf), by_rank=True, **fields):
    keys, found = np.sort(encode(z, ids)[0])[None], room(len(z))
    found.rows["count"] = len(z)
    found.rows["outside"], found.rows["shift"], found.rows["floor"] = sums
    none = np.zeros((1, 0), np.float32)
    draws.decide(keys, record(by_rank=by_rank, **fields), found.rows, none.astype(np.int32), none, none, 0, 1)
    (told,) = found.rows
    return sorted(int(key) >> 32 for key in keys[0, : told["count"]]), int(told["status"]), int(told["token_id"])


@given(st.lists(LOGITS, min_size=1, max_size=30), st.sampled_from([1.0, 0.5, 3.0]))
def test_keys_ascend_by_logit_descending_then_id(values, T):
    z = np.asarray(values, np.float32)
    ids = np.random.default_rng(z.size).permutation(1000)[: z.size]
    keys, status = encode(z, ids, T, width=z.size + 3)
    assert status == OK
    assert (keys[z.size :] == draws.PADDING).all()
    scaled = z / np.float32(T)
    expected = sorted(range(z.size), key=lambda i: (-float(scaled[i]), ids[i]))
    order = np.argsort(keys)
    assert [int(keys[i] & 0xFFFFFFFF) for i in order[: z.size]] == [ids[i] for i in expected]
    assert [draws.key_value(keys[i]) for i in order[: z.size]] == [scaled[i] for i in expected]


def test_zeros_of_either_sign_are_tied():
    keys, _ = encode([0.0, -0.0, 0.0], [5, 3, 4])
    assert (np.sort(keys) & 0xFFFFFFFF).tolist() == [3, 4, 5]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_exact_logit_that_is_no_number_is_told(bad):
    assert encode([0.0, bad], [0, 1])[1] == NOT_FINITE


def test_a_sum_on_the_boundary_is_left_to_the_definition():
    assert decide([0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3], top_p=0.5)[1] == UNCERTAIN
    assert decide([0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3], top_p=0.51)[:2] == ([0, 1, 2], OK)


def test_a_draw_between_equal_scores_is_left_to_the_definition():
    # The same id twice has the same logit and the same noise.
    assert decide([0.0, 0.0], [7, 7])[1] == UNCERTAIN


def test_a_mass_cut_beyond_the_candidates_is_insufficient():
    kwargs = {"top_p": 0.9, "sums": (1.0, 0.0, -1.0), "by_rank": False}
    assert decide([0.0, -0.5], [0, 1], **kwargs)[1] == INSUFFICIENT
    assert decide([0.0, -0.5], [0, 1], **kwargs | {"by_rank": True}, profile=SGLANG)[:2] == ([0, 1], OK)


def test_a_cut_among_ids_that_others_may_outrank_is_insufficient():
    # Ids that are not here may have logits up to -0.2, and come before the second one.
    assert decide([0.0, -0.5, -2.0], [0, 1, 2], top_p=0.7, sums=(0.1, 0.0, -0.2), by_rank=False)[1] == INSUFFICIENT
    assert decide([0.0, -0.5, -2.0], [0, 1, 2], top_p=0.7, sums=(0.1, 0.0, -0.9), by_rank=False)[:2] == ([0, 1], OK)
