"""Clients that leave, engines that fail, queues that fill: what each client sees, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import Serving, events, until

from keepmask.engine.ticket import Ticket
from keepmask.server import stream
from keepmask.server.json_rows import json_pieces

PROMPT = [5, 6, 7, 8]
LONG: dict[str, Any] = {"max_tokens": 400, "top_k": 6, "logprobs": 0, "seed": 3, "ignore_eos": True}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 12}


def body(params: dict[str, Any] = LONG, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": params, "stream": stream, **more}


def drawn(answer: httpx.Response) -> list[Any]:
    """Tokens and supports of the choices."""
    assert answer.status_code == 200, answer.text
    return [(choice["token_ids"], choice["sampling_mask"]) for choice in answer.json()["choices"]]


def test_client_that_leaves_a_stream_frees_its_request_and_disturbs_no_other(serving: Serving):
    expected = drawn(serving.generate(PROMPT, params={**SHORT, "max_tokens": 40}))
    before = serving.holdings()
    with serving.slowed():
        other = serving.in_background(lambda: serving.generate(PROMPT, params={**SHORT, "max_tokens": 40}))
        stream = serving.open_stream(body(request_id="leaver"))
        stream.read_events(2)
        assert serving.service.tickets(["leaver"])
        stream.close()
        until(lambda: not serving.service.tickets(["leaver"]))
        assert drawn(other.result()) == expected
    serving.settle()
    until(lambda: serving.holdings()[2] == before[2])


def test_client_that_leaves_before_a_whole_answer_frees_its_request(serving: Serving):
    with serving.slowed():
        stream = serving.open_stream(body(stream=False, request_id="leaver"))
        until(lambda: serving.engine.num_unfinished)
        stream.close()
        until(lambda: not serving.service.tickets(["leaver"]))
    serving.settle()


def test_client_that_leaves_the_queue_never_runs(checkpoint: Path):
    with Serving(checkpoint, engine={"max_num_seqs": 1}) as serving, serving.slowed():
        running = serving.in_background(lambda: serving.generate(PROMPT, params={**SHORT, "max_tokens": 30}))
        until(lambda: serving.engine.stats().num_running == 1)
        stream = serving.open_stream(body(request_id="queued"))
        until(lambda: serving.engine.stats().num_waiting == 1)
        stream.close()
        until(lambda: not serving.service.tickets(["queued"]))
        assert serving.engine.stats().num_waiting == 0
        assert len(drawn(running.result())[0][0]) == 30


def test_holdings_return_after_many_clients_have_come_and_gone(serving: Serving):
    serving.generate(PROMPT, params=SHORT)
    serving.settle()
    before = serving.holdings()
    with serving.slowed(0.005):
        streams = [serving.open_stream(body()) for _ in range(20)]
        for number, stream in enumerate(streams):
            stream.read_events(number % 4)
        for stream in streams:
            stream.close()
        serving.settle()
    until(lambda: serving.holdings() == before)


@pytest.mark.parametrize("failure", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_failing_forward_answers_everyone_and_closes_the_house(checkpoint: Path, failure: type[BaseException]):
    with Serving(checkpoint) as serving:
        forward, steps = serving.engine.runner.forward, 0

        def failing(*args: Any) -> torch.Tensor:
            nonlocal steps
            steps += serving.engine.num_unfinished == 2  # both have come
            if steps == 8:
                raise failure("the device is lost")
            return forward(*args)

        serving.engine.runner.forward = failing  # type: ignore[method-assign]
        whole = serving.in_background(lambda: serving.generate(PROMPT, params=LONG))
        stream = serving.open_stream(body())
        received = events(stream.read_all())
        answer = whole.result()
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert "the device is lost" in answer.json()["error"]["message"]
        assert "token_ids" in received[0]["choices"][0]
        assert received[-1]["error"]["code"] == 500
        health = serving.client.get("/health")
        assert health.status_code == 503
        assert "the device is lost" in health.json()["error"]["message"]
        refused = serving.generate(PROMPT, params=SHORT)
        assert refused.status_code == 503
        assert not serving.service.tickets()
        assert serving.service.admission.num_completions == 0
        assert serving.service.admission.num_bytes == 0
        stream.close()
    assert serving.server.exit_code == 1


def test_delivery_that_fails_ends_its_own_request_only(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    deliver = Ticket.deliver

    def failing(ticket: Ticket, *news: Any, **options: Any) -> None:
        if ticket.order.prompt_token_ids[0] == 99:
            raise KeyError("lost")
        deliver(ticket, *news, **options)

    monkeypatch.setattr(Ticket, "deliver", failing)
    with serving.slowed(0.005):
        others = [serving.in_background(lambda: serving.generate(PROMPT, params=SHORT)) for _ in range(2)]
        assert serving.generate([99, 6], params=SHORT).status_code == 500
        assert [len(drawn(each.result())[0][0]) for each in others] == [12, 12]
    serving.settle()


class Fragile:
    """Fails for requests whose first prompt token is 99."""

    preserves_relative_weights = True

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        if context.prompt_token_ids[0] == 99 and len(context.output_token_ids) == 3:
            raise ValueError("no such thing")
        return logits


def test_failing_processor_ends_its_own_request_only(checkpoint: Path):
    with Serving(checkpoint, processors=[Fragile()]) as serving:
        expected = drawn(serving.generate(PROMPT, params=SHORT))
        with serving.slowed(0.005):
            other = serving.in_background(lambda: serving.generate(PROMPT, params=SHORT))
            answer = serving.generate([99, 6], params=SHORT)
            streamed = serving.stream([99, 6], params=SHORT)
        (choice,) = answer.json()["choices"]
        assert answer.status_code == 200
        assert choice["finish_reason"] == "error"
        assert "no such thing" in choice["stop_reason"]
        assert len(choice["token_ids"]) == len(choice["sampling_mask"]) == 3
        assert streamed[-1]["choices"][0]["finish_reason"] == "error"
        assert drawn(other.result()) == expected
        assert serving.client.get("/health").status_code == 200


def test_answer_that_cannot_be_built_ends_its_own_request_only(checkpoint: Path):
    with Serving(checkpoint) as serving:
        delta, output = serving.engine.delta, serving.engine.output

        def failing_delta(completion: Any, start: int, text_start: int) -> Any:
            if completion.request.prompt_token_ids[0] == 99 and start == 3:
                raise KeyError("text")
            return delta(completion, start, text_start)

        def failing_output(request: Any) -> Any:
            if request.prompt_token_ids[0] == 99:
                raise KeyError("text")
            return output(request)

        serving.engine.delta, serving.engine.output = failing_delta, failing_output  # type: ignore[method-assign]
        streamed = serving.stream([99, 6], params=SHORT)
        assert sum(len(event["choices"][0]["token_ids"]) for event in streamed[:-1]) == 3
        assert streamed[-1]["error"]["code"] == 500
        assert serving.generate([99, 6], params=SHORT).status_code == 500
        assert serving.generate(PROMPT, params=SHORT).status_code == 200
        serving.settle()


def test_mask_budget_ends_its_own_request_with_whole_rows(checkpoint: Path):
    with Serving(checkpoint, engine={"max_mask_bytes_per_request": 100}) as serving:
        (choice,) = serving.generate(PROMPT, params=LONG).json()["choices"]
        assert choice["finish_reason"] == "error"
        assert "max_mask_bytes_per_request" in choice["stop_reason"]
        assert len(choice["token_ids"]) == len(choice["sampling_mask"]) < 20
        assert all(len(row) == 6 for row in choice["sampling_mask"])


def test_full_queue_is_429_with_retry_after_until_there_is_room(checkpoint: Path):
    with Serving(checkpoint, engine={"max_num_seqs": 1}, max_waiting=2) as serving, serving.slowed():
        taken = [serving.in_background(lambda: serving.generate(PROMPT, params=SHORT)) for _ in range(3)]
        until(lambda: serving.service.admission.num_completions == 3)
        refused = serving.generate(PROMPT, params=SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert [len(drawn(each.result())[0][0]) for each in taken] == [12, 12, 12]
        assert serving.generate(PROMPT, params=SHORT).status_code == 200


def test_memory_estimate_is_held_before_admission(checkpoint: Path):
    with Serving(checkpoint, max_answer_bytes=300_000) as serving, serving.slowed(0.002):
        first = serving.in_background(lambda: serving.generate(PROMPT, params={**LONG, "max_tokens": 300}))
        until(lambda: serving.service.admission.num_completions == 1)
        refused = serving.generate(PROMPT, params={**LONG, "max_tokens": 300})
        assert refused.status_code == 429
        assert "memory" in refused.json()["error"]["message"]
        never = serving.generate(PROMPT, params={**LONG, "n": 4})
        assert never.status_code == 400
        assert never.json()["error"]["param"] == "max_tokens"
        assert first.result().status_code == 200
        serving.settle()
        assert serving.service.admission.num_bytes == 0


def test_slow_reader_holds_nobody_up_and_loses_nothing(checkpoint: Path):
    params = {**LONG, "n": 4, "logprobs": 20, "top_k": 40}
    with Serving(checkpoint, send_buffer=4096) as serving:
        whole = serving.generate(PROMPT, params=params).json()
        with contextlib.closing(serving.open_stream(body(params, request_id="slow"), receive_buffer=4096)) as stream:
            (ticket,) = _ticket(serving, "slow")
            until(lambda: ticket.finished)
            assert serving.generate(PROMPT, params=SHORT).status_code == 200
            assert ticket._chunks, "the client's buffers took everything: the test shows nothing"
            received = events(stream.read_all())
    for choice in whole["choices"]:
        chunks = [event["choices"][0] for event in received if event["choices"][0]["index"] == choice["index"]]
        for name in ("token_ids", "sampling_mask"):
            assert list(chain.from_iterable(chunk[name] for chunk in chunks)) == choice[name]
        content = list(chain.from_iterable(chunk["logprobs"]["content"] for chunk in chunks))
        assert content == choice["logprobs"]["content"]
        assert max(len(chunk["token_ids"]) for chunk in chunks) > 1


def test_long_answers_are_written_where_nobody_waits_for_them(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    threads: dict[int, str] = {}

    def noting(data: Any) -> Any:
        threads[threading.get_ident()] = threading.current_thread().name
        return json_pieces(data)

    monkeypatch.setattr(stream, "json_pieces", noting)

    def written_by(path: str, **request: Any) -> set[str]:
        threads.clear()
        answer = serving.client.post(path, json=request)
        assert answer.status_code == 200, answer.text
        return set(threads.values())

    for path, prompt in (
        ("/inference/v1/generate", "token_ids"),
        ("/v1/completions", "prompt"),
        ("/generate", "input_ids"),
    ):
        for tokens_each, loop in ((20, True), (300, False)):
            params = {"n": 8, "top_k": 2, "ignore_eos": True}
            if path == "/generate":
                request = {"sampling_params": {**params, "max_new_tokens": tokens_each}, "return_sampling_mask": True}
            elif path == "/v1/completions":
                request = {**params, "max_tokens": tokens_each}
            else:
                request = {"sampling_params": {**params, "max_tokens": tokens_each}}
            assert (written_by(path, **{prompt: PROMPT}, **request) == {"test-server"}) == loop


def test_reader_that_takes_nothing_is_given_up(checkpoint: Path):
    params = {**LONG, "n": 4, "logprobs": 20, "top_k": 40}
    with Serving(checkpoint, write_timeout_s=0.3, send_buffer=4096) as serving:
        before = serving.holdings()
        stream = serving.open_stream(body(params, request_id="stuck"), receive_buffer=4096)
        (ticket,) = _ticket(serving, "stuck")
        until(lambda: ticket.finished)
        until(lambda: serving.holdings()[0] == before[0])
        with pytest.raises(AssertionError, match="cut off"):
            stream.read_all()
        stream.close()


def test_request_that_takes_too_long_ends_with_what_it_has(checkpoint: Path):
    with Serving(checkpoint, request_timeout_s=0.3) as serving, serving.slowed():
        started = time.monotonic()
        (choice,) = serving.generate(PROMPT, params=LONG).json()["choices"]
        assert time.monotonic() - started < 5
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) == len(choice["sampling_mask"]) < 400
        chunks = [event["choices"][0] for event in serving.stream(PROMPT, params=LONG)]
        assert chunks[-1]["finish_reason"] == "abort"
        spans = chunks[-1]["weight_versions"]
        assert spans == [{"start": 0, "end": sum(len(chunk["token_ids"]) for chunk in chunks), "version": "default"}]


def test_requests_that_had_to_give_up_their_place_are_answered_the_same(serving: Serving, checkpoint: Path):
    prompts = [list(range(start, start + 40)) for start in (10, 60, 110, 160, 210, 260)]
    params = {**LONG, "max_tokens": 60}
    expected = [drawn(serving.generate(prompt, params=params)) for prompt in prompts]
    with Serving(checkpoint, engine={"kv_cache_memory_bytes": 16 * 16384, "max_model_len": 128}) as tight:
        asked = [tight.in_background(lambda prompt=prompt: tight.generate(prompt, params=params)) for prompt in prompts]
        assert [drawn(each.result()) for each in asked] == expected
        assert tight.engine.stats().num_preemptions > 0


def _ticket(serving: Serving, name: str) -> list[Any]:
    until(lambda: serving.service.tickets([name]))
    return serving.service.tickets([name])


def test_supports_wider_than_expected_are_charged_and_end_their_request_where_memory_is_short(checkpoint: Path):
    params = {"max_tokens": 200, "top_k": 500, "temperature": 3.0, "ignore_eos": True}
    with Serving(checkpoint, max_answer_bytes=1_000_000) as serving:
        (choice,) = serving.generate(PROMPT, params=params).json()["choices"]
        assert choice["finish_reason"] == "error"
        assert "max_answer_bytes" in choice["stop_reason"]
        assert 0 < len(choice["token_ids"]) == len(choice["sampling_mask"]) < 200
        assert 700_000 < 24 * sum(map(len, choice["sampling_mask"])) < 1_000_000 + 24 * 500
        assert serving.generate(PROMPT, params=SHORT).status_code == 200
        serving.settle()
        assert serving.service.admission.num_bytes == 0


def test_health_is_told_while_a_wide_answer_is_written(checkpoint: Path):
    params = {"max_tokens": 400, "n": 16, "top_k": 500, "temperature": 3.0, "ignore_eos": True}
    with Serving(checkpoint) as serving:
        wide = serving.in_background(lambda: serving.generate(PROMPT, params=params))
        until(lambda: serving.engine.num_unfinished)
        slowest, size = 0.0, 0
        with httpx.Client(base_url=serving.url) as client:
            while wide.running():
                began_s = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - began_s)
        for choice in wide.result().json()["choices"]:
            assert len(choice["token_ids"]) == len(choice["sampling_mask"]) == 400
            size += sum(map(len, choice["sampling_mask"]))
        assert size > 2_000_000
        assert slowest < 1.0  # a second on a busy machine; the whole answer takes several to write
