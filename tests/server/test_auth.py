"""Who may call."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import Serving

from keepmask.errors import ConfigError
from keepmask.server.settings import ServerConfig

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked(checkpoint: Path) -> Iterator[Serving]:
    with Serving(checkpoint, api_keys=KEYS) as serving:
        yield serving


def call(serving: Serving, path: str, *, method: str = "GET", authorization: str | None = None) -> int:
    headers = {} if authorization is None else {"authorization": authorization}
    request = serving.client.build_request(method, path, headers=headers)
    if authorization is None:
        del request.headers["authorization"]
    return serving.client.send(request).status_code


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"keepmask:{password}".encode()).decode()


def test_every_known_route_but_health_needs_a_key(locked: Serving):
    document = locked.client.get("/openapi.json").json()
    routes = [(path, method.upper()) for path, item in document["paths"].items() for method in item]
    assert len(routes) > 3
    for path, method in [*routes, ("/openapi.json", "GET")]:
        assert call(locked, path, method=method) == (200 if path == "/health" else 401), path


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "//health",
        "/health/",
        "/health/../version",
        "/Health",
        "/health%2f",
        "/health?x=/version",
        "/version?/health",
        "/%2e%2e/health",
        "/v1/../health",
        "http://test/version",
        "*",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_key(locked: Serving, path: str):
    with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: test/health\r\nConnection: close\r\n\r\n".encode())
        answer = connection.recv(2**16)
    assert answer[9:12] == (b"200" if path.startswith("/health?") else b"401")


def test_only_reading_health_is_open(locked: Serving):
    assert call(locked, "/health", method="HEAD") == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert call(locked, "/health", method=method) == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_as_bearer_and_as_the_password_of_a_url(locked: Serving, key: str):
    assert call(locked, "/version", authorization=f"Bearer {key}") == 200
    assert call(locked, "/version", authorization=f"bearer {key}") == 200
    assert call(locked, "/version", authorization=basic(key)) == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer first-key second-key",
        "first-key",
        "Token first-key",
        "Basic first-key",
        "Basic !!!",
        basic(""),
        basic("first-keyx"),
        "Bearer \xff\xfe",
    ],
)
def test_anything_else_is_refused_without_a_hint(locked: Serving, authorization: str):
    headers = [(b"host", b"test"), (b"authorization", authorization.encode("latin-1"))]
    response = locked.client.send(httpx.Request("GET", f"{locked.url}/version", headers=headers))
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "AuthenticationError"
    assert "first-key" not in response.text


def test_two_authorization_headers_are_refused(locked: Serving):
    headers = [(b"host", b"test"), (b"authorization", b"Bearer first-key"), (b"authorization", b"Bearer second-key")]
    response = locked.client.send(httpx.Request("GET", f"{locked.url}/version", headers=headers))
    assert response.status_code == 401


def test_refusal_comes_before_the_body_is_read(locked: Serving):
    response = locked.client.post(
        "/inference/v1/generate", content=b"x" * 10**6, headers={"authorization": "Bearer no"}
    )
    assert response.status_code == 401


def test_server_that_others_can_reach_needs_a_key():
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match=r"needed; give --api-key"):
            ServerConfig(host=host)
        assert ServerConfig(host=host, api_keys=("k",)).host == host
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ServerConfig(host=host).host == host
    assert ServerConfig().host == "127.0.0.1"


def test_keys_are_not_shown():
    config = ServerConfig(api_keys=("secret-key",))
    assert "secret-key" not in repr(config)
    with pytest.raises(ConfigError) as raised:
        ServerConfig(api_keys=("secret key",))
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        ServerConfig(api_keys="secret")
    assert "secret" not in str(raised.value)
