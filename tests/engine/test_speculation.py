"""Speculation decides how many tokens a step gives, and nothing else: to the bit, whatever is guessed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from keepmask import LLM, SamplingParams
from keepmask.config import EngineConfig, SpeculativeConfig
from keepmask.drafts import StepCost, SuffixDrafter
from keepmask.engine.speculation import Speculation
from keepmask.errors import ConfigError

FREE = StepCost({1: 1.0, 100: 1.0})
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, dim, tokens, float32


class Oracle:
    """Guesses what it was told of a seed and a completion, wrong with a given chance; tokens at random elsewhere."""

    step_s = 0.0

    def __init__(self, told, wrong, seed=0):
        self.told, self.wrong, self.rng = told, wrong, np.random.default_rng(seed)

    def expect(self, _prompt):
        pass

    def release(self, _prompt):
        pass

    def open(self, prompt_token_ids, *, params, seed, completion_index):
        return OracleRow(self, self.told.get((seed, completion_index), []))

    def propose(self, rows, most):
        return [row.propose(count) for row, count in zip(rows, most, strict=True)]


class OracleRow:
    def __init__(self, oracle, tokens):
        self.oracle, self.tokens, self.at = oracle, tokens, 0

    def append(self, _token_id):
        self.at += 1

    def propose(self, most):
        rng = self.oracle.rng
        known = self.tokens[self.at : self.at + most]
        draft = known + rng.integers(0, tiny.VOCAB_SIZE, size=max(0, most - len(known))).tolist()
        return [int(rng.integers(tiny.VOCAB_SIZE)) if rng.random() < self.oracle.wrong else each for each in draft]

    def close(self):
        pass


def with_oracle(llm, told, wrong, most=5):
    """Let the engine verify the oracle's guesses, as many as there are."""
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=most)
    speculation = Speculation(config, Oracle(told, wrong), FREE)
    llm.engine.speculate(speculation)
    return speculation


@pytest.fixture
def plain(tiny_llm):
    return tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")


