"""Whatever goes wrong with a server is one sentence that says what to do."""

from __future__ import annotations

import socket
import time

import pytest

from keepmask.conform.json_client import CrashedError, JsonClient, NotFoundError, RefusedError
from keepmask.errors import BackendError
from oracle_server import OracleServer


def post(url, body=None, **options):
    with JsonClient(url, **options) as client:
        return client.post("/x", body or {})


def answering(status, text):
    return OracleServer(broken=lambda path, body: (status, text))


def test_an_answer_is_its_json_and_the_body_arrives_with_the_key():
    received = []
    with OracleServer(broken=lambda path, body: (received.append((path, body)), (200, '{"a": [1]}'))[1]) as server:
        assert post(f"{server.url}/", {"logit_bias": {5: 1.5}}, api_key="secret") == {"a": [1]}
        assert server.headers[0]["authorization"] == "Bearer secret"
    assert received == [("/x", {"logit_bias": {"5": 1.5}})]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://[::1", "nonsense"])
def test_what_is_no_address_is_named(url):
    with pytest.raises(BackendError, match=r"is no address.*http://127\.0\.0\.1:8000"):
        post(url)


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"{url}: not reachable .*check that the server runs"):
            post(url)


def test_a_server_that_takes_too_long_is_given_up():
    def slow(path, body):
        time.sleep(0.4)
        return 200, "{}"

    with (
        OracleServer(broken=slow) as server,
        pytest.raises(BackendError, match=r"no answer within 0\.1 s; raise --time"),
    ):
        post(server.url, timeout_s=0.1)


@pytest.mark.parametrize(
    ("status", "text", "kind", "message"),
    [
        (401, '{"error": "Unauthorized"}', BackendError, "401, Unauthorized; give the server's key with --api-key"),
        (403, '{"error": {"message": "wrong key"}}', BackendError, "403, wrong key; give the server's key"),
        (404, '{"detail": "Not Found"}', NotFoundError, r"/x: 404, no such route \(Not Found\)"),
        (405, "", NotFoundError, r"405, no such route \(Method Not Allowed\)"),
        (400, '{"error": {"message": "top_k\\n must"}}', RefusedError, "^top_k must$"),
        (422, '{"detail": [{"loc": ["body"], "msg": "x"}]}', RefusedError, "body"),
        (503, '{"message": "loading"}', BackendError, "503, loading; try again"),
        (307, "", BackendError, "307, redirects to http://elsewhere/; give that address"),
        (500, "Internal\n" * 100, CrashedError, r"500, Internal Internal .*\.\.\.; the server's log"),
        (200, "<html>", BackendError, "not JSON; check that this is the engine's own address"),
    ],
)
def test_each_status_says_what_to_do(status, text, kind, message):
    with answering(status, text) as server, pytest.raises(kind, match=message) as raised:
        post(server.url)
    assert len(str(raised.value)) < 500


def test_a_key_that_fits_no_header_is_refused_without_showing_it():
    with pytest.raises(BackendError, match="API key: must be ASCII") as raised:
        post("http://127.0.0.1:1", api_key="gehéim")
    assert "hé" not in str(raised.value)
