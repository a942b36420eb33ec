"""Heads whose logits were rounded to half precision: the sampler draws what the exact float32 logits say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from oracle_cases import IMPLS, Request, World, assert_row, logits, requests, wide_logits


class RoundedHead:
    """A head that stored its logits in half precision and can compute any of them exactly."""

    def __init__(self, exact, dtype, noise=0.0):
        self.exact = exact
        wobble = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
        self.logits = (exact + noise * wobble).to(dtype)

    def rescore(self, rows, ids, offsets):
        return self.exact[rows.repeat_interleave(offsets.diff()), ids]

    def float32(self, rows):
        return self.exact[rows].clone()


def assert_exact(world, batch, impl, dtype, noise=0.0):
    sampler = Sampler(world.spec(), impl=impl)
    exact = torch.tensor(np.stack([request.logits for request in batch]))
    drawn = sampler.sample(RoundedHead(exact, dtype, noise), [request.open(sampler) for request in batch])
    for i, request in enumerate(batch):
        assert_row(drawn, i, world, request)


HALF = st.sampled_from([torch.bfloat16, torch.float16])
OPTIONS = {"logprobs": 3, "return_sampling_mask_logprobs": True}

bounded = st.one_of(
    st.fixed_dictionaries({"top_k": st.integers(1, 30)}, optional={"top_p": st.floats(0.01, 1)}),
    st.fixed_dictionaries({"min_p": st.floats(1e-3, 1)}, optional={"top_p": st.floats(0.01, 1)}),
)


def storable(row):
    """The row within the range of float16, whose overflow is a fault of the head."""
    return np.where(row > -np.inf, row.clip(-60_000, 60_000), row)


@pytest.mark.parametrize("impl", IMPLS)
@given(st.data(), HALF, st.sampled_from([40, 700, 3000]))
def test_top_k_and_min_p_requests_are_drawn_from_the_exact_logits(impl, data, dtype, V):
    params = st.builds(
        lambda filters, T, semantics: SamplingParams(temperature=T, sampling_semantics=semantics, **filters, **OPTIONS),
        bounded,
        st.sampled_from([1.0, 0.6, 2.0, 0.0]),
        st.sampled_from(["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"]),
    )
    rows = st.one_of(logits(V), wide_logits(V)) if V < 100 else wide_logits(V)
    batch = [
        Request(storable(row), given, seed=seed)
        for seed, (row, given) in enumerate(data.draw(st.lists(st.tuples(rows, params), min_size=1, max_size=4)))
    ]
    assert_exact(World(V), batch, impl, dtype)


@pytest.mark.parametrize("impl", IMPLS)
@given(st.data(), HALF)
@settings(max_examples=60)
def test_any_request_is_drawn_from_the_exact_logits(impl, data, dtype):
    V = 24
    batch = data.draw(st.lists(requests(V), min_size=1, max_size=4))
    for request in batch:
        request.params = request.params.replace(thinking_token_budget=None)
        request.logits = storable(request.logits)
    assert_exact(World(V), batch, impl, dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_summed_in_another_order_rounds_to_the_neighbour_at_times(impl, dtype):
    V = 4096
    rng = np.random.default_rng(11)
    batch = [
        Request(rng.normal(0, 4, V).astype(np.float32), SamplingParams(**given, **OPTIONS), seed=seed)
        for seed in range(4)
        for given in ({"top_k": 50}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.01}, {"temperature": 0.0}, {"top_p": 0.8})
    ]
    # 2e-5: what float32 sums of a few thousand products differ by at logits of this size.
    assert_exact(World(V), batch, impl, dtype, noise=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_half_precision_ties_hide_the_exact_order(impl):
    # All of these round to one bfloat16, so the stored logits tell nothing of who is in the top three.
    V = 64
    exact = (16 + np.random.default_rng(3).permutation(V) * 2.0**-12).astype(np.float32)
    assert torch.tensor(exact).bfloat16().unique().numel() == 1
    batch = [Request(exact, SamplingParams(**given, **OPTIONS)) for given in ({"top_k": 3}, {"temperature": 0.0})]
    assert_exact(World(V), batch, impl, torch.bfloat16)
