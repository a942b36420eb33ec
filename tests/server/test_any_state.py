"""A request that is ended, in whatever state it is met, is answered with what it has, frees everything, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, until

from keepmask.engine.request import Completion, State

KEY = "key"
GREEDY: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "logprobs": 0, "ignore_eos": True}
PROMPT = list(range(5, 45))
OTHER = list(range(100, 148))


@pytest.fixture(scope="module")
def tight(checkpoint: Path) -> Iterator[Serving]:
    """Two places, prompts in pieces of 16 tokens, and blocks for one long and one short completion."""
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 11 * 8192}
    engine["max_model_len"] = 160
    with Serving(checkpoint, engine=engine, api_keys=(KEY,), enable_weight_updates=True) as serving:
        yield serving


def queued(serving: Serving, ended: Completion) -> bool:
    return ended.state is State.WAITING and not ended.token_ids and serving.engine.stats().num_running == 2


def prefilling(_: Serving, ended: Completion) -> bool:
    return ended.state is State.RUNNING and 0 < ended.num_computed < len(PROMPT)


def decoding(_: Serving, ended: Completion) -> bool:
    return ended.state is State.RUNNING and len(ended.token_ids) >= 3


def preempted(_: Serving, ended: Completion) -> bool:
    return ended.state is State.WAITING and len(ended.token_ids) > 0


def others(serving: Serving, state: Callable[..., bool]) -> list[dict[str, Any]]:
    """Requests that bring the one to be ended into the state."""
    if state is queued:
        return [{"params": {**GREEDY, "max_tokens": 50}}] * 2
    return [{"params": {**GREEDY, "max_tokens": 100}}] if state is preempted else []


@pytest.mark.parametrize("state", [queued, prefilling, decoding, preempted])
@pytest.mark.parametrize("how", ["abort", "leave", "pause"])
def test_request_ended_in_any_state_gives_back_what_it_has(tight: Serving, state: Callable[..., bool], how: str):
    whole = tight.generate(PROMPT, params=GREEDY).json()["choices"][0]
    running = [lambda other=other: tight.generate(OTHER, **other).json() for other in others(tight, state)]
    with tight.slowed(0.015):
        before = [tight.in_background(run) for run in running]
        if running:
            until(lambda: tight.engine.stats().num_running == len(running))
        asked = {"token_ids": PROMPT, "sampling_params": GREEDY, "request_id": "ended"}
        stream = tight.open_stream({**asked, "cache_salt": f"{how} {state.__name__}"})  # nothing is computed already
        until(lambda: tight.service.tickets(["ended"]))
        (ticket,) = tight.service.tickets(["ended"])
        until(lambda: ticket.request is not None)
        (ended,) = ticket.request.completions
        until(lambda: state(tight, ended))
        if how == "leave":
            stream.close()
        elif how == "abort":
            tight.client.post("/abort_requests", json={"request_ids": ["ended"]}).raise_for_status()
        else:
            tight.client.post("/pause", params={"mode": "abort"}).raise_for_status()
            tight.client.post("/resume").raise_for_status()
        until(lambda: ticket.finished)
        assert ended.finish_reason == "abort"
        output = tight.engine.output(ticket.request).outputs[0]
        assert output.sampling_mask is not None
        assert output.logprobs is not None
        got = len(output.token_ids)
        assert (got > 0) == (state in (decoding, preempted))
        assert len(output.sampling_mask) == len(output.logprobs) == got < 60
        assert [span.end for span in output.weight_versions] == ([got] if got else [])
        assert output.token_ids == whole["token_ids"][:got]
        stream.close()
        for each in before:
            each.result()
    tight.settle()
    stats = tight.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    # It goes on from prompt and partial answer.
    rest = tight.generate(PROMPT + output.token_ids, params={**GREEDY, "max_tokens": 60 - got}).json()["choices"][0]
    assert output.token_ids + rest["token_ids"] == whole["token_ids"]
    assert output.sampling_mask.token_ids + rest["sampling_mask"] == whole["sampling_mask"]
