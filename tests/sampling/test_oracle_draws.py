"""Support, draw and processed log-probs are the oracle's, for every parameter, profile and implementation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from oracle_cases import (
    IMPLS,
    Request,
    World,
    assert_batch,
    assert_row,
    batches,
    close_call,
    requests,
    sampled,
    truth,
    wide_logits,
)


@pytest.mark.parametrize("impl", IMPLS)
@given(batches())
def test_rows_of_a_mixed_batch_are_the_oracles(impl, case):
    world, batch = case
    assert_batch(world, batch, impl)


@pytest.mark.parametrize("impl", IMPLS)
@given(st.data(), st.sampled_from([63, 64, 65, 500, 1111, 4096, 6000]))
def test_rows_wider_than_a_block_of_any_kernel_are_the_oracles(impl, data, V):
    batch = data.draw(st.lists(requests(V, wide_logits), min_size=1, max_size=4))
    for request in batch:
        request.params = request.params.replace(thinking_token_budget=None)
    assert_batch(World(V), batch, impl)


@pytest.mark.parametrize("impl", IMPLS)
@given(st.data())
@settings(max_examples=60)
def test_histories_of_several_steps_are_the_oracles(impl, data):
    world, batch = data.draw(batches(max_size=3))
    sampler = Sampler(world.spec(), impl=impl)
    rows = [request.open(sampler) for request in batch]
    for _ in range(6):
        drawn = sampled(sampler, batch, rows)
        for i, request in enumerate(batch):
            assert_row(drawn, i, world, request)
            token_id = max(int(drawn.token_ids[i]), 0)
            rows[i].append(token_id)
            request.output = [*request.output, token_id]
            request.logits = np.roll(request.logits, 1)


@given(batches(max_size=4), st.randoms(use_true_random=False))
def test_a_row_is_the_same_alone_in_company_and_without_masks(case, random):
    world, batch = case
    fast = Sampler(world.spec(), impl="fast")
    together = sampled(fast, batch)
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = sampled(fast, [batch[i] for i in order])
    bare = Sampler(world.spec(return_sampling_mask=False, logprobs_mode="raw_logprobs"), impl="fast")
    for i, request in enumerate(batch):
        params = request.params.replace(return_sampling_mask_logprobs=False, logprobs=None)
        without = sampled(bare, [Request(**vars(request) | {"params": params})])
        alone = sampled(fast, [request])
        token_ids = {b.token_ids[j] for b, j in ((together, i), (shuffled, order.index(i)), (alone, 0), (without, 0))}
        assert len(token_ids) == 1
        if i in together.errors:
            continue
        assert without.mask is None
        for other, j in ((shuffled, order.index(i)), (alone, 0)):
            for mine, yours in zip(together.mask.wait().row(i), other.mask.wait().row(j), strict=True):
                np.testing.assert_array_equal(mine, yours)


def test_close_calls_are_rare():
    """Rows that are only bracketed, because rounding decides them, are few where nothing invites them."""
    rng = np.random.default_rng(0)
    steps = [
        truth(World(50), Request(rng.normal(0, 3, 50).astype(np.float32), params, seed=seed))
        for seed in range(300)
        for params in (SamplingParams(top_p=0.9, min_p=0.05), SamplingParams(top_p=0.8, sampling_semantics="hf"))
    ]
    assert not any(close_call(step) for step in steps)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@given(data=st.data())
@settings(max_examples=25)
def test_c10_nan_or_infinity_ends_its_row_and_no_other(impl, bad, data):
    V = 12
    world = World(V)
    batch = data.draw(st.lists(requests(V), min_size=2, max_size=4))
    for request in batch:
        request.params = request.params.replace(thinking_token_budget=None)
    spoilt = data.draw(st.integers(0, len(batch) - 1))
    batch[spoilt].logits = batch[spoilt].logits.copy()
    batch[spoilt].logits[data.draw(st.integers(0, V - 1))] = bad
    assert truth(world, batch[spoilt]) is None
    assert_batch(world, batch, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_profile_hf_drops_the_lowest_of_tied_ids_first(impl):
    world = World(16)
    params = SamplingParams(top_p=0.5, sampling_semantics="hf", logprobs=0)
    batch = sampled(Sampler(world.spec(), impl=impl), [Request(np.zeros(16, np.float32), params)])
    assert batch.mask.wait().row(0)[0].tolist() == list(range(8, 16))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_custom_processor_acts_between_bad_words_and_the_thinking_budget(impl):
    class Halve:
        preserves_relative_weights = False

        def apply(self, logits, context):
            return logits * 0.5 + float(len(context.output_token_ids))

        @staticmethod
        def definition(z):
            return z * np.float32(0.5) + np.float32(2)

    rng = np.random.default_rng(0)
    world = World(9, processors=(Halve(),), thinking_start=(0,), thinking_end=(1,))
    options = {"logprobs": 3, "return_sampling_mask_logprobs": True}
    for _ in range(20):
        batch = [
            Request(rng.normal(0, 4, 9).astype(np.float32), params, prompt=[5], output=output, bad_words=[[7]])
            for params, output in [
                (SamplingParams(top_p=0.8, **options), [2, 3]),
                (SamplingParams(thinking_token_budget=1, **options), [0, 3]),
                (SamplingParams(temperature=0, logit_bias={7: 100.0}, **options), [7, 7]),
                (SamplingParams(top_k=3, repetition_penalty=1.4, **options), [2, 3]),
            ]
        ]
        assert_batch(world, batch, impl)
