"""The sampler of CUDA devices: the oracle's draws and supports, by its definitions and by its kernels.

Where there is no CUDA device, the kernels run on the CPU under Triton's interpreter.
"""

from typing import get_args

import cuda_oracles
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sampler_rows import HalfHead, masks, open_row, support

from keepmask.config import LogprobsMode
from keepmask.errors import ConfigError, RequestError
from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec
from keepmask.sampling.cuda import capture_triton, decide_triton, device_draw, entries_triton, select_triton
from keepmask.sampling.cuda.draw_records import DRAW
from oracle_cases import Request, World, assert_row, batches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter computes with NumPy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

IMPLS = ["triton", "torch"]
OPTIONS = {"logprobs": 3, "return_sampling_mask_logprobs": True}


class ByDefinition(Sampler):
    """With the kernels' definitions in their place."""

    def sample(self, head, rows):
        with pytest.MonkeyPatch.context() as patch:
            for module in (select_triton, decide_triton, capture_triton, entries_triton):
                for name in module.__all__:
                    patch.setattr(module, name, getattr(cuda_oracles, name))
            return super().sample(head, rows)


def sampler_of(spec, impl):
    """A sampler that works as on a CUDA device, with kernels in this form."""
    return (Sampler if impl == "triton" else ByDefinition)(spec, impl="triton")


def head_of(logits):
    return DenseHead(torch.tensor(np.stack(logits), dtype=torch.float32, device=DEVICE))


def assert_oracles(world, requests, impl):
    sampler = sampler_of(world.spec(), impl)
    batch = sampler.sample(head_of([r.logits for r in requests]), [r.open(sampler) for r in requests])
    for i, request in enumerate(requests):
        assert_row(batch, i, world, request)


@given(batches())
@settings(max_examples=150)
def test_any_batch_by_the_definitions(case):
    assert_oracles(*case, "torch")


@given(batches(max_size=3))
@settings(max_examples=8)
def test_any_batch_by_the_kernels(case):
    assert_oracles(*case, "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_wide_mixed_batch(impl):
    V, rng = 5000, np.random.default_rng(0)
    filters = [
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.7},
        {"min_p": 0.02},
        {"top_k": 2500},  # wider than ids are listed
        {"temperature": 0.0},
        {},
        {"allowed_token_ids": list(range(0, 3000, 2))},
        {"top_p": 0.6, "repetition_penalty": 1.4, "logit_bias": {7: 5.0}, "sampling_semantics": "hf"},
        {"top_k": 8, "top_p": 0.5, "sampling_semantics": "sglang"},
    ]
    requests = [
        Request(
            rng.normal(0, 2, V).astype(np.float32),
            SamplingParams(**given, **OPTIONS),
            prompt=[1, 2],
            output=[7, 3],
            seed=i,
        )
        for i, given in enumerate(filters)
    ]
    assert_oracles(World(V), requests, impl)


