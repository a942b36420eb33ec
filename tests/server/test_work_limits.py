"""What one request may ask for, and how much may be under way."""

from __future__ import annotations

from typing import Any

import pytest

from keepmask.config import EngineConfig
from keepmask.engine.ticket import Order
from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.server.error_answers import ApiError
from keepmask.server.settings import ServerConfig
from keepmask.server.work_limits import Admission, answer_bytes, mask_bytes


def order(**params: Any) -> Order:
    return Order(prompt_token_ids=[1, 2, 3], params=SamplingParams(**{"max_tokens": 10, **params}))


def admission(*, max_num_seqs: int = 8, **config: Any) -> Admission:
    return Admission(ServerConfig(**config), EngineConfig(model="m", max_num_seqs=max_num_seqs))


def test_prompts_times_n_is_bounded():
    house = admission(max_completions_per_request=6)
    house.check([order(n=3), order(n=3)])
    with pytest.raises(RequestError, match="at most 6 completions") as raised:
        house.check([order(n=3), order(n=3), order(n=1)])
    assert raised.value.param == "n"


def test_prompts_times_n_times_max_tokens_is_bounded():
    house = admission(max_tokens_per_request=100)
    house.check([order(n=5), order(n=5)])
    with pytest.raises(RequestError, match="110 tokens") as raised:
        house.check([order(n=5), order(n=6)])
    assert raised.value.param == "max_tokens"


def test_request_that_could_never_be_admitted_is_refused_for_good():
    with pytest.raises(RequestError, match="at most 5 completions"):
        admission(max_num_seqs=2, max_waiting=3).check([order(n=6)])


def test_house_is_full_when_its_places_are_taken_and_not_before():
    house = admission(max_num_seqs=2, max_waiting=1)
    charges = []
    for _ in range(3):
        house.check([order()])
        charges.append(house.enter(order()))
    with pytest.raises(ApiError) as raised:
        house.check([order()])
    assert raised.value.status == 429
    assert raised.value.retry_after_s is not None
    charges[0].leave()
    house.check([order()])
    with pytest.raises(ApiError):
        house.check([order(n=2)])


def test_estimate_grows_with_everything_that_takes_memory():
    plain = answer_bytes(order())
    assert answer_bytes(order(max_tokens=20)) > plain
    assert answer_bytes(order(n=2)) > plain
    assert answer_bytes(order(logprobs=0)) > plain
    assert answer_bytes(order(logprobs=5)) > answer_bytes(order(logprobs=0))
    assert answer_bytes(order(prompt_logprobs=1)) > plain
    for lists in ({"allowed_token_ids": [1] * 1000}, {"stop_token_ids": [1] * 1000}, {"logit_bias": {5: 1.0}}):
        assert answer_bytes(order(**lists)) > plain
    assert mask_bytes(order(top_k=20), with_mask=False) == 0
    masked = mask_bytes(order(top_k=20), with_mask=True)
    assert mask_bytes(order(top_k=40), with_mask=True) > masked
    with_logprobs = order(top_k=20, return_sampling_mask=True, return_sampling_mask_logprobs=True)
    assert mask_bytes(with_logprobs, with_mask=True) > masked


def test_supports_beyond_the_estimate_are_charged_as_they_come_and_given_back():
    house = admission(max_answer_bytes=100_000)
    asked = order(top_k=4, return_sampling_mask=True)
    charge = house.enter(asked)
    estimated = house.num_bytes
    assert charge.cover(40) is None  # ten rows of four ids, as estimated
    assert house.num_bytes == estimated
    assert charge.cover(1000) is None
    assert estimated < house.num_bytes <= estimated + 24 * 1000
    held = house.num_bytes
    problem = charge.cover(100_000)
    assert problem is not None
    assert "max_answer_bytes" in problem
    assert house.num_bytes == held  # what is not held is not charged
    with pytest.raises(ApiError):
        house.check([order(max_tokens=1000)])
    charge.leave()
    assert house.num_bytes == house.num_completions == 0


def test_estimate_covers_what_an_answer_really_takes():
    # An id in a list of its own: 8 bytes of pointer and 28 of integer, and at most 8 characters of JSON.
    assert answer_bytes(order(max_tokens=1000)) > 1000 * (8 + 28 + 8)
    assert answer_bytes(order(allowed_token_ids=[300] * 1000)) > 1000 * (8 + 28)
