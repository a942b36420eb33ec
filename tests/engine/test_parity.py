"""The chain from sampler to trainer: batch of 1 = batch of n, decode = prefill, engine = a plain forward."""

import numpy as np
import plain
import pytest
import torch
from fake_engine import preempt_all
from transformers import AutoModelForCausalLM

import tiny
from keepmask import SamplingParams
from oracle import log_softmax

V = tiny.VOCAB_SIZE
LENGTHS = (21, 1, 33, 8)
PROMPTS = [np.random.default_rng(at).integers(3, V, size=length).tolist() for at, length in enumerate(LENGTHS)]

architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
blocks = pytest.mark.parametrize("block_size", [16, 4])


def engine(tiny_llm, architecture, **options):
    """An engine that shows every logit it draws from."""
    return tiny_llm(architecture, logprobs_mode="raw_logits", max_logprobs=V, **options)


def generate(llm, prompts, **params):
    params = {"max_tokens": 16, "ignore_eos": True, "logprobs": V, "seed": 5} | params
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**params), use_tqdm=False)


def drawn_logits(output):
    return plain.rows(output.outputs[0].logprobs, V)


@architectures
@blocks
def test_logits_of_every_drawn_token_are_those_of_a_plain_forward(tiny_llm, tiny_checkpoint, architecture, block_size):
    for output in generate(engine(tiny_llm, architecture, block_size=block_size), PROMPTS):
        token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        expected = plain.logits(tiny_checkpoint(architecture), token_ids)
        start = len(output.prompt_token_ids) - 1
        assert np.abs(drawn_logits(output) - expected[start:-1]).max() < 1e-4


@architectures
def test_a_request_alone_has_the_logits_it_has_in_company(tiny_llm, architecture):
    llm = engine(tiny_llm, architecture)
    for prompt, together in zip(PROMPTS, generate(llm, PROMPTS), strict=True):
        (alone,) = generate(llm, [prompt])
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
        assert np.abs(drawn_logits(alone) - drawn_logits(together)).max() < 1e-4


@architectures
@pytest.mark.parametrize("budget", [2048, 7])
def test_tokens_computed_as_a_prompt_score_as_they_did_when_drawn(tiny_llm, architecture, budget):
    drawn = generate(engine(tiny_llm, architecture), PROMPTS)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in drawn]
    llm = engine(tiny_llm, architecture, max_num_batched_tokens=budget)
    for output, scored in zip(drawn, generate(llm, texts, max_tokens=1, prompt_logprobs=V), strict=True):
        assert scored.prompt_logprobs[0] is None
        again = plain.rows(scored.prompt_logprobs[len(output.prompt_token_ids) :], V)
        assert np.abs(again - log_softmax_rows(drawn_logits(output))).max() < 1e-4


@architectures
@pytest.mark.parametrize("budget", [2048, 7])
def test_prompt_logprobs_are_those_of_a_plain_forward(tiny_llm, tiny_checkpoint, architecture, budget):
    llm = engine(tiny_llm, architecture, max_num_batched_tokens=budget)
    for output in generate(llm, PROMPTS, max_tokens=1, prompt_logprobs=V, n=2):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is None
        expected = log_softmax_rows(plain.logits(tiny_checkpoint(architecture), output.prompt_token_ids)[:-1])
        for entry, target, row in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], expected, strict=True):
            assert next(iter(entry)) == target
            assert np.abs(plain.row(entry, V) - row).max() < 1e-4
            assert entry[target].rank == 1 + (row > row[target]).sum()


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(tiny_llm):
    llm = engine(tiny_llm, "llama", max_num_batched_tokens=7)
    (expected,) = generate(llm, PROMPTS[:1], max_tokens=1, prompt_logprobs=V)
    params = SamplingParams(max_tokens=1, prompt_logprobs=V)
    request = llm.engine.add("preempted", PROMPTS[0], params)
    for _ in range(3):
        llm.engine.step()
        preempt_all(llm.engine._scheduler)
    while not request.finished:
        llm.engine.step()
    shown = llm.engine.output(request).prompt_logprobs
    assert shown[0] is None
    assert np.abs(plain.rows(shown[1:], V) - plain.rows(expected.prompt_logprobs[1:], V)).max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
    ],
)
def test_the_windows_and_softcaps_of_these_models_make_a_difference(tiny_checkpoint, architecture, change):
    folder = tiny_checkpoint(architecture)
    other = AutoModelForCausalLM.from_pretrained(
        folder, config=tiny.config(architecture, **change), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    difference = np.abs(plain.logits(folder, PROMPTS[2]) - plain.logits_of(other, PROMPTS[2]))
    assert difference[-1].max() > 0.05
    if architecture == "mistral":
        assert difference[: tiny.WINDOW].max() < 1e-4


@architectures
def test_greedy_takes_the_highest_logit_of_a_plain_forward(tiny_llm, tiny_checkpoint, architecture):
    for output in generate(engine(tiny_llm, architecture), PROMPTS, temperature=0, logprobs=None):
        token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        expected = plain.logits(tiny_checkpoint(architecture), token_ids)[len(output.prompt_token_ids) - 1 : -1]
        drawn = np.array(output.outputs[0].token_ids)
        assert (expected.max(1) - expected[np.arange(drawn.size), drawn]).max() < 1e-4


def log_softmax_rows(logits):
    return np.array([log_softmax(row) for row in logits]).reshape(-1, V)
