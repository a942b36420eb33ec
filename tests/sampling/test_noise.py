"""Philox gives the published words, in both forms, and the noise is what its definition says."""

import math

import numpy as np
import pytest
import torch
from cpu_rows import record
from hypothesis import given
from hypothesis import strategies as st

from keepmask.sampling import noise
from keepmask.sampling.cpu import noise_numba

# kat_vectors of Random123: philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(-(2**63), 2**63 - 1)


def words(text):
    return tuple(int(word, 16) for word in text.split())


def in_plain_python(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_published_words_come_out(counter, key, expected):
    assert tuple(int(word) for word in noise.philox(words(counter), words(key))) == words(expected)


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_products_beyond_63_bits_are_right(counter, key):
    assert tuple(int(word) for word in noise.philox(counter, key)) == in_plain_python(counter, key)


@given(st.integers(0, 2**18), st.integers(0, 2**20), st.integers(0, 1023), SEEDS)
def test_uniforms_are_half_odd_multiples_of_two_to_the_minus_52(token_id, position, completion, seed):
    x0, x1, _, _ = in_plain_python((token_id, position, completion, 0), (seed % 2**32, (seed >> 32) % 2**32))
    k = (x0 >> 6) * 2**26 + (x1 >> 6)
    u = noise.uniform(*(torch.tensor([value]) for value in (token_id, position, completion, seed)))
    assert float(u) == (2 * k + 1) / 2**53
    assert 0 < float(u) < 1


@given(st.integers(0, 2**20), st.integers(0, 1023), SEEDS)
def test_both_forms_give_the_same_noise(position, completion, seed):
    ids = np.random.default_rng(position).integers(0, 2**18, 200)
    (params,) = record(position=position, completion=completion, seed=seed)
    compiled = [noise_numba.gumbel(token_id, params) for token_id in ids]
    expected = noise.gumbel(
        torch.from_numpy(ids), torch.tensor(position), torch.tensor(completion), torch.tensor(seed)
    ).numpy()
    np.testing.assert_allclose(compiled, expected, rtol=0, atol=4e-15)


@given(st.integers(0, 2**18), st.integers(0, 2**20), st.integers(0, 1023), SEEDS, st.integers(1, 70))
def test_words_of_consecutive_ids_are_those_of_each(first, position, completion, seed, size):
    keys, x0 = np.empty((10, 2), np.uint32), np.empty(size, np.uint32)
    noise_numba.round_keys(seed, keys)
    (params,) = record(position=position, completion=completion)
    noise_numba.first_words(first, params, keys, x0)
    key = (seed % 2**32, (seed >> 32) % 2**32)
    assert x0.tolist() == [in_plain_python((first + i, position, completion, 0), key)[0] for i in range(size)]


def test_noise_is_bounded_by_what_the_smallest_and_largest_uniform_give():
    assert -math.log(-math.log(2.0**-53)) > -3.61
    assert -math.log(-math.log(1 - 2.0**-53)) < 36.8
