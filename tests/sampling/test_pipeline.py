"""The whole sampler: laws that hold whatever the parameters, and rows that come, move and go."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_rows import draw, masks, open_row, sample, support

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec

IMPLS = ("fast", "reference")
V = 40


def random_params(rng):
    choices = {
        "temperature": [0.0, 0.5, 1.0, 1.0, 1.3],
        "top_k": [0, 0, 3, 10],
        "top_p": [1.0, 1.0, 0.4, 0.9],
        "min_p": [0.0, 0.0, 0.05],
        "min_tokens": [0, 0, 4],
        "presence_penalty": [0.0, 0.0, 0.5],
        "frequency_penalty": [0.0, 0.0, 0.7],
        "repetition_penalty": [1.0, 1.0, 1.2],
        "logit_bias": [{}, {}, {3: 4.0}],
        "allowed_token_ids": [None, None, None, [1, 5, 9, 13]],
        "thinking_token_budget": [None, None, 2],
        "logprobs": [None, 0, 3],
        "sampling_semantics": ["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"],
        "return_sampling_mask": [None, False],
    }
    return SamplingParams(**{name: values[rng.integers(len(values))] for name, values in choices.items()})


class Soak:
    """Completions that begin, grow in ever other company, and end; each step one of them is checked alone."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        spec = masks(V, eos_token_ids=(2,), thinking_start_token_ids=(6,), thinking_end_token_ids=(7, 8))
        self.sampler, self.definition = Sampler(spec), Sampler(spec, impl="reference")
        self.running = []

    def open(self):
        params = random_params(self.rng)
        options = {
            "prompt": self.rng.integers(0, V, self.rng.integers(1, 9)).tolist(),
            "seed": int(self.rng.integers(2**63)),
            "completion_index": int(self.rng.integers(4)),
            "bad_words": [[5], [1, 2]] if self.rng.random() < 0.3 else [],
        }
        self.running.append((open_row(self.sampler, params, **options), params, options))

    def step(self):
        rng = self.rng
        self.running = [self.running[i] for i in rng.permutation(len(self.running)) if rng.random() > 0.1]
        while len(self.running) < rng.integers(1, 9):
            self.open()
        rows = [row for row, _, _ in self.running]
        logits = rng.normal(0, rng.choice([0.5, 3]), (len(rows), V)).astype(np.float32)
        batch = sample(self.sampler, logits, rows)
        assert not batch.errors
        self.check(batch, logits, int(rng.integers(len(rows))))
        for row, token_id in zip(rows, batch.token_ids.tolist(), strict=True):
            row.append(token_id)

    def check(self, batch, logits, i):
        """Row i is what a row opened now with the same history gives, alone and by definition."""
        row, params, options = self.running[i]
        fresh = open_row(self.definition, params, output=row.output_token_ids.tolist(), **options)
        alone = sample(self.definition, logits[i : i + 1], [fresh])
        assert batch.token_ids[i] == alone.token_ids[0]
        if row.returns_mask:
            assert support(batch, i) == support(alone)
        entry, other = batch.logprobs.row_logprobs(i), alone.logprobs.row_logprobs(0)
        assert (entry is None) == (other is None)
        if entry is not None:
            assert entry.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(entry.values, other.values, atol=1e-6)


def test_rows_that_come_move_and_go_leave_nothing_behind():
    soak = Soak(0)
    for _ in range(300):
        soak.step()


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing_behind():
    soak = Soak(1)
    for _ in range(10_000):
        soak.step()


@pytest.mark.parametrize("impl", IMPLS)
@given(st.integers(0, 2**32))
def test_the_drawn_id_is_in_its_support_and_its_probabilities_sum_to_one(impl, seed):
    rng = np.random.default_rng(seed)
    params = random_params(rng).replace(
        thinking_token_budget=None, return_sampling_mask=None, return_sampling_mask_logprobs=True, logprobs=0
    )
    z = rng.normal(0, 3, V)
    batch = draw(Sampler(masks(V), impl=impl), z, params=params)
    ids, logprobs = batch.mask.wait().row(0)
    own = batch.logprobs.row_logprobs(0).values[0]
    assert 0 <= batch.token_ids[0] < V
    if not ids.size:
        return
    assert (np.diff(ids) > 0).all()
    assert batch.token_ids[0] in ids
    assert np.exp(logprobs.astype(float)).sum() == pytest.approx(1, abs=1e-6)
    assert logprobs[ids.tolist().index(batch.token_ids[0])] == own


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_batch_twice_gives_the_same_and_appends_nothing(impl):
    sampler = Sampler(masks(V), impl=impl)
    rows = [open_row(sampler, seed=b, top_p=0.9, logprobs=2) for b in range(5)]
    z = np.random.default_rng(0).normal(0, 2, (5, V))
    first, second = sample(sampler, z, rows), sample(sampler, z, rows)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert [row.num_output_tokens for row in rows] == [0] * 5
    assert [support(first, b) for b in range(5)] == [support(second, b) for b in range(5)]


def test_results_of_one_step_outlive_the_next():
    sampler = Sampler(masks(V))
    z = np.random.default_rng(0).normal(0, 2, (2, 4, V))
    rows = [open_row(sampler, seed=b, top_p=0.9, logprobs=2, return_sampling_mask_logprobs=True) for b in range(4)]

    def contents(batch):
        entries = [batch.logprobs.row_logprobs(b) for b in range(4)]
        held = [batch.mask.row(b) for b in range(4)]
        return batch.token_ids.tolist(), [tuple(map(str, (*e.ids, *e.values))) for e in entries], repr(held)

    batch = sample(sampler, z[0], rows)
    before = contents(batch)
    sample(sampler, z[1], rows)
    assert contents(batch) == before


@pytest.mark.parametrize("impl", IMPLS)
def test_the_logits_are_left_as_they_were(impl):
    sampler = Sampler(masks(V, eos_token_ids=(1,)), impl=impl)
    head = DenseHead(sampled := torch.randn(4, V))
    before = sampled.clone()
    fields = [{"temperature": 0.5}, {"min_tokens": 2}, {"logit_bias": {1: 3.0}}, {"repetition_penalty": 2.0}]
    sampler.sample(head, [open_row(sampler, **options) for options in fields])
    assert (sampled == before).all()


def test_empty_batches_and_single_ids():
    sampler = Sampler(SamplerSpec(vocab_size=1))
    assert sampler.sample(DenseHead(torch.zeros(0, 1)), []).token_ids.tolist() == []
    assert draw(sampler, [0.0], logprobs=1).token_ids.tolist() == [0]
