import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.structured_outputs import StructuredOutputsParams

# Every numeric field: its default, the values on its bounds, and values just outside them.
RANGES = {
    "n": (1, [1, 16_384], [0, 16_385]),
    "temperature": (1.0, [0, 1e-5, 1e6], [-0.1, 1.1e6, float("inf"), float("nan")]),
    "top_k": (0, [-1, 0, 2**31 - 1], [-2, 2**31]),
    "top_p": (1.0, [1e-9, 1.0], [0, -0.1, 1.0001, float("nan")]),
    "min_p": (0.0, [0, 1], [-0.1, 1.1]),
    "seed": (None, [-(2**63), -2, 0, 2**64 - 1], [-(2**63) - 1, 2**64]),
    "max_tokens": (16, [1, 2**31 - 1], [0, -1, 2**31]),
    "min_tokens": (0, [0, 16], [-1, 2**31]),
    "logprobs": (None, [-1, 0, 2**31 - 1], [-2, 2**31]),
    "prompt_logprobs": (None, [-1, 0, 2**31 - 1], [-2, 2**31]),
    "presence_penalty": (0.0, [-2, 2], [-2.1, 2.1]),
    "frequency_penalty": (0.0, [-2, 2], [-2.1, 2.1]),
    "repetition_penalty": (1.0, [1e-6, 1e6], [0, -1, 1e-7, 1.1e6, float("inf")]),
    "thinking_token_budget": (None, [0, 2**31 - 1], [-2, 2**31]),
}
FLAGS = [
    "include_stop_str_in_output",
    "ignore_eos",
    "return_sampling_mask",
    "return_sampling_mask_logprobs",
    "skip_special_tokens",
    "detokenize",
]
LISTS = ["stop", "stop_token_ids", "bad_words", "allowed_token_ids"]


def refusal(**fields):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    return caught.value


def test_every_field_is_of_a_kind_these_tests_cover():
    assert {*RANGES, *FLAGS, *LISTS, "logit_bias", "sampling_semantics", "structured_outputs"} == set(
        SamplingParams.model_fields
    )


@pytest.mark.parametrize("name", RANGES)
def test_values_on_the_bounds_are_taken_and_the_default_is_vllms(name):
    default, legal, _ = RANGES[name]
    assert getattr(SamplingParams(), name) == default
    for value in legal:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in RANGES for value in RANGES[name][2]])
def test_values_outside_the_bounds_are_refused_with_the_legal_range(name, value):
    error = refusal(**{name: value})
    assert error.param == name
    assert str(error).startswith(f"{name}={value!r}: must be a")
    assert "[" in str(error) or "(" in str(error)
    assert SamplingParams.model_fields[name].description in str(error)


def test_error_sentences_say_what_came_what_is_legal_and_what_to_do():
    assert str(refusal(top_p=1.5)) == (
        "top_p=1.5: must be a number in (0, 1]. Keep the most likely ids until their mass reaches top_p; 1.0 keeps all."
    )
    assert str(refusal(top_k=-2)) == (
        "top_k=-2: must be an integer in [-1, 2147483647]. "
        "Keep the k highest logits; 0 or -1 keeps all. Of ties with the k-th the profile keeps the lowest ids, or all."
    )
    assert str(refusal(min_tokens=17)) == "min_tokens=17: must not exceed max_tokens=16"


@pytest.mark.parametrize("name", RANGES)
def test_numbers_are_not_made_of_other_things(name):
    for value in ("1", True, [1], {"a": 1}, 1j, b"1"):
        assert refusal(**{name: value}).param == name
    if RANGES[name][0] is not None and name != "max_tokens":
        assert refusal(**{name: None}).param == name


@pytest.mark.parametrize("name", [name for name, (default, *_) in RANGES.items() if not isinstance(default, float)])
def test_integers_are_not_made_of_floats(name):
    assert refusal(**{name: 1.0}).param == name


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name):
    for value in (True, False):
        params = SamplingParams(**{"return_sampling_mask": True, name: value} if "logprobs" in name else {name: value})
        assert getattr(params, name) is value
    for value in (0, 1, "true", [True]):
        assert refusal(**{name: value}).param == name


def test_an_unknown_field_is_refused_by_name():
    error = refusal(topp=0.9)
    assert error.param == "topp"
    assert str(error).startswith("topp: unknown sampling parameter; known are allowed_token_ids, bad_words, ")
    assert "top_p" in str(error)


