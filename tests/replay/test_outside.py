"""The estimate of the mass outside the supports, against the oracle's kept mass of every row."""

import math

import numpy as np
import pytest
import torch
from replay_cases import head_logits, random_tokens, support_of, targets_of, transforms_of

import oracle
from keepmask import MaskError
from keepmask.replay.outside import estimate_mass_outside

T, E, V = 60, 12, 50


@pytest.fixture(scope="module")
def problem():
    tokens = random_tokens(np.random.default_rng(0), num_tokens=T, vocab_size=V)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, E, generator=generator) * 0.5, torch.randn(V, E, generator=generator)
    logits = head_logits(hidden, weight).numpy()
    outside = [1 - oracle.kept_mass(logits[t], k.params, k.prompt, k.output, k.support) for t, k in enumerate(tokens)]
    arguments = (hidden, weight, targets_of(tokens), support_of(tokens))
    return arguments, {"transforms": transforms_of(tokens)}, np.array(outside)


def estimate(problem, num_samples, seed=0, **options):
    arguments, transforms, _ = problem
    return estimate_mass_outside(
        *arguments, **transforms, num_samples=num_samples, generator=torch.Generator().manual_seed(seed), **options
    )


def test_a_sample_of_every_token_is_exact(problem):
    outside = problem[2]
    got = estimate(problem, 10 * T)
    assert got.mean == pytest.approx(outside.mean(), abs=1e-5)
    assert got.standard_error == 0
    assert got.rows.tolist() == list(range(T))
    np.testing.assert_allclose(got.values, outside, rtol=0, atol=1e-5)


def test_each_sampled_row_is_exact_and_drawn_from_the_loss_mask(problem):
    loss_mask = torch.arange(T) % 2 == 1
    got = estimate(problem, 7, loss_mask=loss_mask)
    assert got.num_tokens == T // 2
    assert len(set(got.rows.tolist())) == 7
    assert loss_mask[got.rows].all()
    np.testing.assert_allclose(got.values, problem[2][got.rows], rtol=0, atol=1e-5)


def test_the_estimate_is_unbiased_and_its_error_is_the_stated_one(problem):
    outside = problem[2]
    means, errors = zip(
        *((e.mean, e.standard_error) for e in (estimate(problem, 12, seed) for seed in range(300))), strict=True
    )
    true_error = math.sqrt(outside.var(ddof=1) / 12 * (1 - 12 / T))
    assert np.mean(means) == pytest.approx(outside.mean(), abs=4 * true_error / math.sqrt(300))
    assert np.std(means) == pytest.approx(true_error, rel=0.2)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(true_error, rel=0.1)


def test_one_of_several_tokens_has_an_unknown_error(problem):
    assert math.isnan(estimate(problem, 1).standard_error)


def test_nothing_to_sample_is_refused(problem):
    with pytest.raises(ValueError, match="num_samples=0"):
        estimate(problem, 0)
    with pytest.raises(MaskError, match="loss_mask: must be bool"):
        estimate(problem, 3, loss_mask=torch.ones(T - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="no token to look at"):
        estimate(problem, 3, loss_mask=torch.zeros(T, dtype=torch.bool))
