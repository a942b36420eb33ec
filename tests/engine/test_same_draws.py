"""A request with a seed draws the same tokens from the same supports, whatever goes on around it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tiny
from keepmask import LLM, SamplingParams
from keepmask.compiled.processor import VARIABLE, available

PARAMS = SamplingParams(
    max_tokens=40,
    seed=11,
    temperature=0.25,
    top_k=40,
    top_p=0.9,
    logprobs=2,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    ignore_eos=True,
    return_sampling_mask_logprobs=True,
)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, dim, tokens, float32


def prompt(at, length=20):
    ids = np.random.default_rng([at, length]).integers(3, tiny.VOCAB_SIZE, size=length)
    return {"prompt_token_ids": ids.tolist()}


@pytest.fixture
def llm(tiny_llm):
    made = tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    yield made
    assert made.engine.num_unfinished == 0
    assert made.engine.stats().num_free_blocks == made.engine.stats().num_blocks


def generate(llm, prompts, params=PARAMS):
    return llm.generate(prompts, params, use_tqdm=False)


def assert_same(one, other, masks=True):
    """The same draws, supports and log-probs, to the bit."""
    assert len(one.outputs) == len(other.outputs)
    for mine, theirs in zip(one.outputs, other.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.finish_reason == theirs.finish_reason
        for left, right in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert list(left) == list(right)
            for entry, match in zip(left.values(), right.values(), strict=True):
                assert (entry.rank, entry.logprob) == (match.rank, match.logprob)
        if masks:
            assert mine.sampling_mask.token_ids == theirs.sampling_mask.token_ids
            assert np.array_equal(mine.sampling_mask.logprobs, theirs.sampling_mask.logprobs)


def test_the_supports_of_these_tests_are_neither_whole_nor_single(llm):
    (output,) = generate(llm, prompt(0))
    counts = output.outputs[0].sampling_mask.counts
    assert counts.max() > 10
    assert counts.min() < 10


def test_asking_for_masks_changes_no_draw(llm):
    without = PARAMS.replace(return_sampling_mask=False, return_sampling_mask_logprobs=False)
    for at in range(3):
        (one,), (other,) = generate(llm, prompt(at)), generate(llm, prompt(at), without)
        assert other.outputs[0].sampling_mask is None
        assert_same(one, other, masks=False)


def test_a_batch_of_32_changes_no_draw(llm):
    prompts = [prompt(at, 5 + at) for at in range(32)]
    every_other_greedy = [PARAMS.replace(temperature=0.0 if at % 2 else 1.0) for at in range(32)]
    together = generate(llm, prompts, every_other_greedy)
    for at in (0, 1, 17, 30):
        (alone,) = generate(llm, prompts[at], every_other_greedy[at])
        assert_same(alone, together[at])


def test_temperatures_near_zero_greedy_and_one_share_a_batch(llm):
    temperatures = [1e-4, 0.0, 1.0, 1e-6, 1e-5]
    params = [PARAMS.replace(temperature=value, top_p=1.0, max_tokens=12) for value in temperatures]
    together = generate(llm, [prompt(60)] * 5, params)
    for at, output in enumerate(together):
        (alone,) = generate(llm, prompt(60), params[at])
        assert_same(alone, output)
        assert np.isfinite(output.outputs[0].sampling_mask.logprobs).all()
        if params[at].greedy:
            assert (output.outputs[0].sampling_mask.counts == 1).all()
    assert [output.outputs[0].token_ids for output in together[:2]] == [together[3].outputs[0].token_ids] * 2


def test_streaming_changes_no_draw(llm):
    (whole,) = generate(llm, prompt(1))
    steps = list(llm.stream(prompt(1), PARAMS))
    assert_same(whole, steps[-1])
    assert [len(step.outputs[0].token_ids) for step in steps] == list(range(1, 41))
    assert [step.finished for step in steps] == [False] * 39 + [True]


@pytest.mark.parametrize("num_blocks", [6, 10])
def test_preemption_changes_no_draw(llm, tiny_llm, num_blocks):
    prompts = [prompt(at, 20 + 3 * at) for at in range(8)]
    tight = tiny_llm(
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
    )
    before = tight.engine.stats()
    outputs = generate(tight, prompts)
    after = tight.engine.stats()
    assert before.num_blocks == num_blocks
    assert after.num_preemptions > before.num_preemptions
    assert (after.num_free_blocks, after.num_running, after.num_waiting) == (num_blocks, 0, 0)
    for one, other in zip(generate(llm, prompts), outputs, strict=True):
        assert_same(one, other)


def test_preemption_changes_no_draw_of_siblings(llm, tiny_llm):
    tight = tiny_llm(
        return_sampling_mask=True, logprobs_mode="processed_logprobs", kv_cache_memory_bytes=7 * BLOCK_BYTES
    )
    before = tight.engine.stats().num_preemptions
    params = PARAMS.replace(n=4)
    for at in range(3):
        (one,), (other,) = generate(llm, prompt(at, 33), params), generate(tight, prompt(at, 33), params)
        assert_same(one, other)
    assert tight.engine.stats().num_preemptions > before


@pytest.mark.parametrize("budget", [1, 9])
def test_the_size_of_chunks_changes_no_draw(llm, tiny_llm, budget):
    chunked = tiny_llm(
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
        max_num_batched_tokens=budget,
    )
    prompts = [prompt(at, 15 + at) for at in range(3)]
    params = PARAMS.replace(n=2, max_tokens=12)
    for one, other in zip(generate(llm, prompts, params), generate(chunked, prompts, params), strict=True):
        assert_same(one, other)


def test_siblings_differ_and_depend_on_nothing_but_their_index(llm):
    (four,) = generate(llm, prompt(2), PARAMS.replace(n=4))
    (two,) = generate(llm, prompt(2), PARAMS.replace(n=2))
    (again,) = generate(llm, prompt(2), PARAMS.replace(n=4))
    assert_same(four, again)
    assert [output.index for output in four.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in four.outputs}) == 4
    assert [output.token_ids for output in two.outputs] == [output.token_ids for output in four.outputs[:2]]


def test_the_prompt_of_siblings_is_computed_once(llm):
    steps = llm.engine.stats().num_steps
    generate(llm, prompt(3, 64), PARAMS.replace(n=4, max_tokens=1))
    assert llm.engine.stats().num_steps - steps == 2  # the prompt; then its last token for each sibling


@pytest.mark.parametrize("length", [16, 17, 32, 47, 48])
def test_a_prefix_from_the_cache_changes_no_draw(llm, length):
    first, second = (generate(llm, prompt(100, length))[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // 16 * 16
    assert_same(first, second)


def test_a_longer_prompt_starts_from_the_shared_prefix(llm):
    start = prompt(101, 40)["prompt_token_ids"]
    generate(llm, {"prompt_token_ids": start})
    (fresh,) = generate(llm, {"prompt_token_ids": [*start[:32], 7, 8, 9]})
    assert fresh.num_cached_tokens == 32
    (other,) = generate(llm, {"prompt_token_ids": [start[0] ^ 1, *start[1:]]})
    assert other.num_cached_tokens == 0


def test_requests_without_a_seed_are_reproducible_in_order_of_arrival(tiny_checkpoint):
    from keepmask import LLM

    def fresh(seed):
        folder = str(tiny_checkpoint("llama"))
        return LLM(folder, skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=2**20, seed=seed)

    params = SamplingParams(max_tokens=8)
    one, same, other = ([generate(llm, prompt(0), params)[0] for _ in range(2)] for llm in map(fresh, (0, 0, 1)))
    assert [output.outputs[0].token_ids for output in one] == [output.outputs[0].token_ids for output in same]
    assert one[0].seed != one[1].seed
    assert one[0].outputs[0].token_ids != one[1].outputs[0].token_ids
    assert one[0].outputs[0].token_ids != other[0].outputs[0].token_ids
    (named,) = generate(fresh(3), prompt(0), params.replace(seed=one[0].seed))
    assert named.outputs[0].token_ids == one[0].outputs[0].token_ids


# ---------------------------------------------------------------- random schedules

LENGTHS = (1, 17, 40, 96, 530)
KINDS = [("float32", "plain"), *(("bfloat16", name) for name in available())]
FEW = PARAMS.replace(max_tokens=4, n=2)
MAX_LEN = 640

schedules = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 16, 24]),
        "max_num_batched_tokens": st.sampled_from([9, 200, 2048]),
        "max_num_seqs": st.sampled_from([1, 3, 64]),
        "tokens": st.sampled_from([MAX_LEN + 64, 50_000]),  # that the cache has room for
    }
)


@dataclass(frozen=True)
class Kind:
    """Engines of one type on some instructions."""

    make: Callable[..., LLM]
    alone: Callable[[int], object]
    """What the prompt at this place gives when nothing else was ever computed."""


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("long"), "qwen3", max_position_embeddings=MAX_LEN)


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request, long_checkpoint, monkeypatch):
    dtype, instructions = request.param
    monkeypatch.setenv(VARIABLE, instructions)
    token_bytes = 2 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)  # layers, keys and values, heads, dim

    def make(*, tokens, block_size=16, **options):
        given = {"dtype": dtype, "device": "cpu", "skip_tokenizer_init": True, "block_size": block_size}
        given |= {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
        room = -(-tokens // block_size) * block_size * token_bytes
        return LLM(str(long_checkpoint), kv_cache_memory_bytes=room, **given | options)

    own = make(tokens=4096)

    @functools.cache
    def alone(at):
        own.engine.reset_prefix_cache()
        return generate(own, prompt(at, LENGTHS[at]), FEW)[0]

    return Kind(make, alone)


def test_no_schedule_changes_a_bit(kind):
    before = torch.get_num_threads()

    @settings(max_examples=5, phases=[Phase.generate])
    @given(
        schedule=schedules,
        order=st.lists(st.integers(0, 4), min_size=1, max_size=6),
        threads=st.sampled_from([1, 2, 4]),
    )
    def check(schedule, order, threads):
        torch.set_num_threads(threads)
        llm = kind.make(**schedule)
        for at, output in zip(order, generate(llm, [prompt(at, LENGTHS[at]) for at in order], FEW), strict=True):
            assert_same(output, kind.alone(at))

    try:
        check()
    finally:
        torch.set_num_threads(before)


def test_a_batch_of_128_changes_no_bit(kind):
    order = [at % 4 for at in range(128)]
    outputs = generate(kind.make(tokens=50_000), [prompt(at, LENGTHS[at]) for at in order], FEW)
    for at, output in zip(order, outputs, strict=True):
        assert_same(output, kind.alone(at))
