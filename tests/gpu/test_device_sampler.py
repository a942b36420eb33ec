"""A step of the sampler on a CUDA device: nothing waits but for the draws, and masks arrive whole whatever follows."""

import numpy as np
import pytest
import torch

from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V = 151_936
CYCLES = 300_000_000
OPTIONS = {"return_sampling_mask_logprobs": True, "logprobs": 3}
FILTERS = [
    {"top_k": 50, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.05},
    {"top_k": 2048},
    {"top_k": 3000, "temperature": 2.0},
    {"temperature": 0.0},
    {},
    {"top_p": 0.8, "sampling_semantics": "sglang", "top_k": 200},
    {"top_p": 0.8, "sampling_semantics": "hf"},
    {"top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {7: 100.0, 9: -100.0}, "allowed_token_ids": list(range(3, 40_000, 3)), "top_p": 0.7},
    {"min_tokens": 5, "top_k": 40, "bad_words": ["x"]},
]


def logits_of(B, kind="spread", seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 2.5, (B, V))
    if kind == "tied":
        z = np.round(2 * z) / 2
    if kind == "flat":
        z[:] = -1.75
    return torch.tensor(z, dtype=torch.float32)


def spec(mode="processed_logprobs"):
    masks = mode == "processed_logprobs"
    return SamplerSpec(vocab_size=V, eos_token_ids=(11,), logprobs_mode=mode, return_sampling_mask=masks)


def rows_of(sampler, filters, **fields):
    rows = []
    for i, given in enumerate(filters):
        options = OPTIONS if sampler.spec.return_sampling_mask else {"logprobs": 3}
        row = sampler.open_row(
            SamplingParams(**given, **options, **fields),
            prompt_token_ids=[1, 2, 5],
            seed=i,
            completion_index=i,
            bad_words_token_ids=[[4], [7, 8]] if "bad_words" in given else [],
        )
        for token_id in (7, 7, V - 1):
            row.append(token_id)
        rows.append(row)
    return rows


@pytest.mark.parametrize("kind", ["spread", "tied", "flat"])
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_draws_supports_and_entries_are_those_of_the_cpu(kind, mode):
    logits = logits_of(len(FILTERS), kind)
    on_gpu, on_cpu = Sampler(spec(mode)), Sampler(spec(mode), impl="reference")
    mine = on_gpu.sample(DenseHead(logits.cuda()), rows_of(on_gpu, FILTERS))
    theirs = on_cpu.sample(DenseHead(logits), rows_of(on_cpu, FILTERS))
    np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
    for i in range(len(FILTERS)):
        one, other = mine.logprobs.row_logprobs(i), theirs.logprobs.row_logprobs(i)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.ranks.tolist() == other.ranks.tolist()
        np.testing.assert_allclose(one.values, other.values, rtol=1e-6, atol=1e-5)
        if mode == "processed_logprobs":
            (ids, logprobs), (their_ids, their_logprobs) = mine.mask.wait().row(i), theirs.mask.wait().row(i)
            np.testing.assert_array_equal(ids, their_ids)
            np.testing.assert_allclose(logprobs, their_logprobs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_a_step_asks_nothing_of_the_device_before_its_draws(mode):
    sampler, head = Sampler(spec(mode)), DenseHead(logits_of(len(FILTERS)).cuda())
    rows = rows_of(sampler, FILTERS)
    sampler.sample(head, rows)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = sampler.sample(head, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not batch.errors


def slow_masks(sampler):
    """Delay the second copy of each step, that of the supports."""
    (copies,) = sampler._on_device._copies.values()
    start, calls = copies.start, []

    def delayed(tensors):
        calls.append(len(tensors))
        if len(calls) % 2 == 0:
            with torch.cuda.stream(copies._stream):
                torch.cuda._sleep(CYCLES)
        return start(tensors)

    copies.start = delayed
    return calls


def test_a_mask_is_pending_until_waited_for_and_whole_whatever_came_meanwhile():
    logits = logits_of(8)
    sampler = Sampler(spec())
    filters = [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 3000}, {}] * 2
    head = DenseHead(logits.cuda())
    rows = rows_of(sampler, filters)
    sampler.sample(head, rows)
    expected = sampler.sample(head, rows).mask.wait()
    calls = slow_masks(sampler)
    batch = sampler.sample(head, rows)
    assert len(calls) == 2
    assert not batch.mask._transfer.ready.query()
    head.logits.fill_(0)  # the next forward may write there at once
    garbage = [torch.full((8, 2048), 9, dtype=torch.int32, device="cuda") for _ in range(64)]
    torch.cuda.current_stream().synchronize()
    mask = batch.mask.wait()
    for i in range(8):
        for mine, theirs in zip(mask.row(i), expected.row(i), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert len(garbage) == 64


def test_masks_of_many_steps_in_flight_do_not_mix():
    sampler, filters = Sampler(spec()), [{"top_k": 5 + i} for i in range(6)]
    rows, logits = rows_of(sampler, filters), [logits_of(6, seed=seed) for seed in range(5)]
    expected = [sampler.sample(DenseHead(z.cuda()), rows).mask.wait() for z in logits]
    slow_masks(sampler)
    pending = [sampler.sample(DenseHead(z.cuda()), rows).mask for z in logits]
    for mask, known in reversed(list(zip(pending, expected, strict=True))):
        for i in range(6):
            np.testing.assert_array_equal(mask.wait().row(i)[0], known.row(i)[0])


def test_abandoned_masks_leave_no_buffer_behind():
    sampler, head = Sampler(spec()), DenseHead(logits_of(4).cuda())
    rows = rows_of(sampler, FILTERS[:4])
    for _ in range(50):
        sampler.sample(head, rows)
    torch.cuda.synchronize()
    sampler.sample(head, rows).mask.wait()
    (copies,) = sampler._on_device._copies.values()
    assert len(copies._buffers) <= 8


def test_logits_between_others_and_on_a_side_stream_are_read_right():
    padded = torch.zeros((3, V + 7))
    padded[:, 3 : 3 + V] = logits_of(3)
    sampler, on_cpu = Sampler(spec()), Sampler(spec(), impl="reference")
    filters = [{"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}, {}]
    expected = on_cpu.sample(DenseHead(padded[:, 3 : 3 + V].contiguous()), rows_of(on_cpu, filters))
    with torch.cuda.stream(torch.cuda.Stream()):
        source = padded.cuda()
        torch.cuda._sleep(CYCLES)
        view = torch.zeros_like(source)
        view.copy_(source)
        batch = sampler.sample(DenseHead(view[:, 3 : 3 + V]), rows_of(sampler, filters))
        np.testing.assert_array_equal(batch.token_ids, expected.token_ids)
        for i in range(3):
            np.testing.assert_array_equal(batch.mask.wait().row(i)[0], expected.mask.wait().row(i)[0])


def test_half_precision_heads_are_asked_for_exact_logits():
    exact = logits_of(2)

    class Half:
        logits = exact.bfloat16().cuda()

        def float32(self, rows):
            return exact.cuda()[rows]

    sampler, on_cpu = Sampler(spec()), Sampler(spec(), impl="reference")
    filters = [{"top_k": 20}, {"top_p": 0.5}]
    mine = sampler.sample(Half(), rows_of(sampler, filters))
    theirs = on_cpu.sample(DenseHead(exact), rows_of(on_cpu, filters))
    np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
