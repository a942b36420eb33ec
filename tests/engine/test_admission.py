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
        ({"max_tokens": 300}, "max_tokens", "leaves room for 253 in the context of 256"),
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
        ([3] * 256, "prompt", "leaves room for 0 in the context of 256; shorten it"),
        ([3] * 300, "prompt", "leaves room for -44"),
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


@pytest.mark.parametrize(("token_ids", "says"), [([], "is no token of this model"), ([V], f"token id {V}")])
def test_a_bad_word_the_model_cannot_draw_is_refused(llm, token_ids, says):
    tokenizer = SimpleNamespace(encode=lambda _text, add_special_tokens: token_ids)
    admission = Admission(llm.engine.sampler, tokenizer, vocab_size=V, max_model_len=9)
    with pytest.raises(RequestError) as error:
        admission.bad_words(SamplingParams(bad_words=["x"]))
    assert error.value.param == "bad_words"
    assert says in str(error.value)
