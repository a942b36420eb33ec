from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from keepmask import LLM, RequestError, SamplingParams
from keepmask.engine.admission import Admission

V = tiny.VOCAB_SIZE
NO_TOKENIZER = "this engine has none"


@pytest.fixture(scope="module")
def llm(tiny_with_text):
    return LLM(str(tiny_with_text), dtype="float32", device="cpu", kv_cache_memory_bytes=2**21)


def state(llm):
    return llm.engine.stats(), llm.engine.num_unfinished


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias", f"token id {V} must be in [0, {V})"),
        ({"allowed_token_ids": [3, 9999]}, "allowed_token_ids", "token id 9999"),
        ({"stop_token_ids": [V]}, "stop_token_ids", f"token id {V}"),
        (
            {"max_tokens": 300},
            "max_tokens",
            "maximum context length is 256 tokens, and the prompt of 3 leaves room for 253",
        ),
        ({"max_tokens": None, "min_tokens": 254}, "min_tokens", "leaves room for 253"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"return_sampling_mask": True}, "return_sampling_mask", "logprobs_mode='processed_logprobs'"),
        ({"return_sampling_mask_logprobs": True}, "return_sampling_mask_logprobs", "set return_sampling_mask=True"),
    ],
)
def test_params_that_cannot_be_served_are_refused_by_field_and_change_nothing(llm, params, param, says):
    before = state(llm)
    with pytest.raises(RequestError) as error:
        llm.engine.add("r", [3, 4, 5], SamplingParams(**params))
    assert error.value.param == param
    assert str(error.value).startswith(param)
    assert says in str(error.value)
    assert state(llm) == before


@pytest.mark.parametrize(
    ("prompt", "param", "says"),
    [
        ([], "prompt", "is empty"),
        (np.zeros(0, np.int64), "prompt", "is empty"),
        ([3] * 256, "prompt", "maximum context length is 256 tokens, and the prompt has 256; shorten it"),
        ([3] * 300, "prompt", "maximum context length is 256 tokens, and the prompt has 300"),
        ([3, V], "prompt_token_ids", f"token id {V} must be in [0, {V})"),
        ([3, -1], "prompt_token_ids", "token id -1"),
        ([3, 2**70], "prompt_token_ids", "must be a list of integers"),
        ([3, 4.5], "prompt_token_ids", "[3, 4.5]: must be a list of integers"),
        ([3, None], "prompt_token_ids", "must be a list of integers"),
        ([True, False], "prompt_token_ids", "must be a list of integers"),
        ([[3, 4]], "prompt_token_ids", "must be a list of integers"),
        ([[3, 4], [5]], "prompt_token_ids", "must be a list of integers"),
        ("text", "prompt_token_ids", "'text': must be a list of integers"),
        (["3", "4"], "prompt_token_ids", "must be a list of integers"),
        (None, "prompt_token_ids", "None: must be a list of integers"),
        (7, "prompt_token_ids", "7: must be a list of integers"),
    ],
)
def test_a_prompt_that_is_none_of_the_models_is_refused_and_changes_nothing(llm, prompt, param, says):
    before = state(llm)
    with pytest.raises(RequestError) as error:
        llm.engine.add("r", prompt, SamplingParams())
    assert error.value.param == param
    assert says in str(error.value)
    assert len(str(error.value)) < 250
    assert state(llm) == before


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_token_ids_come_in_any_sequence(llm, kind):
    request = llm.engine.add("kinds", kind([3, 4]), SamplingParams())
    assert request.prompt_token_ids == [3, 4]
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}
    llm.engine.abort(["kinds"])


def test_a_request_id_is_taken_until_its_request_ends(llm):
    llm.engine.add("same", [3], SamplingParams())
    with pytest.raises(RequestError, match="in use by an unfinished request") as error:
        llm.engine.add("same", [3], SamplingParams())
    assert error.value.param == "request_id"
    llm.engine.abort(["same"])
    llm.engine.add("same", [3], SamplingParams())
    llm.engine.abort(["same"])


def test_params_of_another_type_are_refused(llm):
    with pytest.raises(RequestError, match="must be SamplingParams, got dict"):
        llm.engine.add("r", [3], {"n": 1})


@pytest.mark.parametrize("params", [{"stop": "x"}, {"bad_words": "x"}])
def test_what_needs_a_tokenizer_is_refused_without_one(tiny_llm, params):
    with pytest.raises(RequestError, match=NO_TOKENIZER) as error:
        tiny_llm().engine.add("r", [3], SamplingParams(**params))
    assert [error.value.param] == list(params)


def test_resolving_fills_the_context_and_changes_nothing(llm):
    before = state(llm)
    assert llm.engine.resolve([3] * 6, SamplingParams(max_tokens=None)).max_tokens == 250
    params = SamplingParams(max_tokens=250)
    assert llm.engine.resolve([3] * 6, params) == params
    with pytest.raises(RequestError):
        llm.engine.resolve([3] * 6, SamplingParams(stop_token_ids=[V]))
    assert state(llm) == before


