"""The fast sampler draws what the definition draws, from the same supports, always."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_rows import HalfHead, draw, head_of, masks, open_row, sample, support

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec

MODES = ("processed_logprobs", "processed_logits", "raw_logprobs", "raw_logits")


@st.composite
def filters(draw, V):
    fields = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 0, 1, 3, V // 3 + 1, V]),
        "top_p": st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
        "logprobs": st.sampled_from([None, 0, 1, 5, V]),
        "min_tokens": st.sampled_from([0, 0, 0, 3]),
        "logit_bias": st.sampled_from([{}, {}, {}, {0: 2.5, V - 1: -1.0}]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.0, 1.3]),
        "allowed_token_ids": st.sampled_from([None, None, None, list(range(0, V, 2))]),
        "sampling_semantics": st.sampled_from(["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"]),
    }
    return SamplingParams(**{name: draw(strategy) for name, strategy in fields.items()})


@st.composite
def batches(draw, V):
    B = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    z = rng.normal(0, draw(st.sampled_from([0.0, 0.3, 2.0, 6.0])), (B, V)) + draw(st.sampled_from([0.0, 20.0, -300.0]))
    if draw(st.booleans()):
        z = np.round(z * 2) / 2
    if draw(st.booleans()):
        z[:, rng.random(V) < 0.3] = -np.inf
    return z.astype(np.float32), [draw(filters(V)) for _ in range(B)]


def assert_same(a, b, B, atol=1e-6):
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert {i: str(error) for i, error in a.errors.items()} == {i: str(error) for i, error in b.errors.items()}
    for i in range(B):
        if i in a.errors:
            continue
        if a.mask is not None:
            (ids, logprobs), (other_ids, other_logprobs) = a.mask.wait().row(i), b.mask.wait().row(i)
            np.testing.assert_array_equal(ids, other_ids)
            if logprobs is not None:
                np.testing.assert_allclose(logprobs, other_logprobs, rtol=1e-6, atol=atol)
        mine, other = a.logprobs.row_logprobs(i), b.logprobs.row_logprobs(i)
        assert (mine is None) == (other is None)
        if mine is not None:
            np.testing.assert_allclose(mine.values, other.values, rtol=1e-6, atol=atol)
            np.testing.assert_array_equal(mine.ids, other.ids)
            np.testing.assert_array_equal(mine.ranks, other.ranks)


@pytest.mark.parametrize("V", [5, 40, 300])
@pytest.mark.parametrize("mode", MODES)
@given(st.data())
@settings(max_examples=60)
def test_any_batch(V, mode, data):
    z, params = data.draw(batches(V))
    spec = SamplerSpec(
        vocab_size=V, eos_token_ids=(1,), logprobs_mode=mode, return_sampling_mask=mode == "processed_logprobs"
    )
    if mode == "processed_logprobs":
        params = [p.replace(return_sampling_mask_logprobs=True) for p in params]
    results = []
    for impl in ("fast", "reference"):
        sampler = Sampler(spec, impl=impl)
        rows = [open_row(sampler, p, prompt=[2, 3], seed=9 * b, completion_index=b) for b, p in enumerate(params)]
        results.append(sample(sampler, z, rows))
    assert_same(*results, len(params))


def _cut_before_mass(params, V):
    """Whether the profile leaves top_p a row that another filter has cut."""
    by_top_k = params.top_k not in (0, V) and params.sampling_semantics != "sglang"
    return by_top_k or (params.min_p > 0 and params.sampling_semantics == "vllm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(st.data())
@settings(max_examples=100)
def test_rounded_logits_select_and_exact_ones_decide(dtype, data):
    """All but rows whose top_p takes the mass of the whole row: those sum its tail over rounded logits."""
    V = 300
    z, params = data.draw(batches(V))
    params = [p if _cut_before_mass(p, V) else p.replace(top_p=1.0) for p in params]
    results = []
    for impl in ("fast", "reference"):
        sampler = Sampler(masks(V, eos_token_ids=(1,)), impl=impl)
        rows = [open_row(sampler, p.replace(logprobs=None), prompt=[2], seed=b) for b, p in enumerate(params)]
        results.append(sample(sampler, z, rows, dtype))
    assert_same(*results, len(params))


def test_a_lone_mass_cut_over_rounded_logits_seldom_differs_and_then_by_little():
    V, rng = 2000, np.random.default_rng(0)
    z = rng.normal(0, 3, (64, V)).astype(np.float32)
    supports = []
    for impl in ("fast", "reference"):
        sampler = Sampler(masks(V), impl=impl)
        batch = sample(sampler, z, [open_row(sampler, top_p=0.9, seed=b) for b in range(64)], torch.bfloat16)
        supports.append([set(support(batch, b)) for b in range(64)])
    sizes = np.asarray([len(a) for a in supports[1]])
    off = np.asarray([len(a ^ b) for a, b in zip(*supports, strict=True)])
    assert (off <= 2 + 0.005 * sizes).all()
    assert (off == 0).mean() > 0.5


def test_candidates_of_a_half_precision_head_are_few_and_its_rows_are_not_computed_in_float32():
    z = np.random.default_rng(0).normal(0, 3, (8, 20_000)).astype(np.float32)
    sampler = Sampler(masks(20_000, eos_token_ids=(1,)), impl="fast")
    head = HalfHead(torch.from_numpy(z), torch.bfloat16)
    params = [{"top_k": 50}, {"min_p": 0.1}, {}, {"temperature": 0.0}, {"min_tokens": 3, "top_k": 5}, {"top_k": 9}]
    sampler.sample(head, [open_row(sampler, seed=b, **params[b % 6]) for b in range(8)])
    assert head.num_exact_rows == 0
    sampler.sample(head, [open_row(sampler, logit_bias={5: 1.0})] + [open_row(sampler, top_k=5) for _ in range(7)])
    assert head.num_exact_rows == 1


def test_a_logit_beyond_half_precision_is_drawn_from_its_exact_value():
    sampler = Sampler(masks(4), impl="fast")
    z = [[0.0, 1e6, -1e6, 3.0], [0.0, np.inf, 0.0, 0.0]]
    for fields in ({}, {"top_k": 2}, {"min_tokens": 2}):
        batch = sample(sampler, z, [open_row(sampler, **fields), open_row(sampler, **fields)], torch.float16)
        assert batch.token_ids.tolist() == [1, -1]
        assert "NaN or +inf" in str(batch.errors[1])


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(num_threads, set_threads):
    set_threads(num_threads)
    z = np.random.default_rng(1).normal(0, 2, (33, 70_000)).astype(np.float32)
    fields = [{"top_k": 20}, {"top_p": 0.6}, {}, {"min_p": 0.1, "logprobs": 2}]
    sampler = Sampler(masks(70_000), impl="fast")
    rows = [open_row(sampler, seed=b, **fields[b % 4]) for b in range(33)]
    batch = sample(sampler, z, rows)
    alone = [sample(sampler, z[b : b + 1], [rows[b]]).token_ids[0] for b in range(33)]
    assert batch.token_ids.tolist() == alone


def test_flat_rows_need_all_of_the_vocabulary():
    V = 10_000
    z = np.zeros((3, V), np.float32)
    results = []
    for impl in ("fast", "reference"):
        sampler = Sampler(masks(V), impl=impl)
        rows = [open_row(sampler, top_p=top_p, seed=b) for b, top_p in enumerate((0.3, 0.99995, 0.999999))]
        results.append(sample(sampler, z, rows))
    assert_same(*results, 3)
    assert [len(support(results[0], b)) for b in range(3)] == [3000, 0, 0]


def test_more_equal_logits_than_candidates_are_held():
    V = 20_000
    z = np.zeros((2, V), np.float32)
    z[:, -1] = 1.0
    sampler = Sampler(SamplerSpec(vocab_size=V), impl="fast")
    rows = [open_row(sampler, top_k=2, logprobs=3), open_row(sampler, logprobs=2)]
    batch = sample(sampler, z, rows)
    entry = batch.logprobs.row_logprobs(0)
    others = [token_id for token_id in (V - 1, 0, 1) if token_id != batch.token_ids[0]]
    assert entry.ids.tolist() == [batch.token_ids[0], *others]
    np.testing.assert_allclose(entry.values[0], -np.log(V - 1 + np.e), rtol=1e-6)


def test_a_fast_sampler_has_no_form_for_other_devices():
    class Elsewhere:
        logits = torch.empty(1, 4, device="meta")

    sampler = Sampler(SamplerSpec(vocab_size=4), impl="fast")
    with pytest.raises(ValueError, match="impl='auto'"):
        sampler.sample(Elsewhere(), [open_row(sampler)])


def test_heads_of_padded_rows_are_read_through_their_strides():
    wide = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(masks(40), impl="fast")
    rows = [open_row(sampler, top_k=5, seed=b) for b in range(3)]
    strided, plain = wide[:, :40], wide[:, :40].contiguous()
    assert_same(sampler.sample(DenseHead(strided), rows), sampler.sample(head_of(plain), rows), 3)


def test_a_logit_that_the_temperature_makes_infinite_has_no_weight():
    sampler = Sampler(masks(4), impl="fast")
    batch = draw(sampler, [0.0, 0.0, 0.0, -3.4e38], temperature=0.5, logprobs=3, return_sampling_mask_logprobs=True)
    assert not batch.errors
    ids, logprobs = batch.mask.wait().row(0)
    assert ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(logprobs, -np.log(3), rtol=1e-6)
