"""The log-probs and logits returned with a token, in all four modes, against the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler, prompt_logprobs
from oracle_cases import ABSOLUTE, IMPLS, RELATIVE, Request, World, batches, close_call, logits, sampled, truth

MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


def whole_row(step, request, mode):
    """[V] values of a mode, -inf where it has none."""
    processed = np.full(request.logits.size, -np.inf)
    processed[step.ids] = step.logprobs
    return {
        "raw_logprobs": step.raw_logprobs,
        "processed_logprobs": processed,
        "raw_logits": request.logits.astype(np.float64),
        "processed_logits": step.logits.astype(np.float64),
    }[mode]


def representable(row):
    """The row with differences that float32 log-probs can hold, at any temperature."""
    return np.where(row > -np.inf, row.clip(-1e30, 1e30), row)


def assert_entries(got, values, token_id, num_logprobs):
    """The token's entry first, then the top ones: as many as asked for and finite, in order, with their ranks."""
    best = np.sort(values[values > -np.inf])[::-1]
    top = best[:num_logprobs]
    np.testing.assert_array_equal(np.isfinite(got.values), True)
    assert got.ids[0] == token_id
    assert len(set(got.ids.tolist())) == got.ids.size == got.values.size == got.ranks.size
    np.testing.assert_allclose(got.values, values[got.ids], rtol=RELATIVE, atol=ABSOLUTE)
    # The token may be one of the top ones: without it they are the best others.
    others = got.values[1:]
    assert others.size in (top.size, top.size - 1)
    with_token = np.sort(got.values if others.size < top.size else others)[::-1]
    np.testing.assert_allclose(with_token, top, rtol=RELATIVE, atol=ABSOLUTE)
    assert (np.diff(others) <= 0).all()
    for value, rank in zip(got.values, got.ranks, strict=True):
        slack = ABSOLUTE + RELATIVE * abs(value)
        assert 1 + (values > value + slack).sum() <= rank <= (values >= value - slack).sum()
    assert len(set(got.ranks.tolist())) == got.ranks.size


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", MODES)
@given(batches(max_size=4), st.data())
@settings(max_examples=60)
def test_each_request_gets_the_log_probs_it_asked_for(impl, mode, case, data):
    world, batch = case
    for request in batch:
        asked = data.draw(st.one_of(st.none(), st.integers(0, 20)))
        request.params = request.params.replace(logprobs=asked, return_sampling_mask_logprobs=False)
        request.logits = representable(request.logits)
    sampler = Sampler(world.spec(return_sampling_mask=False, logprobs_mode=mode), impl=impl)
    drawn = sampled(sampler, batch)
    for i, request in enumerate(batch):
        step, got = truth(world, request), drawn.logprobs.row_logprobs(i)
        if request.params.logprobs is None or step is None:
            assert got is None
        elif not close_call(step) and np.isfinite(request.logits[step.token_id]):
            assert_entries(got, whole_row(step, request, mode), step.token_id, request.params.logprobs)


@pytest.mark.parametrize("impl", IMPLS)
def test_c15_raw_and_processed_differ_and_processed_sum_to_one(impl):
    z = np.random.default_rng(1).normal(0, 2, 60).astype(np.float32)
    request = Request(z, SamplingParams(temperature=0.5, top_p=0.9, logprobs=20, return_sampling_mask_logprobs=True))
    world = World(60)
    raw = sampled(
        Sampler(world.spec(return_sampling_mask=False, logprobs_mode="raw_logprobs"), impl=impl),
        [Request(z, request.params.replace(return_sampling_mask_logprobs=False))],
    )
    processed = sampled(Sampler(world.spec(), impl=impl), [request])
    assert raw.token_ids[0] == processed.token_ids[0]
    assert abs(raw.logprobs.row_logprobs(0).values[0] - processed.logprobs.row_logprobs(0).values[0]) > 0.1
    _, row = processed.mask.wait().row(0)
    assert np.logaddexp.reduce(row.astype(np.float64)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", MODES)
def test_c16_one_asks_for_five_its_neighbour_for_none_a_third_for_twenty(impl, mode):
    rng = np.random.default_rng(2)
    world = World(100)
    batch = [
        Request(rng.normal(0, 2, 100).astype(np.float32), SamplingParams(top_k=50, logprobs=asked), seed=i)
        for i, asked in enumerate([5, None, 20, 0])
    ]
    drawn = sampled(Sampler(world.spec(return_sampling_mask=False, logprobs_mode=mode), impl=impl), batch)
    assert drawn.logprobs.row_logprobs(1) is None
    for i in (0, 2, 3):
        step = truth(world, batch[i])
        assert_entries(
            drawn.logprobs.row_logprobs(i), whole_row(step, batch[i], mode), step.token_id, batch[i].params.logprobs
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_c17_there_are_no_more_entries_than_the_support_has_members(impl, mode):
    z = np.array([2.0, 1.0, 0.0, -1.0, -np.inf], np.float32)
    world = World(5)
    batch = [Request(z, SamplingParams(logprobs=20, **given)) for given in ({"top_k": 2}, {"temperature": 0}, {})]
    drawn = sampled(Sampler(world.spec(return_sampling_mask=False, logprobs_mode=mode), impl=impl), batch)
    assert [drawn.logprobs.row_logprobs(i).ids.size for i in range(3)] == [2, 1, 4]
    for i in range(3):
        assert np.isfinite(drawn.logprobs.row_logprobs(i).values).all()


@given(st.data(), st.integers(1, 4), st.integers(2, 30), st.integers(0, 35))
def test_prompt_log_probs_are_the_raw_log_softmax(data, T, V, asked):
    rows = np.stack([representable(data.draw(logits(V))) for _ in range(T)])
    rows[:, 0] = 0  # a row of -inf alone has no log-softmax
    targets = [data.draw(st.sampled_from(np.flatnonzero(np.isfinite(row)).tolist())) for row in rows]
    got = prompt_logprobs(torch.tensor(rows), torch.tensor(targets), asked)
    assert len(got) == T
    for row, target, entries in zip(rows, targets, got, strict=True):
        assert_entries(entries, oracle.log_softmax(row), target, asked)
