"""Candidates hold every id that the filters of a row may keep, for every exact row in the margin."""

import numpy as np
import pytest
import torch
from cpu_rows import EXACT, HALF, SIZES, record, room, rows_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.sampling.cpu import candidates_numba as candidates
from keepmask.sampling.cpu.rows_numba import all_legal
from keepmask.sampling.records import EMPTY, NOT_FINITE, OK, TOO_MANY


def select(row, *, T=1.0, k=0, log_min_p=-np.inf, top_p=1.0, weighs=False, margin=EXACT, token=(-1, 0.0), C=None):
    records = record(temperature=np.float32(T), select_k=k, select_log_min_p=log_min_p, select_top_p=top_p)
    records["weighs"] = weighs
    found = room(C or row.size)
    found.rows["token_id"], found.rows["token_s"] = token
    kernel = candidates.select_bfloat16 if row.dtype == np.uint16 else candidates.select
    kernel(row[None], records, margin, *found, 0, 1)
    (told,) = found.rows
    sums, n = (told["outside"], told["shift"], told["floor"]), told["count"]
    return found.ids[0, :n], found.z[0, :n], sums, int(told["status"]), int(told["rank"])


@pytest.mark.parametrize("margin", [EXACT, HALF])
@given(st.data(), SIZES, st.integers(1, 3000), st.sampled_from([1.0, 0.3, 1.7]), st.integers(0, 2**32))
def test_the_k_highest_and_their_ties_are_candidates(margin, data, V, k, T, seed):
    row, k = data.draw(rows_of(V)), min(k, V)
    ids, z, _, status, _ = select(row, T=T, k=k, margin=margin)
    if not np.isfinite(row).any():
        assert status == EMPTY
        return
    assert status == OK
    np.testing.assert_array_equal(z, row[ids])
    assert np.unique(ids).size == ids.size
    scaled = within(row, margin, np.random.default_rng(seed)) / np.float32(T)
    kept = (scaled >= np.sort(scaled)[-k]) & np.isfinite(row)
    assert set(np.flatnonzero(kept)) <= set(ids)


@pytest.mark.parametrize("margin", [EXACT, HALF])
@given(st.data(), SIZES, st.floats(1e-6, 1), st.sampled_from([1.0, 0.3, 1.7]), st.integers(0, 2**32))
def test_ids_within_min_p_are_candidates(margin, data, V, min_p, T, seed):
    row = data.draw(rows_of(V))
    ids, _, _, status, _ = select(row, T=T, log_min_p=np.log(min_p), margin=margin)
    if status == EMPTY:
        return
    scaled = (within(row, margin, np.random.default_rng(seed)) / np.float32(T)).astype(float)
    assert set(np.flatnonzero(scaled >= scaled.max() + np.log(min_p))) <= set(ids)


@given(st.data(), SIZES, st.floats(0.01, 0.999), st.sampled_from([1.0, 0.3, 1.7]))
def test_candidates_of_a_mass_cut_reach_its_share_and_the_rest_is_weighed(data, V, top_p, T):
    row = data.draw(rows_of(V))
    ids, _, (outside, shift, floor), status, _ = select(row, T=T, top_p=top_p, weighs=True)
    if status == EMPTY:
        return
    scaled = (row / np.float32(T)).astype(float)
    weights = np.exp(scaled - scaled.max())
    assert shift == scaled.max()
    assert weights[ids].sum() >= top_p * weights.sum() * (1 - 1e-10)
    left = np.delete(weights, ids)
    assert outside == pytest.approx(left.sum(), rel=1e-9, abs=1e-10 * weights.sum())
    assert (np.delete(scaled, ids) <= floor).all()


def test_few_candidates_are_selected():
    row = np.random.default_rng(0).normal(0, 3, 49152).astype(np.float32)
    for k in (1, 20, 50, 300, 512, 2000):
        assert k <= select(row, k=k)[0].size <= 1.3 * k + 2
    assert select(row, top_p=0.5, weighs=True)[0].size < 2000


@given(st.data(), SIZES, st.sampled_from([1.0, 0.7]))
def test_ranks_count_the_ids_before_by_logit_then_id(data, V, T):
    row = data.draw(rows_of(V))
    token = data.draw(st.integers(0, V - 1))
    scaled = row / np.float32(T)
    *_, status, rank = select(row, T=T, k=1, token=(token, scaled[token]))
    if status == OK:
        order = np.argsort(-scaled.astype(float), kind="stable")
        assert rank == 1 + int(np.flatnonzero(order == token)[0])


@pytest.mark.parametrize("bad", [np.nan, -np.float32(np.nan), np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 129])
def test_nan_of_either_sign_and_infinity_are_found_anywhere(bad, at):
    row = np.zeros(130, np.float32)
    row[at] = bad
    assert select(row, k=3)[3] == NOT_FINITE
    legal = np.ones(2, np.bool_)
    all_legal(np.stack([np.full(130, -np.inf, np.float32), row]), legal, 0, 2)
    assert legal.tolist() == [True, False]


def test_a_quotient_beyond_float32_is_not_finite():
    assert select(np.asarray([1e38, 0], np.float32), T=1e-4, k=1)[3] == NOT_FINITE


def test_more_candidates_than_there_is_room_for_are_told():
    assert select(np.zeros(100, np.float32), k=5, C=50)[3] == TOO_MANY


@given(st.data(), SIZES, st.integers(1, 200), st.floats(0.1, 0.9))
@settings(max_examples=40)
def test_bfloat16_bits_are_read_as_their_floats(data, V, k, top_p):
    half = torch.from_numpy(data.draw(rows_of(V))).bfloat16()
    bits, wide = half.view(torch.int16).numpy().view(np.uint16), half.float().numpy()
    filters = {"k": min(k, V), "top_p": top_p, "weighs": True, "margin": HALF}
    ids, _, *told = select(bits, **filters)
    expected_ids, _, *expected = select(wide, **filters)
    assert ids.tolist() == expected_ids.tolist()
    assert told == expected
