"""Bodies and headers: bounded before they are held, and parsed strictly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Serving

from keepmask.server.body import Bodies

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[Serving]:
    with Serving(checkpoint, max_body_bytes=10_000, max_header_bytes=4096) as serving:
        yield serving


def raw(serving: Serving, request: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", serving.port), timeout=20) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):  # refused before all was sent
            connection.sendall(request)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(2**16):
                received += piece
        return received


def post(body: bytes, *headers: str) -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_declared_length_over_the_limit_is_refused_before_the_body_is_sent(small: Serving):
    answer = raw(small, post(b"", "Content-Length: 1000000000000"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"at most 10000 bytes" in answer
    assert b"connection: close" in answer.lower()


def test_chunked_body_is_refused_once_it_is_over_the_limit(small: Serving):
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    answer = raw(small, post(chunk * 4, "Transfer-Encoding: chunked"))
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_body_at_the_limit_is_read(small: Serving):
    body = json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 1}}).encode()
    answer = small.client.post(PATH, content=body.ljust(10_000), headers={"content-type": "application/json"})
    assert answer.status_code == 200
    answer = small.client.post(PATH, content=body.ljust(10_001), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_headers_over_the_limit_are_refused(small: Serving):
    for headers in (["X-Long: " + "x" * 5_000], ["X-Long: " + "x" * 2**20], [f"X-{n}: y" for n in range(2000)]):
        assert raw(small, post(b"", *headers))[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"")
    assert raw(small, post(b"", "X-Long: " + "x" * 5_000)).startswith(b"HTTP/1.1 431 ")
    assert small.client.get("/version", params={"x": "y" * 5_000}).status_code == 431
    assert small.client.get("/health").status_code == 200


def test_client_that_stops_sending_holds_nothing(small: Serving):
    before = small.holdings()
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(post(b"{", "Content-Length: 100"))
        time.sleep(0.05)
    end = time.monotonic() + 10
    while small.holdings() != before:
        assert time.monotonic() < end


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_other_content_types_are_415(serving: Serving, kind: str):
    headers = {"content-type": kind} if kind else {}
    response = serving.client.post(PATH, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "UnsupportedMediaTypeError"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b"\xff\xfe",
        b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}',
        b'{"token_ids": [1], "sampling_params": {"temperature": Infinity}}',
        b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}',
        b'{"token_ids": [' + b"9" * 5000 + b'], "sampling_params": {}}',
        b'{"token_ids": [1], "sampling_params": {"stop": "\\ud800"}}',
        b'{"token_ids": [1], "sampling_params": {"stop": "\xed\xa0\x80"}}',
        b"[" * 5000,
        b'{"a":' * 1500,
        b'{"token_ids": [1], "sampling_params": {}, "\\u0000": 1}',
    ],
)
def test_bodies_that_are_no_request_are_400(small: Serving, body: bytes):
    response = small.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"]
    assert len(response.content) < 2000


def test_a_million_wrong_entries_cost_one_error(serving: Serving):
    wrong = {
        "token_ids": ["a"] * 10**6,
        "sampling_params": {"logit_bias": {f"x{number}": "y" for number in range(10**5)}},
    }
    started = time.monotonic()
    response = serving.client.post(PATH, json=wrong)
    assert response.status_code == 400
    assert time.monotonic() - started < 5
    response = serving.client.post(PATH, json={**wrong, "token_ids": [1]})
    assert response.status_code == 400
    assert len(response.content) < 2000


@pytest.mark.parametrize("item", [b"[]", b"{}", b"[0]", b'[{"a":[]}]'])
def test_a_million_lists_are_refused_before_any_is_made(serving: Serving, item: bytes):
    wrong = b'{"token_ids": [' + (item + b",") * (8_000_000 // (len(item) + 1)) + b"[]]}"
    worst_s, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal worst_s
        while not done.is_set():
            started = time.monotonic()
            serving.client.get("/health")
            worst_s = max(worst_s, time.monotonic() - started)

    watching = serving.in_background(watch)
    response = serving.client.post(PATH, content=wrong, headers={"content-type": "application/json"})
    done.set()
    watching.result()
    assert response.status_code == 400
    assert "objects and lists; at most 65536" in response.json()["error"]["message"]
    assert worst_s < 0.5  # a second and more where they are made


def test_brackets_in_texts_are_no_lists(serving: Serving):
    texts = ["[{" * 512, '"[' * 512, "\\[" * 512, '\\"[' * 340] * 32
    answer = serving.generate([1], params={"max_tokens": 1, "bad_words": texts})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"content": [{"type": "text", "text": "a", "x": 1}]},
            "messages[0].content",
            "part 0 has an unknown field 'x'",
        ),
        ({"content": [{"type": "text"}]}, "messages[0].content", "part 0 is"),
        ({"content": 3}, "messages[0].content", "string"),
        ({"content": "a", "x": 1}, "messages[0].x", "unknown field"),
    ],
)
def test_nested_fields_are_refused_by_their_own_name(serving: Serving, body: dict[str, Any], param: str, says: str):
    answer = serving.client.post("/v1/chat/completions", json={"messages": [{"role": "user", **body}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


def test_unknown_paths_and_methods_have_our_shape(serving: Serving):
    missing = serving.client.get("/v2/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "NotFoundError"
    assert missing.json()["error"]["message"].startswith("/v2/nothing: no such route")
    wrong = serving.client.get(PATH)
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == 405
    assert wrong.json()["error"]["message"] == f"GET {PATH}: only POST is taken there"
    assert wrong.headers["allow"] == "POST"


def test_body_that_comes_too_slowly_is_given_up(small: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Bodies, "read_s", 0.3)
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", small.port), timeout=20) as connection:
        connection.sendall(post(b"{", "Content-Length: 1000"))
        connection.setblocking(False)
        received = b""
        while b"\r\n\r\n" not in received and time.monotonic() - began_s < 10:
            with contextlib.suppress(BlockingIOError):
                received += connection.recv(2**16)
            with contextlib.suppress(ConnectionError):
                connection.send(b" ")
            time.sleep(0.05)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began_s < 5


def test_more_values_than_any_request_has_are_refused_before_they_are_made(serving: Serving):
    body = b'{"sampling_params": {}, "token_ids": [1' + b",1" * 2**20 + b",1]}"
    began_s = time.monotonic()
    answer = serving.client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "values; at most 1048576" in answer.json()["error"]["message"]
    assert time.monotonic() - began_s < 1
    commas = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "request_id": "," * 200}
    assert serving.client.post(PATH, json=commas).status_code == 200


def test_unknown_fields_are_dropped_and_warned_of_once_where_the_server_is_told_to(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    with Serving(checkpoint, ignore_unknown_fields=True) as lenient:
        for _ in range(3):
            answer = lenient.generate([1, 2], params={"max_tokens": 2, "topp": 0.5}, colour="red")
            assert answer.status_code == 200, answer.text
        messages = [{"role": "user", "content": "x", "mood": 1}, {"role": "user", "content": "y", "mood": 2}]
        chat = lenient.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert chat.status_code == 200, chat.text
        sglang = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "what": 0}}
        assert lenient.client.post("/generate", json=sglang).status_code == 200
        assert lenient.generate([1, 2], params={"top_p": 7}).status_code == 400
    warned = sorted(record.args[0] for record in caplog.records if "unknown field" in record.msg)
    assert warned == ["colour", "messages[].mood", "sampling_params.topp", "sampling_params.what"]
