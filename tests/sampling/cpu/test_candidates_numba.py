"""Candidates hold every id that the filters of a row may keep, for every exact row in the margin."""

import numpy as np
import pytest
import torch
from cpu_rows import EXACT, HALF, SIZES, rows_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.sampling.cpu import candidates_numba as candidates
from keepmask.sampling.cpu.rows_numba import EMPTY, NOT_FINITE, OK, TOO_MANY, all_legal


def select(row, *, T=1.0, k=0, log_min_p=-np.inf, top_p=1.0, weighs=False, margin=EXACT, token=(-1, 0.0), C=None):
    C = C or row.size
    z, ids = np.full((1, C), np.nan, np.float32), np.full((1, C), -7, np.int32)
    counts, sums, status = np.zeros(1, int), np.zeros((1, 3)), np.zeros(1, int)
    tokens, token_z = np.asarray([[token[0], 0]]), np.asarray([token[1]], np.float32)
    zero, on = np.zeros(1, np.int64), np.asarray([weighs])
    bounds = (np.asarray([T], np.float32), np.asarray([k]), np.asarray([log_min_p]), np.asarray([top_p]), on)
    results = (z, ids, counts, sums, status)
    candidates.select(row[None], zero, zero, *bounds, margin, tokens, token_z, *results, 0, 1)
    n = int(counts[0])
    return ids[0, :n], z[0, :n], sums[0], int(status[0]), int(tokens[0, 1])


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
    bits, wide = half.view(torch.int16).numpy().view(np.uint16)[None], half.float().numpy()
    zero, one = np.zeros(1, np.int64), np.ones(1, np.float32)
    bounds = (one, np.asarray([min(k, V)]), np.asarray([-np.inf]), np.asarray([top_p]), np.asarray([True]))
    z, ids, tokens = np.zeros((1, V), np.float32), np.zeros((1, V), np.int32), np.full((1, 2), -1)
    counts, sums, status = np.zeros(1, int), np.zeros((1, 3)), np.zeros(1, int)
    results = (z, ids, counts, sums, status)
    candidates.select_bfloat16(bits, zero, zero, *bounds, HALF, tokens, one, *results, 0, 1)
    expected = select(wide, k=min(k, V), top_p=top_p, weighs=True, margin=HALF)
    assert ids[0, : counts[0]].tolist() == expected[0].tolist()
    assert (sums[0].tolist(), int(status[0])) == (expected[2].tolist(), expected[3])
