"""The HTTP client, against a real server and against servers that answer badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import safetensors.torch

import tiny
from keepmask import BackendError, RequestError, SamplingParams
from keepmask.backends.http import AsyncClient, Client, joined
from keepmask.outputs import Rollout
from server.serving import Serving, until

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(
    max_tokens=12,
    top_k=6,
    n=2,
    seed=4,
    ignore_eos=True,
    logprobs=0,
    return_sampling_mask=True,
    return_sampling_mask_logprobs=True,
    logit_bias={9: 1.5},
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tiny.save(tmp_path_factory.mktemp("served"), "llama")
    engine = {"skip_tokenizer_init": True}
    with Serving(folder, engine=engine, api_keys=("key",), enable_weight_updates=True) as serving:
        yield serving
        serving.settle()


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with Client(serving.url, api_key="key") as client:
        yield client


@pytest.mark.parametrize("form", ["json", "base64"])
def test_rollouts_are_those_of_the_engine(serving: Serving, form: Any):
    answer = serving.generate(
        PROMPT, params={**PARAMS.model_dump(exclude_defaults=True), "logit_bias": {"9": 1.5}}
    ).json()
    with Client(serving.url, api_key="key", mask_format=form) as client:
        rollouts = client.generate(PROMPT, PARAMS, request_id="mine")
    for rollout, choice in zip(rollouts, answer["choices"], strict=True):
        assert rollout.request_id == "mine"
        assert rollout.prompt_token_ids.tolist() == PROMPT
        assert rollout.token_ids.tolist() == choice["token_ids"]
        assert rollout.sampling_mask is not None
        assert rollout.sampling_mask.token_ids == choice["sampling_mask"]
        assert rollout.sampling_mask.logprobs is not None
        assert rollout.logprobs is not None
        assert rollout.logprobs.tolist() == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert rollout.seed == 4
        assert rollout.finish_reason == "length"
        assert [tuple(span) for span in rollout.weight_versions] == [(0, 12, "default")]
        assert SamplingParams(**rollout.sampling_params) == PARAMS


def same(left: list[Rollout], right: list[Rollout]) -> None:
    """Equal but for rounding of log-probs, which depends on what else is in the batch."""
    for a, b in zip(left, right, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.sampling_mask is not None
        assert b.sampling_mask is not None
        assert a.sampling_mask.token_ids == b.sampling_mask.token_ids
        assert a.logprobs is not None
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        for name in ("prompt_token_ids", "finish_reason", "weight_versions", "seed", "completion_index"):
            assert str(getattr(a, name)) == str(getattr(b, name)), name


def test_pieces_of_a_stream_join_to_the_rollouts(client: Client):
    whole = client.generate(PROMPT, PARAMS)
    pieces = list(client.stream(PROMPT, PARAMS))
    assert len(pieces) > 2
    same(joined(pieces), whole)


def test_async_client_does_the_same_many_at_a_time(serving: Serving, client: Client):
    prompts = [[token_id, 6, 7] for token_id in range(20, 32)]
    expected = [client.generate(prompt, PARAMS) for prompt in prompts]

    async def main() -> tuple[list[list[Rollout]], list[list[Rollout]]]:
        async with AsyncClient(serving.url, api_key="key") as each:
            whole = await asyncio.gather(*(each.generate(prompt, PARAMS) for prompt in prompts))

            async def stream(prompt: list[int]) -> list[Rollout]:
                return joined([piece async for piece in each.stream(prompt, PARAMS)])

            return whole, await asyncio.gather(*map(stream, prompts))

    whole, streamed = asyncio.run(main())
    for number, truth in enumerate(expected):
        same(whole[number], truth)
        same(streamed[number], truth)


def test_closing_a_stream_aborts_it(serving: Serving, client: Client):
    long = PARAMS.replace(max_tokens=200)
    with serving.slowed():
        stream = client.stream(PROMPT, long, request_id="closed")
        next(stream)
        assert serving.service.tickets(["closed"])
        stream.close()  # type: ignore[attr-defined]
        until(lambda: not serving.service.tickets(["closed"]))

        async def leave() -> None:
            async with AsyncClient(serving.url, api_key="key") as each:
                pieces = each.stream(PROMPT, long, request_id="closed")
                await anext(pieces)
                await pieces.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave())
        until(lambda: not serving.service.tickets(["closed"]))


def test_requests_can_be_aborted_by_name(serving: Serving, client: Client):
    with serving.slowed():
        asked = serving.in_background(lambda: client.generate(PROMPT, PARAMS.replace(max_tokens=200), request_id="x"))
        until(lambda: serving.service.tickets(["x"]))
        with Client(serving.url, api_key="key") as other:
            other.abort(["x"])
        assert [rollout.finish_reason for rollout in asked.result()] == ["abort", "abort"]


def test_async_client_aborts_and_updates_too(serving: Serving, client: Client):
    old = (Path(serving.engine.config.model) / "model.safetensors").read_bytes()

    async def main() -> tuple[list[Rollout], str, Any]:
        async with AsyncClient(serving.url, api_key="key") as each:
            long = PARAMS.replace(max_tokens=200)
            asked = asyncio.create_task(each.generate(PROMPT, long, request_id="y"))
            while not serving.service.tickets(["y"]):
                await asyncio.sleep(0.01)
            await each.abort(["y"])
            start = (await each.get("/weight_info"))["weight_version"]
            version = await each.update_weights([old], version=f"{start}", discard=True)
            return await asked, version, await each.get("/weight_info")

    with serving.slowed():
        rollouts, version, info = asyncio.run(main())
    assert [rollout.finish_reason for rollout in rollouts] == ["abort", "abort"]
    assert info["weight_version"] == version == client.get("/weight_info")["weight_version"]


def test_weights_go_through_the_client(serving: Serving, client: Client, tmp_path: Path):
    start = client.get("/weight_info")["weight_version"]
    tensors = safetensors.torch.load_file(tiny.save(tmp_path / "new", "llama", seed=1) / "model.safetensors")
    names = sorted(tensors)
    parts = [safetensors.torch.save({name: tensors[name] for name in part}) for part in (names[:9], names[9:])]
    assert client.update_weights(parts, version="new") == "new"
    assert client.generate(PROMPT, PARAMS)[0].weight_versions[0].version == "new"
    with pytest.raises(RequestError, match="missing"):
        client.update_weights(parts[:1])
    old = (Path(serving.engine.config.model) / "model.safetensors").read_bytes()
    assert client.update_weights([old], version=start, discard=True) == start


def test_refusals_name_the_field(client: Client, serving: Serving):
    with pytest.raises(RequestError, match="must be in") as raised:
        client.generate([600], PARAMS)
    assert raised.value.param == "token_ids"
    with pytest.raises(RequestError, match="maximum context length"):
        list(client.stream([1] * 600, PARAMS))
    with Client(serving.url) as stranger, pytest.raises(BackendError, match="401"):
        stranger.generate(PROMPT, PARAMS)


def test_nobody_at_the_address():
    with Client("http://127.0.0.1:9", timeout_s=2) as client:
        with pytest.raises(BackendError, match="check that the server runs"):
            client.generate(PROMPT, PARAMS)
        with pytest.raises(BackendError, match="check that the server runs"):
            list(client.stream(PROMPT, PARAMS))
    with pytest.raises(BackendError, match="no address"):
        Client("localhost:8000")


class Answers(HTTPServer):
    """Gives prepared answers, one a request: (status, headers, body)."""

    def __init__(self) -> None:
        self.prepared: list[tuple[int, dict[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            server: Answers

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                status, headers, body = self.server.prepared.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def answers() -> Iterator[Answers]:
    server = Answers()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def good(**changes: Any) -> bytes:
    choice = {"index": 0, "token_ids": [1, 2], "sampling_mask": [[1], [2, 3]], "finish_reason": "stop", **changes}
    return json.dumps({"request_id": "r", "choices": [choice], "seed": 1}).encode()


def test_busy_server_is_asked_again_after_as_long_as_it_says(answers: Answers):
    busy = (429, {"retry-after": "0"}, b'{"error": {"message": "full"}}')
    with Client(f"http://127.0.0.1:{answers.server_port}", retries=2) as client:
        answers.prepared = [busy, (503, {"retry-after": "0"}, b""), (200, {}, good())]
        (rollout,) = client.generate(PROMPT, PARAMS)
        assert rollout.token_ids.tolist() == [1, 2]
        answers.prepared = [busy, busy, busy]
        with pytest.raises(BackendError, match="429: full"):
            client.generate(PROMPT, PARAMS)
        stream = b"data: " + good() + b"\n\ndata: [DONE]\n\n"
        answers.prepared = [busy, (200, {}, stream)]
        assert [piece.token_ids.tolist() for piece in client.stream(PROMPT, PARAMS)] == [[1, 2]]
        answers.prepared = [busy, busy, busy]
        with pytest.raises(BackendError, match="429: full"):
            list(client.stream(PROMPT, PARAMS))

        async def stream_after_waiting() -> list[Rollout]:
            async with AsyncClient(f"http://127.0.0.1:{answers.server_port}", retries=1) as each:
                return [piece async for piece in each.stream(PROMPT, PARAMS)]

        answers.prepared = [busy, (200, {}, stream)]
        assert [piece.token_ids.tolist() for piece in asyncio.run(stream_after_waiting())] == [[1, 2]]
        answers.prepared = [busy, busy]
        with pytest.raises(BackendError, match="429: full"):
            asyncio.run(stream_after_waiting())
        answers.prepared = [(503, {}, b'{"error": {"message": "the engine failed"}}')]
        with pytest.raises(BackendError, match="503: the engine failed"):
            client.generate(PROMPT, PARAMS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"choices": [{}]}',
        b'{"choices": [3]}',
        good(token_ids=[1, 2, 3]),
        good(token_ids=["a", "b"]),
        good(token_ids=[1, 2**40]),
        good(sampling_mask=[[1], [3, 3]]),
        good(sampling_mask={"ids": "!", "counts": ""}),
        good(sampling_mask=[[1]]),
        good(logprobs={"content": []}),
        good(logprobs={"content": [{"token_id": 1, "logprob": 0.0}, {"token_id": 9, "logprob": 0.0}]}),
        good(weight_versions=[{"start": 0}]),
    ],
)
def test_answers_that_are_none_are_a_backend_error(answers: Answers, body: bytes):
    answers.prepared = [(200, {}, body)]
    with Client(f"http://127.0.0.1:{answers.server_port}") as client, pytest.raises(BackendError):
        client.generate(PROMPT, PARAMS)


def test_stream_that_breaks_off_or_fails_is_a_backend_error(answers: Answers):
    with Client(f"http://127.0.0.1:{answers.server_port}") as client:
        answers.prepared = [(200, {}, b"data: " + good() + b"\n\n")]
        with pytest.raises(BackendError, match="ended before its end"):
            list(client.stream(PROMPT, PARAMS))
        answers.prepared = [(200, {}, b'data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n')]
        with pytest.raises(BackendError, match="failed while answering: lost"):
            list(client.stream(PROMPT, PARAMS))
        answers.prepared = [(200, {}, b"data: " + good() + b"\n\ndata: [DONE]\n\n")]
        assert [piece.token_ids.tolist() for piece in client.stream(PROMPT, PARAMS)] == [[1, 2]]
