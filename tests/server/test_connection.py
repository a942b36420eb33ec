"""Clients that connect and send nothing, too slowly, or no HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Serving, until

from keepmask.server.connection import Connection

LIMIT_S = 0.4


@pytest.fixture
def hurried(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(Connection, "headers_s", LIMIT_S)
    with Serving(checkpoint, api_keys=("key",)) as serving:
        yield serving


def test_clients_that_send_no_request_lose_their_connection(hurried: Serving):
    hurried.client.get("/health")
    before = hurried.holdings()
    silent = [socket.create_connection(("127.0.0.1", hurried.port), timeout=10) for _ in range(20)]
    for number, connection in enumerate(silent):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "[: 3 * number])
    assert hurried.client.get("/health").status_code == 200
    for connection in silent:
        assert connection.recv(100) == b""
        connection.close()
    until(lambda: hurried.holdings() == before)


def test_sending_a_byte_now_and_then_does_not_help(hurried: Serving):
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", hurried.port), timeout=10) as connection:
        connection.setblocking(False)
        closed = False
        while not closed and time.monotonic() - started < 10:
            with contextlib.suppress(BlockingIOError):
                closed = connection.recv(100) == b""
            with contextlib.suppress(ConnectionError):
                connection.send(b"G")
            time.sleep(0.02)
    assert closed
    assert time.monotonic() - started < 5


def test_a_request_under_way_is_not_hurried(hurried: Serving):
    hurried.client.get("/health")
    time.sleep(1.5 * LIMIT_S)  # a kept connection may idle for longer
    body = {"max_tokens": 40, "ignore_eos": True, "top_k": 2}
    with hurried.slowed(2 * LIMIT_S / 40):
        answer = hurried.generate([1, 2], params=body)
        assert len(answer.json()["choices"][0]["token_ids"]) == 40


@pytest.mark.parametrize("request_", [b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"])
def test_what_is_no_http_is_told_so_in_our_shape(hurried: Serving, request_: bytes):
    with socket.create_connection(("127.0.0.1", hurried.port), timeout=10) as connection:
        connection.sendall(request_)
        received = b""
        while piece := connection.recv(2**16):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    error = json.loads(body)["error"]
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400


def test_no_http_in_the_middle_of_an_answer_ends_that_request_only(hurried: Serving):
    with hurried.slowed(0.01):
        body = json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 400, "ignore_eos": True, "top_k": 2}})
        head = [
            "POST /inference/v1/generate HTTP/1.1",
            "Host: localhost",
            "Authorization: Bearer key",
            "Content-Type: application/json",
            "Transfer-Encoding: chunked",
        ]
        with socket.create_connection(("127.0.0.1", hurried.port), timeout=10) as connection:
            connection.sendall("\r\n".join([*head, "", f"{len(body):x}", body, ""]).encode())
            time.sleep(0.1)
            connection.sendall(b"no size\r\n")
            assert connection.recv(2**16)[:13] in (b"HTTP/1.1 400 ", b"")
        until(lambda: not hurried.service.tickets())
        assert hurried.generate([1], params={"max_tokens": 1}).status_code == 200


def test_idle_connections_make_room_for_new_ones(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("keepmask.server.lifecycle.connection_limit", lambda: 20)
    with Serving(checkpoint) as serving, contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(("127.0.0.1", serving.port), timeout=10)) for _ in range(60)
        ]
        until(lambda: len(serving.server.server_state.connections) == 20)
        assert serving.client.get("/health").status_code == 200
        assert idle[0].recv(10) == b""  # the oldest have gone
        assert len(serving.server.server_state.connections) == 20


def test_busy_connections_stay_and_others_are_told_to_come_back(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("keepmask.server.lifecycle.connection_limit", lambda: 3)
    params = {"max_tokens": 30, "ignore_eos": True, "top_k": 2}
    with Serving(checkpoint) as serving, serving.slowed(0.02):
        asked = [
            serving.in_background(
                lambda: httpx.post(
                    f"{serving.url}/inference/v1/generate",
                    json={"token_ids": [1], "sampling_params": params},
                    timeout=60,
                )
            )
            for _ in range(3)
        ]
        until(lambda: serving.engine.num_unfinished == 3)
        refused = httpx.get(f"{serving.url}/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "3 connections are busy" in refused.json()["error"]["message"]
        assert [each.result().status_code for each in asked] == [200] * 3
        assert httpx.get(f"{serving.url}/health").status_code == 200
