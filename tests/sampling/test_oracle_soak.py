"""Requests come, finish and change places while the sampler runs: every row stays the oracle's, at every step."""

import numpy as np
import pytest
import torch

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler
from oracle_cases import IMPLS, Request, World, assert_row

V = 20
WORLD = World(V, eos_token_ids=(19,), banned_token_ids=(18,), thinking_start=(0,), thinking_end=(1, 2))

KINDS = [
    {},
    {"temperature": 0.0},
    {"top_k": 3, "repetition_penalty": 1.4},
    {"top_p": 0.8, "frequency_penalty": 0.6, "presence_penalty": -0.4},
    {"min_p": 0.1, "min_tokens": 4, "stop_token_ids": [5]},
    {"allowed_token_ids": [3, 4, 5, 6, 19], "top_k": 4},
    {"logit_bias": {7: 3.0, 8: -3.0}, "sampling_semantics": "hf", "top_p": 0.7},
    {"thinking_token_budget": 3, "sampling_semantics": "sglang", "top_k": 6, "top_p": 0.9},
]


def arrival(rng, serial):
    return Request(
        logits=np.zeros(V, np.float32),
        params=SamplingParams(logprobs=2, return_sampling_mask_logprobs=True, **KINDS[rng.integers(len(KINDS))]),
        prompt=rng.integers(0, V, rng.integers(1, 5)).tolist(),
        seed=serial,
        completion_index=int(rng.integers(3)),
        bad_words=[[9], [10, 11]] if rng.random() < 0.3 else [],
    )


def soak(impl, steps):
    rng = np.random.default_rng(12)
    sampler = Sampler(WORLD.spec(), impl=impl)
    running = []
    for serial in range(steps):
        running = [pair for pair in running if len(pair[0].output) < 12 and rng.random() > 0.08]
        while len(running) < 2 or (len(running) < 6 and rng.random() < 0.3):
            request = arrival(rng, serial)
            running.append((request, request.open(sampler)))
        if rng.random() < 0.3:
            rng.shuffle(running)
        logits = rng.normal(0, 2, (len(running), V)).astype(np.float32)
        batch = sampler.sample(DenseHead(torch.from_numpy(logits)), [row for _, row in running])
        for i, (request, row) in enumerate(running):
            request.logits = logits[i]
            assert_row(batch, i, WORLD, request)
            assert i not in batch.errors
            token_id = int(batch.token_ids[i])
            row.append(token_id)
            request.output = [*request.output, token_id]


@pytest.mark.parametrize("impl", IMPLS)
def test_200_steps_of_arrivals_departures_and_moves(impl):
    soak(impl, 200)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_10000_steps_of_arrivals_departures_and_moves(impl):
    soak(impl, 10_000)
