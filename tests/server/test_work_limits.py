"""What one request may ask for, and how much may be under way."""

from __future__ import annotations

from typing import Any

import pytest

from keepmask.config import EngineConfig
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.server.error_answers import ApiError
from keepmask.server.settings import ServerConfig
from keepmask.server.work_limits import Admission, answer_bytes


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
    tickets = [Ticket(str(number), order()) for number in range(3)]
    for ticket in tickets:
        house.check([ticket.order])
        house.enter(ticket)
    with pytest.raises(ApiError) as raised:
        house.check([order()])
    assert raised.value.status == 429
    assert raised.value.retry_after_s is not None
    tickets[0].fail(RuntimeError())
    tickets[0].fail(RuntimeError())  # counted once
    house.check([order()])
    with pytest.raises(ApiError):
        house.check([order(n=2)])


def test_estimate_grows_with_everything_that_takes_memory():
    plain = answer_bytes(order(), with_mask=False)
    assert answer_bytes(order(max_tokens=20), with_mask=False) > plain
    assert answer_bytes(order(n=2), with_mask=False) > plain
    assert answer_bytes(order(logprobs=0), with_mask=False) > plain
    assert answer_bytes(order(logprobs=5), with_mask=False) > answer_bytes(order(logprobs=0), with_mask=False)
    assert answer_bytes(order(prompt_logprobs=1), with_mask=False) > plain
    for lists in ({"allowed_token_ids": [1] * 1000}, {"stop_token_ids": [1] * 1000}, {"logit_bias": {5: 1.0}}):
        assert answer_bytes(order(**lists), with_mask=False) > plain
    masked = answer_bytes(order(top_k=20), with_mask=True)
    assert masked > plain
    assert answer_bytes(order(top_k=40), with_mask=True) > masked
    with_logprobs = order(top_k=20, return_sampling_mask=True, return_sampling_mask_logprobs=True)
    assert answer_bytes(with_logprobs, with_mask=True) > masked


def test_estimate_covers_what_an_answer_really_takes():
    # An id in a list of its own: 8 bytes of pointer and 28 of integer, and at most 8 characters of JSON.
    assert answer_bytes(order(max_tokens=1000), with_mask=False) > 1000 * (8 + 28 + 8)
    assert answer_bytes(order(allowed_token_ids=[300] * 1000), with_mask=False) > 1000 * (8 + 28)
