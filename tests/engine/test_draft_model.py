"""A smaller model's guesses: its tokens drawn with the engine's noise, its cache, and the engine's draws unchanged."""

from __future__ import annotations

import numpy as np
import pytest

import tiny
from keepmask import LLM, SamplingParams
from keepmask.drafts import StepCost
from keepmask.errors import ConfigError

FREE = StepCost({1: 1.0, 100: 1.0})
PARAMS = SamplingParams(n=2, max_tokens=24, seed=3, temperature=0.5, top_k=40, top_p=0.95, logprobs=1, ignore_eos=True)


def prompt(at, length=20):
    ids = np.random.default_rng([at, length]).integers(3, tiny.VOCAB_SIZE, size=length)
    return {"prompt_token_ids": ids.tolist()}


@pytest.fixture(scope="module")
def guessed_by(tiny_checkpoint):
    """guessed_by(folder, **options): an engine over the tiny Llama, guessed by the model in the folder."""

    def make(folder, **options):
        config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 5} | options
        llm = LLM(
            str(tiny_checkpoint("llama")),
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu",
            kv_cache_memory_bytes=2**22,
            return_sampling_mask=True,
            logprobs_mode="processed_logprobs",
            speculative_config={"kv_cache_memory_bytes": 2**22} | config,
        )
        llm.engine._speculation._cost = FREE
        llm.engine._speculation._drafter.step_s = 0.0
        return llm

    return make


def drafter_of(llm):
    return llm.engine._speculation._drafter


def assert_equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert list(left.token_ids) == list(right.token_ids)
            assert left.logprobs == right.logprobs
            assert left.sampling_mask == right.sampling_mask


@pytest.fixture
def plain(tiny_llm):
    return tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")


def test_the_model_itself_guesses_every_token(plain, guessed_by, tiny_checkpoint):
    llm = guessed_by(tiny_checkpoint("llama"))
    prompts = [prompt(0), prompt(1, 33)]
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    assert_equal(llm.generate(prompts, PARAMS, use_tqdm=False), expected)
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    assert drafter_of(llm)._pool.num_free == drafter_of(llm)._pool.num_blocks


def test_another_model_changes_no_draw_whatever_it_guesses(plain, guessed_by, tmp_path):
    other = tiny.save(tmp_path / "other", "llama", seed=1)
    llm = guessed_by(other)
    params = [PARAMS, PARAMS.replace(repetition_penalty=1.3, temperature=0.0), PARAMS.replace(min_tokens=5, top_k=3)]
    prompts = [prompt(at, 5 + 9 * at) for at in range(3)]
    assert_equal(llm.generate(prompts, params, use_tqdm=False), plain.generate(prompts, params, use_tqdm=False))
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert drafter_of(llm)._pool.num_free == drafter_of(llm)._pool.num_blocks


def test_a_cache_too_small_for_all_guesses_for_some(plain, guessed_by, tiny_checkpoint):
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    llm = guessed_by(tiny_checkpoint("llama"), kv_cache_memory_bytes=5 * block_bytes)
    prompts = [prompt(at, 20) for at in range(4)]
    expected = plain.generate(prompts, PARAMS, use_tqdm=False)
    assert_equal(llm.generate(prompts, PARAMS, use_tqdm=False), expected)
    assert llm.engine.stats().num_draft_tokens > 0


def test_a_model_of_other_tokens_is_refused(guessed_by, tmp_path):
    other = tiny.save(tmp_path / "other", "llama", vocab_size=500)
    with pytest.raises(ConfigError, match=r"its tokens, 500 of them, are not the 512"):
        guessed_by(other)
