"""The counter-based noise is the oracle's to the bit, and the draws differ by seed, completion and position."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from keepmask.sampling.noise import gumbel, uniform
from oracle_cases import Request, World, sampled

KEYS = {
    "seed": st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([0, -1, 2**32, 2**63, 2**64 - 1])),
    "completion_index": st.integers(0, 1023),
    "position": st.integers(0, 2**31 - 1),
}


def signed(seed):
    """The seed's 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), *KEYS.values())
def test_noise_is_the_oracles(ids, seed, completion_index, position):
    place = [torch.tensor(value) for value in (position, completion_index, signed(seed))]
    expected = oracle.uniform(np.asarray(ids), seed, completion_index, position)
    np.testing.assert_array_equal(uniform(torch.tensor(ids), *place).numpy(), expected)
    expected = oracle.gumbel(np.asarray(ids), seed, completion_index, position)
    np.testing.assert_allclose(gumbel(torch.tensor(ids), *place).numpy(), expected, rtol=1e-14, atol=1e-14)


def test_draws_differ_by_seed_completion_and_position():
    V = 1000
    flat = np.zeros(V, np.float32)
    sampler = Sampler(World(V).spec())
    batch = [
        Request(flat, SamplingParams(logprobs=0), output=[0] * position, seed=seed, completion_index=completion_index)
        for seed in range(4)
        for completion_index in range(4)
        for position in range(4)
    ]
    token_ids = sampled(sampler, batch).token_ids
    assert np.unique(token_ids).size > 55  # 64 draws of 1000 ids: two of them meet at times
    np.testing.assert_array_equal(token_ids, sampled(sampler, batch).token_ids)
