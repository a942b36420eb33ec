"""Contenders hold every id that may win the draw over a whole row, for every exact row in the margin."""

import numpy as np
import pytest
import torch
from cpu_rows import EXACT, HALF, SIZES, rows_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.sampling.cpu import contenders_numba
from keepmask.sampling.cpu.rows_numba import EMPTY, TOO_MANY
from keepmask.sampling.noise import gumbel


def contenders(row, *, T=1.0, position=0, seed=0, margin=EXACT, C=None):
    C = C or row.size
    z, ids = np.zeros((1, C), np.float32), np.zeros((1, C), np.int32)
    counts, full, status = np.zeros(1, int), np.zeros(1, np.bool_), np.zeros(1, int)
    zero = np.zeros(1, np.int64)
    draw = (np.asarray([T], np.float32), np.asarray([position]), zero, np.asarray([seed]))
    contenders_numba.contenders(row[None], zero, zero, *draw, margin, z, ids, counts, full, status, 0, 1)
    return ids[0, : counts[0]], bool(full[0]), int(status[0])


@pytest.mark.parametrize("margin", [EXACT, HALF])
@given(st.data(), SIZES, st.sampled_from([1.0, 0.3, 1.7]), st.integers(0, 2**40))
def test_whoever_wins_is_a_contender(margin, data, V, T, seed):
    row = data.draw(rows_of(V))
    ids, full, status = contenders(row, T=T, seed=seed, position=3, margin=margin)
    assert full == np.isfinite(row).all() or status == EMPTY
    if status == EMPTY:
        assert not np.isfinite(row).any()
        return
    noise = gumbel(torch.arange(V), torch.tensor(3), torch.tensor(0), torch.tensor(seed)).numpy()
    scores = (within(row, margin, np.random.default_rng(seed)) / np.float32(T)).astype(float) + noise
    assert int(scores.argmax()) in ids.tolist()


def test_contenders_are_few_in_exact_rows():
    rng = np.random.default_rng(0)
    for seed, scale in enumerate((0.0, 0.1, 1.0, 5.0)):
        row = rng.normal(0, scale, 49152).astype(np.float32)
        assert contenders(row, seed=seed)[0].size == 1


def test_contenders_beyond_the_room_are_told():
    assert contenders(np.full(200, 500, np.float32), margin=HALF, C=4)[2] == TOO_MANY


@given(st.data(), SIZES)
@settings(max_examples=40)
def test_bfloat16_bits_are_read_as_their_floats(data, V):
    half = torch.from_numpy(data.draw(rows_of(V))).bfloat16()
    bits, wide = half.view(torch.int16).numpy().view(np.uint16)[None], half.float().numpy()
    zero, one = np.zeros(1, np.int64), np.ones(1, np.float32)
    z, ids = np.zeros((1, V), np.float32), np.zeros((1, V), np.int32)
    counts, full, status = np.zeros(1, int), np.zeros(1, np.bool_), np.zeros(1, int)
    draw, results = (one, zero, zero, zero), (z, ids, counts, full, status)
    contenders_numba.contenders_bfloat16(bits, zero, zero, *draw, HALF, *results, 0, 1)
    mine, *told = contenders(wide, margin=HALF)
    assert ids[0, : counts[0]].tolist() == mine.tolist()
    assert told == [bool(full[0]), int(status[0])]
