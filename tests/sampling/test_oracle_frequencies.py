"""Drawn ids come as often as the oracle's probabilities say."""

import numpy as np
import pytest
import torch
from scipy import stats

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler
from oracle_cases import Request, World, truth

DRAWS = 20_000
ROWS = 1000


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "min_p": 0.1}],
    ids=str,
)
def test_drawn_ids_have_the_oracles_distribution(filters):
    V = 12
    z = np.random.default_rng(8).normal(0, 1.5, V).astype(np.float32)
    params = SamplingParams(**filters)
    step = truth(World(V), Request(z, params))
    sampler = Sampler(World(V).spec(return_sampling_mask=False))
    head = DenseHead(torch.tensor(z).expand(ROWS, V))
    # Seeds, completions and positions all vary: the noise has to be independent along each.
    rows = [sampler.open_row(params, prompt_token_ids=[1], seed=i // 4, completion_index=i % 4) for i in range(ROWS)]
    counts = np.zeros(V)
    for _ in range(DRAWS // ROWS):
        token_ids = sampler.sample(head, rows).token_ids
        counts += np.bincount(token_ids, minlength=V)
        for row, token_id in zip(rows, token_ids.tolist(), strict=True):
            row.append(token_id)
    assert counts[np.setdiff1d(np.arange(V), step.ids)].sum() == 0
    assert counts.sum() == DRAWS
    # Fixed seeds: the p-value is a fixed number, not a coin.
    assert stats.chisquare(counts[step.ids], DRAWS * step.probabilities).pvalue > 0.01
