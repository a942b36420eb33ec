from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput, Rollout, WeightVersionSpan
from keepmask.params import SamplingParams


def completion(**fields):
    given = {
        "index": 0,
        "text": "ab",
        "token_ids": [5, 7],
        "logprobs": [{5: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2, "x")}, {7: Logprob(-0.25, 3)}],
        "sampling_mask": SamplingMask.from_lists([[5, 9], [7]]),
        "finish_reason": "stop",
        "stop_reason": 7,
        "weight_versions": [WeightVersionSpan(0, 2, "v1")],
    }
    return CompletionOutput(**given | fields)


def request(*outputs, **fields):
    given = {"request_id": "r1", "prompt": "hi", "prompt_token_ids": [1, 2, 3], "finished": True, "seed": 11}
    return RequestOutput(outputs=list(outputs), **given | fields)


def test_a_rollout_holds_what_its_completion_and_request_hold():
    (rollout,) = request(completion(), sampling_params=SamplingParams(top_p=0.9, logit_bias={3: 1.0})).rollouts()
    assert rollout.request_id == "r1"
    assert rollout.prompt == "hi"
    assert rollout.prompt_token_ids.dtype == np.int32
    assert rollout.prompt_token_ids.tolist() == [1, 2, 3]
    assert rollout.text == "ab"
    assert rollout.token_ids.dtype == np.int32
    assert rollout.token_ids.tolist() == [5, 7]
    assert rollout.logprobs.dtype == np.float32
    assert rollout.logprobs.tolist() == [-0.5, -0.25]
    assert rollout.sampling_mask == SamplingMask.from_lists([[5, 9], [7]])
    assert rollout.seed == 11
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", 7)
    assert rollout.weight_versions == ((0, 2, "v1"),)


def test_a_rollout_names_the_params_that_are_not_defaults():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, top_k=0, sampling_semantics="hf")
    (rollout,) = request(completion(), sampling_params=params).rollouts()
    assert rollout.sampling_params == {"temperature": 0.5, "logit_bias": {3: 1.0}, "sampling_semantics": "hf"}
    assert SamplingParams(**rollout.sampling_params) == params
    (rollout,) = request(completion()).rollouts()
    assert rollout.sampling_params == {}


def test_every_completion_of_a_request_is_one_rollout():
    rollouts = request(completion(), completion(index=1, text="c", token_ids=[7, 7], logprobs=None)).rollouts()
    assert [(r.completion_index, r.text) for r in rollouts] == [(0, "ab"), (1, "c")]
    assert [r.logprobs is None for r in rollouts] == [False, True]
    assert request().rollouts() == []


def test_a_completion_without_tokens_is_a_rollout_without_tokens():
    (rollout,) = request(
        completion(token_ids=[], logprobs=[], sampling_mask=SamplingMask([], [0]), finish_reason="abort")
    ).rollouts()
    assert rollout.token_ids.shape == rollout.logprobs.shape == (0,)
    assert len(rollout.sampling_mask) == 0


def test_a_completion_is_finished_once_it_has_a_reason():
    assert completion().finished()
    assert not completion(finish_reason=None).finished()


def test_rollouts_compare_by_value():
    (mine,), (yours,) = request(completion()).rollouts(), request(completion()).rollouts()
    assert mine == yours
    for change in (
        {"token_ids": np.array([5, 8], np.int32)},
        {"token_ids": np.array([5], np.int32)},
        {"logprobs": None},
        {"policy_logprobs": np.zeros(2, np.float32)},
        {"sampling_mask": SamplingMask.from_lists([[5], [7]])},
        {"sampling_params": {"top_k": 1}},
        {"text": "x"},
    ):
        assert mine != replace(yours, **change)
        assert replace(yours, **change) != mine
    assert mine != "rollout"


def test_a_rollout_is_frozen_and_not_hashable():
    (rollout,) = request(completion()).rollouts()
    with pytest.raises(FrozenInstanceError):
        rollout.text = "x"
    with pytest.raises(TypeError, match="unhashable"):
        hash(rollout)


def test_fields_are_given_by_name():
    with pytest.raises(TypeError):
        Rollout(np.zeros(1, np.int32), np.zeros(1, np.int32))
    with pytest.raises(TypeError):
        CompletionOutput(0, "", [])