@pytest.mark.parametrize("minus_one", [-1, np.int64(-1)])
def test_minus_one_means_none_where_vllm_means_that(minus_one):
    params = SamplingParams(seed=minus_one, thinking_token_budget=minus_one)
    assert (params.seed, params.thinking_token_budget) == (None, None)
    assert params == SamplingParams()


# ---------------------------------------------------------------- strings, lists and the bias


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_string_is_a_list_of_one_and_none_is_empty(name):
    assert getattr(SamplingParams(**{name: "ab"}), name) == ["ab"]
    assert getattr(SamplingParams(**{name: None}), name) == []
    assert getattr(SamplingParams(**{name: ["ab", "c"]}), name) == ["ab", "c"]


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_have_a_length_and_are_text(name):
    assert getattr(SamplingParams(**{name: "x" * 1024}), name)
    for value in ("", ["a", ""], "x" * 1025):
        assert refusal(**{name: value}).param == name
    assert "1 to 1024 characters" in str(refusal(**{name: ""}))
    assert "half a surrogate pair" in str(refusal(**{name: "a\ud800"}))
    for value in (5, ("a",), [1], [None], {"a": 1}):
        assert refusal(**{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "most"), [("stop", 64), ("bad_words", 128), ("stop_token_ids", 262_144), ("allowed_token_ids", 262_144)]
)
def test_lists_are_bounded(name, most):
    item = "a" if name in ("stop", "bad_words") else 1
    assert len(getattr(SamplingParams(**{name: [item] * most}), name)) == most
    error = refusal(**{name: [item] * (most + 1)})
    assert error.param == name
    assert len(str(error)) < 400
    assert f"at most {most} items" in str(error)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_are_integers_of_zero_or_more(name):
    assert getattr(SamplingParams(**{name: [0, 5]}), name) == [0, 5]
    assert str(refusal(**{name: [1, -3]})) == f"{name}: token id -3 must be >= 0"
    assert str(refusal(**{name: [1, "b"]})).startswith(f"{name}[1]='b': should be a valid integer.")
    for value in ("12", (1,), {1}, [1.0], [True], 5):
        assert refusal(**{name: value}).param == name


def test_no_stop_tokens_and_no_bias_may_be_spelled_none():
    params = SamplingParams(stop_token_ids=None, logit_bias=None)
    assert params.stop_token_ids == []
    assert params.logit_bias == {}
    assert params == SamplingParams(stop_token_ids=[], logit_bias={})


def test_an_empty_allow_list_is_refused():
    assert refusal(allowed_token_ids=[]).param == "allowed_token_ids"
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None


@given(st.dictionaries(st.integers(0, 2**40), st.floats(-100, 100), max_size=20))
def test_bias_keys_may_come_as_json_spells_them(bias):
    spelled = SamplingParams(logit_bias={str(token_id): value for token_id, value in bias.items()})
    assert spelled == SamplingParams(logit_bias=bias)
    assert spelled.logit_bias == bias


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({3: 100.5}, "{3: 100.5}: a bias must be in [-100, 100]"),
        ({3: -101}, "{3: -101.0}: a bias must be in [-100, 100]"),
        ({3: float("nan")}, "[3]=nan: should be a finite number"),
        ({-1: 0.0}, "token id -1 must be >= 0"),
        ({"-1": 0.0}, "token id -1 must be >= 0"),
        ({"x": 0.0}, "[x]='x': should be a valid integer"),
        ({"--5": 0.0}, "[--5]='--5': should be a valid integer"),
        ({"1.0": 0.0}, "should be a valid integer"),
        ({"٣": 0.0}, "should be a valid integer"),
        ({"9" * 5000: 0.0}, "should be a valid integer"),
        ({"1": 0.0, 1: 1.0}, "given twice"),
        ({"1": 0.0, "01": 1.0}, "given twice"),
        ({1: "2"}, "[1]='2': should be a valid number"),
        ([1], "should be a valid dictionary"),
        (dict.fromkeys(range(1025), 0.0), "at most 1024 items"),
    ],
)
def test_a_bias_that_is_none_is_refused(bias, says):
    error = refusal(logit_bias=bias)
    assert error.param == "logit_bias"
    assert str(error).startswith("logit_bias")
    assert says in str(error)


def test_semantics_is_a_known_profile():
    for name in ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf", None):
        assert SamplingParams(sampling_semantics=name).sampling_semantics == name
    assert "should be 'vllm', 'vllm-torch', 'sglang', 'sglang-torch' or 'hf'" in str(refusal(sampling_semantics="tgi"))