@pytest.mark.parametrize(
    ("impl", "mode"),
    [("torch", mode) for mode in get_args(LogprobsMode)] + [("triton", "raw_logprobs"), ("triton", "processed_logits")],
)
def test_every_log_prob_mode_gives_the_reference_entries(impl, mode):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (5, 60)).astype(np.float32)
    logits[3] = 0.5
    params = [
        SamplingParams(top_k=5, temperature=0.7, logprobs=3),
        SamplingParams(logprobs=0),
        SamplingParams(top_p=0.8),
        SamplingParams(logprobs=9, seed=4),
        SamplingParams(temperature=0.0, logprobs=2, logit_bias={5: 4.0}),
    ]
    spec = SamplerSpec(vocab_size=60, logprobs_mode=mode)
    results = []
    for sampler in (sampler_of(spec, impl), Sampler(spec, impl="reference")):
        rows = [open_row(sampler, p, seed=i) for i, p in enumerate(params)]
        results.append(sampler.sample(head_of(logits), rows))
    mine_all, reference = results
    np.testing.assert_array_equal(mine_all.token_ids, reference.token_ids)
    for i in range(5):
        mine, theirs = mine_all.logprobs.row_logprobs(i), reference.logprobs.row_logprobs(i)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.ranks.tolist() == theirs.ranks.tolist()
            np.testing.assert_allclose(mine.values, theirs.values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_the_device_is_unsure_of_is_decided_on_the_host(impl, monkeypatch):
    exact = np.log(np.asarray([0.5, 0.25, 0.125, 0.125])).astype(np.float32)
    share = float(torch.softmax(torch.tensor(exact).double(), -1)[:2].sum())
    tied = np.asarray([1e30, 1e30, 0.0, -np.inf], np.float32)
    requests = [
        Request(exact, SamplingParams(top_p=share, **OPTIONS)),
        Request(exact, SamplingParams(top_k=2, **OPTIONS)),
        Request(tied, SamplingParams(top_k=2, **OPTIONS), seed=3),
    ]
    world = World(4)
    samplers = [sampler_of(world.spec(), impl), Sampler(world.spec(), impl="reference")]
    decided = []

    def counting(step, group, m, definition=device_draw._CudaStep.decide_on_host):
        decided.extend(group.items[m].tolist())
        definition(step, group, m)

    monkeypatch.setattr(device_draw._CudaStep, "decide_on_host", counting)
    batches = [s.sample(head_of([r.logits for r in requests]), [r.open(s) for r in requests]) for s in samplers]
    assert decided == [0, 2]
    np.testing.assert_array_equal(batches[0].token_ids, batches[1].token_ids)
    for i in range(3):
        for mine, theirs in zip(batches[0].mask.wait().row(i), batches[1].mask.wait().row(i), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_best_of_thousands_of_equal_logits_are_listed_all_the_same(impl):
    V = 6000
    sampler = sampler_of(masks(V), impl)
    batch = sampler.sample(head_of([np.zeros(V)]), [open_row(sampler, logprobs=3)])
    entry = batch.logprobs.row_logprobs(0)
    assert [i for i in entry.ids.tolist() if i != batch.token_ids[0]] == [0, 1, 2]
    np.testing.assert_allclose(entry.values, -np.log(V), rtol=1e-6)
    assert support(batch) == []


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_cannot_be_drawn_fail_alone(impl):
    logits = np.random.default_rng(2).normal(0, 1, (6, 40)).astype(np.float32)
    logits[0, 3], logits[1, 39], logits[4, 5] = np.nan, np.inf, np.nan
    sampler = sampler_of(masks(40), impl)
    rows = [
        open_row(sampler, top_k=3, logprobs=1),
        open_row(sampler, logprobs=1),
        open_row(sampler, bad_words=[[i] for i in range(40)]),
        open_row(sampler, top_p=0.5, logprobs=1),
        open_row(sampler, allowed_token_ids=[1, 2]),
        open_row(sampler, min_p=0.1),
    ]
    batch = sampler.sample(head_of(logits), rows)
    assert sorted(batch.errors) == [0, 1, 2, 4]
    assert all(isinstance(error, RequestError) for error in batch.errors.values())
    assert "NaN" in str(batch.errors[0])
    assert "no token is left" in str(batch.errors[2])
    assert batch.token_ids[[0, 1, 2, 4]].tolist() == [-1] * 4
    for i in (3, 5):
        assert batch.token_ids[i] in support(batch, i)
    with pytest.raises(KeyError):
        batch.mask.wait().row(0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_processor_that_raises_ends_its_request_only(impl):
    class Fussy:
        preserves_relative_weights = True

        def apply(self, logits, context):
            if context.params.top_k == 2:
                raise ValueError("no twos")
            return logits

    sampler = sampler_of(masks(30, processors=(Fussy(),)), impl)
    rows = [open_row(sampler, top_k=k) for k in (3, 2, 4)]
    batch = sampler.sample(head_of(np.random.default_rng(0).normal(0, 1, (3, 30))), rows)
    assert list(batch.errors) == [1]
    assert len(support(batch, 0)) == 3
    assert len(support(batch, 2)) == 4


@pytest.mark.parametrize("impl", IMPLS)
def test_half_precision_logits_are_replaced_by_the_exact_ones(impl):
    exact = torch.tensor(16 + np.random.default_rng(3).permutation(64) * 2.0**-12, dtype=torch.float32)[None]
    world = World(64)
    request = Request(exact[0].numpy(), SamplingParams(top_k=3, **OPTIONS))
    sampler = sampler_of(world.spec(), impl)
    head = HalfHead(exact.to(DEVICE), torch.bfloat16)
    assert_row(sampler.sample(head, [request.open(sampler)]), 0, world, request)


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_of_any_strides_are_read_right(impl):
    spread = torch.tensor(np.random.default_rng(9).normal(0, 2, (6, 80)), dtype=torch.float32, device=DEVICE)
    sampler = sampler_of(masks(40), impl)
    rows = [open_row(sampler, top_p=0.9, top_k=7, seed=i) for i in range(3)]
    for view in (spread[::2, ::2], spread[:3, 7:47], spread.T.reshape(40, 12)[:, 3:9:2].T):
        assert view.shape == (3, 40)
        mine = sampler.sample(DenseHead(view), rows)
        expected = Sampler(masks(40), impl="reference").sample(DenseHead(view.contiguous()), rows)
        assert mine.token_ids.tolist() == expected.token_ids.tolist()
        for i in range(3):
            assert support(mine, i) == support(expected, i)


def test_only_what_was_asked_for_is_copied():
    V, started = 5000, []
    sampler = sampler_of(masks(V), "torch")
    rows = [
        open_row(sampler, top_k=4),
        open_row(sampler, top_k=9, return_sampling_mask=False),
        open_row(sampler, top_k=7, return_sampling_mask_logprobs=True),
        open_row(sampler, top_k=3000),
        open_row(sampler),
    ]
    logits = np.random.default_rng(4).normal(0, 1, (5, V))
    sampler.sample(head_of(logits), rows)
    copies = sampler._on_device._copies[DEVICE]
    start = copies.start
    copies.start = lambda tensors: started.append([tuple(t.shape) for t in tensors]) or start(tensors)
    batch = sampler.sample(head_of(logits), rows)
    draws, supports = started
    assert draws == [(5, len(DRAW))]
    assert supports == [
        (4 + 7 + 3000,),
        (4 + 7 + 3000,),
    ]  # ids and log-probs side by side, of the rows that return them
    assert [len(support(batch, i)) for i in (0, 2, 3, 4)] == [4, 7, 3000, 0]
    assert batch.mask.wait().row(2)[1].size == 7


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_without_masks_copies_no_supports(impl):
    sampler = sampler_of(SamplerSpec(vocab_size=50), impl)
    batch = sampler.sample(head_of(np.random.default_rng(5).normal(0, 1, (2, 50))), [open_row(sampler, top_k=4)] * 2)
    assert batch.mask is None
    assert batch.logprobs.row_logprobs(0) is None


def test_kernels_without_a_device_or_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(device_draw, "interpreted", lambda: False)
    sampler = Sampler(masks(9), impl="triton")
    with pytest.raises(ConfigError, match="logits on cpu: needs Triton's interpreter; use impl='auto'"):
        sampler.sample(DenseHead(torch.zeros(1, 9)), [open_row(sampler)])


def test_the_form_of_cuda_devices_can_be_asked_for_by_name():
    assert Sampler(masks(9), impl="triton").impl == "triton"
    with pytest.raises(ConfigError, match="impl='gpu': must be 'auto', 'reference', 'fast' or 'triton'"):
        Sampler(masks(9), impl="gpu")