def test_what_does_not_fit_the_context_can_be_told_by_its_code(llm):
    for prompt_len, params in ((256, {}), (300, {}), (250, {"max_tokens": 7}), (250, {"min_tokens": 7})):
        with pytest.raises(RequestError, match="maximum context length is 256 tokens") as error:
            llm.engine.resolve([3] * prompt_len, SamplingParams(**params))
        assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError) as error:
        llm.engine.resolve([], SamplingParams())
    assert error.value.code is None


def test_what_the_context_has_no_room_for_can_be_cut(llm):
    assert llm.engine.resolve([3] * 250, SamplingParams(max_tokens=7), cut=True).max_tokens == 6
    assert llm.engine.resolve([3] * 250, SamplingParams(max_tokens=5), cut=True).max_tokens == 5
    with pytest.raises(RequestError, match="maximum context length"):
        llm.engine.resolve([3] * 256, SamplingParams(), cut=True)


@pytest.mark.parametrize(("contract", "resolved"), [("exact", [0, 1e-6, 0.005, 0.01]), ("vllm", [0, 0.01, 0.01, 0.01])])
def test_contract_vllm_raises_the_temperatures_that_vllm_raises(tiny_llm, contract, resolved):
    engine = tiny_llm(sampling_mask_contract=contract).engine
    asked = [SamplingParams(temperature=temperature) for temperature in (0, 1e-6, 0.005, 0.01)]
    assert [engine.resolve([3], params).temperature for params in asked] == resolved


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_minus_one_logprobs_are_those_of_the_whole_vocabulary(tiny_llm, mode):
    llm = tiny_llm(max_logprobs=-1, logprobs_mode=mode)
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2, seed=5, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)
    assert (output.sampling_params.logprobs, output.sampling_params.prompt_logprobs) == (V, V)
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert sorted(entry) == list(range(V))
        assert sum(np.exp(each.logprob) for each in entry.values()) == pytest.approx(1, abs=1e-4)
    with pytest.raises(RequestError, match=rf"logprobs={V}: this engine returns at most 20"):
        tiny_llm().engine.resolve([3], SamplingParams(logprobs=-1))


def test_requests_of_seed_minus_one_draw_apart(tiny_llm):
    outputs = tiny_llm().generate([{"prompt_token_ids": [3, 4]}] * 4, SamplingParams(seed=-1), use_tqdm=False)
    assert len({output.seed for output in outputs}) == 4
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1


def spelled(word):
    return tiny.byte_tokenizer().encode(word, add_special_tokens=False)


def supports(llm, words, max_tokens=1, **params):
    request = llm.engine.add("w", [3, 4], SamplingParams(bad_words=words, max_tokens=max_tokens, **params))
    llm.engine.abort(["w"])
    return request.completions[0].row.bad_words


def test_a_bad_word_is_banned_at_the_start_and_after_a_space(llm):
    single = supports(llm, ["a", " "]).banned(np.zeros(0, np.int64))
    assert set(single) == {*spelled("a"), *spelled(" ")}
    two = supports(llm, ["  ab"])  # spaces before a word count for nothing
    assert two.banned(np.array(spelled("a"))) == spelled("b")
    assert two.banned(np.array(spelled("b"))) == []


class Spellings:
    """A tokenizer that spells "ab" as two tokens, and " ab" as one, which only contract exact bans."""

    def __init__(self):
        self.added_tokens_decoder = {}

    def encode(self, text, add_special_tokens):
        return {"ab": [5, 6], " ab": [7]}[text]


@pytest.mark.parametrize(("contract", "words"), [("exact", [[5, 6], [7]]), ("vllm", [[5, 6]])])
def test_a_bad_word_is_banned_however_it_is_spelled(tiny_llm, contract, words):
    sampler = tiny_llm(sampling_mask_contract=contract).engine.sampler
    admission = Admission(sampler, Spellings(), vocab_size=V, max_model_len=9)
    assert admission.bad_words(SamplingParams(bad_words=["ab"])) == words


@pytest.mark.parametrize(("token_ids", "says"), [([], "is no token of this model"), ([V], f"token id {V}")])
def test_a_bad_word_the_model_cannot_draw_is_refused(llm, token_ids, says):
    tokenizer = SimpleNamespace(encode=lambda _text, add_special_tokens: token_ids, added_tokens_decoder={})
    admission = Admission(llm.engine.sampler, tokenizer, vocab_size=V, max_model_len=9)
    with pytest.raises(RequestError) as error:
        admission.bad_words(SamplingParams(bad_words=["x"]))
    assert error.value.param == "bad_words"
    assert says in str(error.value)
