"""Contenders hold every id that may win the draw over a whole row, for every exact row in the margin."""

import numpy as np
import pytest
import torch
from cpu_rows import EXACT, HALF, SIZES, record, room, rows_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.sampling.cpu import contenders_numba
from keepmask.sampling.noise import gumbel
from keepmask.sampling.records import EMPTY, TOO_MANY


def contenders(row, *, T=1.0, position=0, seed=0, margin=EXACT, C=None):
    found = room(C or row.size)
    records = record(temperature=np.float32(T), position=position, seed=seed)
    kernel = contenders_numba.contenders_bfloat16 if row.dtype == np.uint16 else contenders_numba.contenders
    kernel(row[None], records, margin, *found, 0, 1)
    (told,) = found.rows
    return found.ids[0, : told["count"]], bool(told["full"]), int(told["status"])


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
    bits, wide = half.view(torch.int16).numpy().view(np.uint16), half.float().numpy()
    ids, *told = contenders(bits, margin=HALF)
    expected_ids, *expected = contenders(wide, margin=HALF)
    assert ids.tolist() == expected_ids.tolist()
    assert told == expected