@pytest.fixture(scope="module")
def speculative(tiny_checkpoint):
    """speculative(method, **options): an engine that guesses, with masks on."""

    def make(method="ngram", num_speculative_tokens=5, **options):
        return LLM(
            str(tiny_checkpoint("llama")),
            skip_tokenizer_init=True,
            **{"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 2**22} | options,
            return_sampling_mask=True,
            logprobs_mode="processed_logprobs",
            speculative_config={"method": method, "num_speculative_tokens": num_speculative_tokens},
        )

    return make


@pytest.fixture(scope="module")
def guessing(speculative):
    return speculative()


def prompt(at, length=20):
    ids = np.random.default_rng([at, length]).integers(3, tiny.VOCAB_SIZE, size=length)
    return {"prompt_token_ids": ids.tolist()}


def told_of(outputs):
    return {(output.seed, one.index): list(one.token_ids) for output in outputs for one in output.outputs}


def assert_equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert list(left.token_ids) == list(right.token_ids)
            assert (left.finish_reason, left.stop_reason, left.text) == (
                right.finish_reason,
                right.stop_reason,
                right.text,
            )
            assert left.logprobs == right.logprobs
            assert left.cumulative_logprob == right.cumulative_logprob
            assert left.sampling_mask == right.sampling_mask
            assert left.weight_versions == right.weight_versions


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_k": st.sampled_from([0, 5, 40]),
        "top_p": st.sampled_from([0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "presence_penalty": st.sampled_from([0.5]),
        "min_tokens": st.sampled_from([3, 9]),
        "stop_token_ids": st.sampled_from([list(range(3, 40))]),
        "logit_bias": st.sampled_from([{5: 3.0, 2: 4.0}]),
        "allowed_token_ids": st.sampled_from([list(range(2, 60))]),
        "logprobs": st.sampled_from([0, 3]),
        "n": st.sampled_from([1, 3]),
        "return_sampling_mask": st.sampled_from([True, False]),
        "return_sampling_mask_logprobs": st.just(False),
    },
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=4),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    most=st.integers(1, 7),
)
def test_guesses_change_no_bit_of_any_request(plain, guessing, changes, wrong, most):
    prompts = [prompt(at, 5 + 7 * at) for at in range(len(changes))]
    params = [SamplingParams(**{"max_tokens": 12, "seed": at, **change}) for at, change in enumerate(changes)]
    expected = plain.generate(prompts, params, use_tqdm=False)
    speculation = with_oracle(guessing, told_of(expected), wrong, most)
    steps = guessing.engine.stats().num_steps
    assert_equal(guessing.generate(prompts, params, use_tqdm=False), expected)
    stats = guessing.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if not wrong:  # every guess that could be tested was drawn
        longest = max(len(one.token_ids) for output in expected for one in output.outputs)
        assert stats.num_steps - steps <= 2 + -(-longest // (most + 1)) + (max(len(o.outputs) for o in expected) > 1)
        if longest > 1:
            assert speculation.num_accepted > 0


def test_completions_under_pressure_for_blocks_are_the_same(plain, speculative):
    params = SamplingParams(max_tokens=24, seed=11, temperature=0.25, top_k=40, logprobs=1, ignore_eos=True)
    prompts = [prompt(at, 20 + 3 * at) for at in range(6)]
    expected = plain.generate(prompts, params, use_tqdm=False)
    tight = speculative(kv_cache_memory_bytes=7 * BLOCK_BYTES)
    with_oracle(tight, {}, 0.5)
    before = tight.engine.stats().num_preemptions
    assert_equal(tight.generate(prompts, params, use_tqdm=False), expected)
    assert tight.engine.stats().num_preemptions > before


def test_weights_that_change_between_steps_are_told_by_the_versions(plain, guessing):
    params = SamplingParams(max_tokens=20, seed=3, temperature=0.25, top_k=40, ignore_eos=True)
    (expected,) = plain.generate([prompt(0)], params, use_tqdm=False)
    with_oracle(guessing, told_of([expected]), 0.0, most=4)
    steps, version = [], guessing.engine.weight_version
    for output in guessing.stream(prompt(0), params):
        steps.append(len(output.outputs[0].token_ids))
        guessing.engine.rename_weights(f"v{len(steps)}")
    guessing.engine.rename_weights(version)
    assert steps == [5, 10, 15, 20]
    spans = output.outputs[0].weight_versions
    assert [(span.start, span.end) for span in spans] == [(0, 5), (5, 10), (10, 15), (15, 20)]


def test_it_may_be_switched_on_and_off_in_the_middle_of_a_run(plain, guessing):
    params = SamplingParams(n=2, max_tokens=20, seed=3, temperature=0.25, top_k=40, logprobs=1, ignore_eos=True)
    (expected,) = plain.generate([prompt(0)], params, use_tqdm=False)
    config = SpeculativeConfig(method="siblings", num_speculative_tokens=4)
    guessing.engine.speculate(None)
    outputs = []
    for count, output in enumerate(guessing.stream(prompt(0), params)):
        outputs.append(output)
        if count % 3 == 0:
            guessing.engine.speculate(Speculation(config, SuffixDrafter("siblings", shortest=1), FREE))
        elif count % 3 == 2:
            guessing.engine.speculate(None)
    assert_equal(outputs[-1:], [expected])


def test_aborted_requests_free_what_their_guesses_took(guessing):
    with_oracle(guessing, {}, 0.0)
    request = guessing.engine.add("a", prompt(0)["prompt_token_ids"], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        guessing.engine.step()
    guessing.engine.abort(["a"])
    assert request.completions[0].finish_reason == "abort"
    stats = guessing.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("method", ["ngram", "siblings", "history"])
def test_each_method_gives_the_same_tokens_in_fewer_steps(plain, speculative, method):
    params = SamplingParams(n=3, max_tokens=60, seed=3, temperature=0.02, top_k=40, logprobs=0, ignore_eos=True)
    llm = speculative(method, num_speculative_tokens=6)
    llm.engine._speculation._cost = FREE
    expected = plain.generate([prompt(5)], params, use_tqdm=False)
    for _ in range(2):
        steps, stats = llm.engine.stats().num_steps, llm.engine.stats()
        assert_equal(llm.generate([prompt(5)], params, use_tqdm=False), expected)
        steps = llm.engine.stats().num_steps - steps
    assert llm.engine.stats().num_accepted_tokens > stats.num_accepted_tokens
    assert steps < (20 if method == "history" else 61)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "draft_model"}, "model=None with method='draft_model'"),
        ({"method": "ngram", "model": "smollm2-135m"}, "model='smollm2-135m' with method='ngram'"),
        ({"method": "eagle"}, "method='eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"method": "ngram", "rollouts": ["a.parquet"]}, "rollouts: are for method='history'"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "must not be above prompt_lookup_max=3"),
        ({"method": "ngram", "draft": 3}, "draft: unknown"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**fields)


def test_the_contract_of_vllm_has_no_masks_under_speculation():
    with pytest.raises(ConfigError, match="speculative_config with sampling_mask_contract='vllm'"):
        EngineConfig(model="m", speculative_config={"method": "ngram"}, sampling_mask_contract="vllm")
