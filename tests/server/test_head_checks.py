"""What is wrong with a request before its body is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import Serving
from test_body import raw

BODY = b'{"token_ids": [1], "sampling_params": {"max_tokens": 1}}'
HEAD = b"POST /inference/v1/generate HTTP/1.1\r\nContent-Type: application/json\r\n"


def test_length_given_twice_is_refused_and_the_connection_closed(serving: Serving):
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    lengths = b"Host: localhost\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(BODY)
    answer = raw(serving, HEAD + lengths + chunked)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.7.7", 200),
        ("trainer.lan:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_names_that_a_page_could_point_here_are_refused_without_a_key(named: Serving, host: str, status: int):
    answer = named.client.get("/health", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def named(checkpoint: Path):
    with Serving(checkpoint, allowed_hosts=["trainer.lan"]) as serving:
        yield serving


def test_with_a_key_any_host_is_served(checkpoint: Path):
    with Serving(checkpoint, api_keys=("key",)) as serving:
        assert serving.client.get("/version", headers={"host": "policy.example"}).status_code == 200
