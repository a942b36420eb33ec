"""Requests that a sampler cannot honour are refused at the edge: field, value, rule, remedy."""

import pytest
from sampler_rows import masks, open_row

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler, SamplerSpec


class Identity:
    preserves_relative_weights = True

    def apply(self, logits, context):
        return logits


PLAIN = SamplerSpec(vocab_size=10, banned_token_ids=(3, 4), max_logprobs=5)
VLLM = masks(10, contract="vllm")


@pytest.mark.parametrize(
    ("spec", "fields", "param", "told"),
    [
        (PLAIN, {"logit_bias": {10: 1.0}}, "logit_bias", r"token id 10 must be in \[0, 10\)"),
        (PLAIN, {"allowed_token_ids": [1, 11]}, "allowed_token_ids", "token id 11"),
        (PLAIN, {"stop_token_ids": [12]}, "stop_token_ids", "token id 12"),
        (PLAIN, {"logprobs": 6}, "logprobs", "at most 5"),
        (PLAIN, {"prompt_logprobs": 6}, "prompt_logprobs", "at most 5"),
        (PLAIN, {"allowed_token_ids": [3, 4]}, "allowed_token_ids", "allow at least one"),
        (PLAIN, {"thinking_token_budget": 3}, "thinking_token_budget", "thinking_end_token_ids"),
        (PLAIN, {"return_sampling_mask": True}, "return_sampling_mask", "logprobs_mode='processed_logprobs'"),
        (PLAIN, {"return_sampling_mask_logprobs": True}, "return_sampling_mask_logprobs", "return_sampling_mask=True"),
        (VLLM, {"temperature": 0.0, "top_k": 5}, "temperature", "requires temperature > 0"),
        (VLLM, {"temperature": 1e-6, "top_k": 5}, "temperature", "requires temperature > 0"),
        (VLLM, {"top_p": 0.9}, "top_k", "requires top_k > 0"),
        (VLLM, {"top_k": -1}, "top_k", "requires top_k > 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(spec, fields, param, told):
    with pytest.raises(RequestError, match=told) as caught:
        Sampler(spec).check(SamplingParams(**fields))
    assert caught.value.param == param
    assert param in str(caught.value)


def test_contract_vllm_refuses_masks_with_processors_per_request():
    spec = SamplerSpec(vocab_size=10, contract="vllm", processors=(Identity(),), logprobs_mode="processed_logprobs")
    Sampler(spec).check(SamplingParams(temperature=0.0))
    with pytest.raises(RequestError, match="custom logits processors"):
        Sampler(spec).check(SamplingParams(top_k=5, return_sampling_mask=True))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_k": 0, "top_p": 0.9}, {"min_p": 0.1}])
def test_contract_exact_takes_what_vllm_refuses(fields):
    Sampler(masks(10)).check(SamplingParams(return_sampling_mask_logprobs=True, **fields))


def test_contract_vllm_asks_nothing_of_requests_without_masks():
    Sampler(VLLM).check(SamplingParams(temperature=0.0, return_sampling_mask=False))
    Sampler(VLLM).check(SamplingParams(top_k=3))


def test_ids_of_bad_words_and_prompts_are_checked_when_a_row_is_opened():
    sampler = Sampler(PLAIN)
    for fields, param in (({"bad_words": [[1], [2, 10]]}, "bad_words"), ({"prompt": [1, 10]}, "prompt_token_ids")):
        with pytest.raises(RequestError, match="token id 10") as caught:
            open_row(sampler, **fields)
        assert caught.value.param == param
