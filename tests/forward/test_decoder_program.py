"""A forward in one call is its operations one by one, on all instructions, and nothing depends on the batch."""

import numpy as np
import pytest
from safetensors.torch import load_file

import tiny
from keepmask import LLM, SamplingParams
from keepmask.compiled.processor import VARIABLE, available

V = tiny.VOCAB_SIZE
MODELS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "one head of keys": {"num_key_value_heads": 1},
}
PROMPTS = [np.random.default_rng(at).integers(3, V, size=length).tolist() for at, length in enumerate((21, 1, 49, 16))]
MASKS = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
PARAMS = {"return_sampling_mask_logprobs": True}
PARAMS |= {"max_tokens": 20, "seed": 3, "temperature": 0.5, "top_k": 20, "ignore_eos": True, "logprobs": 3}

SHAPE = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}

models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(params=[("float32", "plain"), *(("bfloat16", name) for name in available())], ids="-".join)
def dtype(request, monkeypatch):
    """The type to compute in, on each of the instructions that this processor has for it."""
    name, instructions = request.param
    monkeypatch.setenv(VARIABLE, instructions)
    return name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by name of a model; every size fits tiles."""
    folder = tmp_path_factory.mktemp("whole")
    architectures = {name: name if name in tiny.ARCHITECTURES else "llama" for name in MODELS}
    return {name: tiny.save(folder / name, architectures[name], **SHAPE | MODELS[name]) for name in MODELS}


@pytest.fixture
def load(checkpoints, dtype):
    """load(name or folder, **options): an engine that scores what it draws from."""

    def make(name, **options):
        given = {"dtype": dtype, "device": "cpu", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
        given |= {"logprobs_mode": "raw_logits"} if "max_logprobs" in options else MASKS
        return LLM(str(checkpoints.get(name, name)), **given | options)

    return make


def generate(llm, prompts=PROMPTS, **params):
    given = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(given, SamplingParams(**PARAMS | params), use_tqdm=False)


def drawn(output):
    """All that an output says of its tokens, to the bit."""
    (completion,) = output.outputs
    scores = [[(token_id, entry.logprob) for token_id, entry in row.items()] for row in completion.logprobs]
    mask = completion.sampling_mask
    return completion.token_ids, scores, mask.token_ids, mask.logprobs.tolist()


def decoder(llm):
    return llm.engine.runner._decoder


@models
def test_one_call_gives_what_its_operations_give(load, name):
    whole, stepwise = load(name), load(name)
    decoder(stepwise)._is_compiled = False
    for one, other in zip(generate(whole), generate(stepwise), strict=True):
        assert drawn(one) == drawn(other)
    assert decoder(whole).seconds().keys() == {"linear", "attention", "model"}
    assert decoder(stepwise).seconds() == {}


@models
def test_a_request_alone_is_what_it_is_in_company(load, name):
    llm = load(name)
    for prompt, together in zip(PROMPTS, generate(llm), strict=True):
        assert drawn(generate(llm, [prompt])[0]) == drawn(together)
    crowd = generate(llm, PROMPTS * 12)  # more tokens than meet a weight at a time
    assert all(drawn(output) == drawn(crowd[at % 4]) for at, output in enumerate(crowd))


def test_drawn_tokens_have_the_logits_they_have_as_a_prompt(load):
    llm = load("llama", max_logprobs=V)
    every = {"logprobs": V, "return_sampling_mask_logprobs": False}
    for output in generate(llm, **every):
        token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        (again,) = generate(llm, [token_ids[:-1]], max_tokens=1, **every)
        assert logits(again, 0) == logits(output, -1)


def test_new_weights_are_computed_with(load, tmp_path):
    new = tiny.save(tmp_path / "new", "qwen2", seed=1, **SHAPE)
    llm, fresh = load("qwen2"), load(new)
    before, after = ([drawn(output) for output in generate(each)] for each in (llm, fresh))
    stage = llm.engine.stage_weights(cast=True)
    stage.add(load_file(new / "model.safetensors"))
    llm.engine.update_weights(stage)
    assert [drawn(output) for output in generate(llm)] == after != before


def logits(output, at):
    return {token_id: entry.logprob for token_id, entry in output.outputs[0].logprobs[at].items()}
