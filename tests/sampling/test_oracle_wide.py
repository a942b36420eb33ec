"""Rows as wide as real vocabularies: peaked, flat, tied, near-tied, under every filter and profile."""

import numpy as np
import pytest

from keepmask.params import SamplingParams
from oracle_cases import IMPLS, Request, World, assert_batch, truth


def normal(V, rng):
    return rng.normal(0, 2.5, V)


def peaked(V, rng):
    z = rng.normal(0, 1.5, V)
    z[rng.integers(0, V, 20)] += np.linspace(2, 22, 20)
    return z


def near_tied(V, rng):
    return 3.25 + np.spacing(np.float32(3.25)) * rng.integers(-2, 3, V)


def tied(V, rng):
    return np.round(rng.normal(0, 2, V) * 2) / 2


def flat(V, rng):
    return np.full(V, -1.75)


def half_banned(V, rng):
    return np.where(rng.random(V) < 0.5, -np.inf, rng.normal(0, 2, V))


ROWS = [normal, peaked, near_tied, tied, flat, half_banned]

FILTERS = [
    {"top_k": 50, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 0.8},
    {"min_p": 0.05},
    {"min_p": 1e-4, "top_p": 0.5, "top_k": 3000},
    {"top_k": 2048},
    {"top_k": 2049, "temperature": 2.0},
    {"temperature": 0.0},
    {"top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {7: 100.0, 9: -100.0}, "allowed_token_ids": list(range(3, 40_000, 3)), "top_p": 0.7},
    {},
]


def batch_of(row, V, rng, **fields):
    return [
        Request(
            row(V, rng).astype(np.float32),
            SamplingParams(logprobs=5, return_sampling_mask_logprobs=True, **given | fields),
            prompt=[1, 2, 5],
            output=[7, 7, V - 1],
            seed=17,
            completion_index=i,
        )
        for i, given in enumerate(FILTERS)
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_mixed_batch_at_151936(row, impl):
    V = 151_936
    assert_batch(World(V), batch_of(row, V, np.random.default_rng(5)), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("semantics", ["sglang", "hf"])
@pytest.mark.parametrize("row", [peaked, tied], ids=lambda row: row.__name__)
def test_the_other_profiles_at_151936(row, semantics, impl):
    V = 151_936
    assert_batch(World(V, semantics=semantics), batch_of(row, V, np.random.default_rng(6))[:7], impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_mixed_batch_at_262144(impl):
    V = 262_144
    rng = np.random.default_rng(7)
    batch = [
        Request(row(V, rng).astype(np.float32), SamplingParams(logprobs=1, return_sampling_mask_logprobs=True, **given))
        for row, given in zip(ROWS, [FILTERS[0], FILTERS[1], FILTERS[1], FILTERS[4], FILTERS[2], {}], strict=True)
    ]
    assert_batch(World(V), batch, impl)


def test_these_rows_are_wide_and_narrow_and_no_close_calls():
    V = 151_936
    steps = [truth(World(V), request) for request in batch_of(peaked, V, np.random.default_rng(5))]
    widths = [step.ids.size for step in steps]
    assert min(widths) == 1
    assert max(widths) == V
    assert len({width for width in widths if 2048 <= width < V}) >= 2
    assert all(step.margin > 1e-9 for step in steps)