# ---------------------------------------------------------------- fields that must agree


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    assert refusal(min_tokens=3, max_tokens=2).param == "min_tokens"


def test_stop_strings_need_text():
    assert refusal(stop="a", detokenize=False).param == "stop"
    assert SamplingParams(stop_token_ids=[1], detokenize=False).detokenize is False


def test_mask_logprobs_need_a_mask():
    assert refusal(return_sampling_mask_logprobs=True, return_sampling_mask=False).param == (
        "return_sampling_mask_logprobs"
    )
    assert SamplingParams(return_sampling_mask_logprobs=True).return_sampling_mask is None


def test_what_the_filters_and_the_temperature_amount_to():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams(top_k=-1).truncates
    assert not SamplingParams().truncates
    assert SamplingParams(top_k=1).truncates
    assert SamplingParams(top_p=0.99).truncates
    assert SamplingParams(min_p=0.01).truncates


# ---------------------------------------------------------------- NumPy


def test_numpy_numbers_and_arrays_count_as_what_they_hold():
    params = SamplingParams(
        seed=np.int64(3),
        top_k=np.int32(5),
        temperature=np.float32(0.5),
        top_p=np.float64(0.9),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int64(4), 5],
        logit_bias={np.int64(7): np.float32(1.5)},
    )
    assert params == SamplingParams(
        seed=3,
        top_k=5,
        temperature=0.5,
        top_p=0.9,
        ignore_eos=True,
        stop_token_ids=[1, 2],
        allowed_token_ids=[4, 5],
        logit_bias={7: 1.5},
    )
    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert type(params.stop_token_ids[0]) is int


def test_numpy_does_not_soften_the_types():
    for fields in (
        {"top_k": np.float64(3.0)},
        {"seed": np.array([1])},
        {"stop_token_ids": np.array([1.0])},
        {"top_p": np.float32(np.nan)},
        {"n": np.bool_(True)},
    ):
        assert refusal(**fields).param in fields


# ---------------------------------------------------------------- frozen


def test_params_are_frozen():
    params = SamplingParams(top_k=3)
    for name in SamplingParams.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(params, name, None)
    with pytest.raises(ValidationError, match="frozen"):
        del params.top_k


def test_the_callers_lists_are_not_the_params_lists():
    ids, bias = [1, 2], {1: 0.5}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(-1)
    bias[2] = 1e9
    assert params.stop_token_ids == [1, 2]
    assert params.logit_bias == {1: 0.5}
    assert SamplingParams().stop is not SamplingParams().stop


def test_params_hold_lists_so_they_are_no_dictionary_keys():
    with pytest.raises(TypeError, match="unhashable"):
        hash(SamplingParams())


def test_replace_changes_the_copy_alone_and_checks_it_again():
    params = SamplingParams(top_k=3, min_tokens=2)
    changed = params.replace(top_k=7)
    assert (params.top_k, changed.top_k, changed.min_tokens) == (3, 7, 2)
    assert changed == SamplingParams(top_k=7, min_tokens=2)
    with pytest.raises(RequestError, match="top_k=-5"):
        params.replace(top_k=-5)
    with pytest.raises(RequestError, match="topk: unknown"):
        params.replace(topk=5)
    with pytest.raises(RequestError, match="must not exceed max_tokens=1"):
        params.replace(max_tokens=1)


def test_params_go_through_json_pickle_and_copies_unchanged():
    params = SamplingParams(top_p=0.5, stop=["a"], logit_bias={5: 1.0}, seed=2**64 - 1, allowed_token_ids=[1])
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params
    assert SamplingParams(**params.model_dump(exclude_defaults=True)) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params


def test_a_model_around_params_hands_the_request_error_on():
    class Body(BaseModel):
        sampling_params: SamplingParams | None = None

    with pytest.raises(ValidationError) as caught:
        Body(sampling_params={"topp": 0.9})
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("sampling_params",)
    assert isinstance(problem["ctx"]["error"], RequestError)
    assert problem["ctx"]["error"].param == "topp"


def test_a_form_is_given_as_an_object_and_checked():
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=None).structured_outputs is None
    with pytest.raises(RequestError, match="structured_outputs: exactly one of"):
        SamplingParams(structured_outputs={})
    with pytest.raises(RequestError, match="structured_outputs: must be an object"):
        SamplingParams(structured_outputs="a")
