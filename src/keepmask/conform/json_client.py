"""`JsonClient`: JSON to an engine's server and back, with every way that can go wrong as one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from keepmask.errors import BackendError

__all__ = ["CrashedError", "JsonClient", "NotFoundError", "RefusedError", "SilentError"]

_MAX_SHOWN = 300  # characters of a server's own words in an error


class RefusedError(BackendError):
    """The server does not take this request: 400, 413 or 422."""


class NotFoundError(BackendError):
    """The server has no such route: 404, 405 or 501."""


class CrashedError(BackendError):
    """The server failed at this request: 500 and above, or something that is no answer."""


class SilentError(CrashedError):
    """The server failed and its answer says nothing about it."""


class JsonClient:
    """POSTs JSON objects to a server. timeout_s: for connecting, and for each wait for an answer.

    Raises BackendError, its subclasses above where they apply, and BackendError for an address that is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            address = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise BackendError(f"{url}: is no address ({error}); give one like http://127.0.0.1:8000") from error
        if address.scheme not in ("http", "https") or not address.host:
            raise BackendError(f"{url}: is no address of a server; give one like http://127.0.0.1:8000")
        try:
            self._client = httpx.Client(headers=headers, timeout=timeout_s)
        except UnicodeEncodeError as error:
            raise BackendError("API key: must be ASCII, as it goes into a header") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The parsed answer to a GET."""
        return self._parsed("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The parsed answer to a POST of `body`."""
        return self._parsed("POST", path, body)

    def _parsed(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        where = f"{self.url}{path}"
        try:
            response = self._client.request(method, where, json=body)
        except httpx.TimeoutException as error:
            raise BackendError(
                f"{where}: no answer within {self._timeout_s:g} s; raise --timeout, or try when the server is less busy"
            ) from error
        except httpx.TransportError as error:
            raise BackendError(
                f"{self.url}: not reachable ({error}); check that the server runs and that this is its address"
            ) from error
        if response.status_code != 200:
            raise _refusal(where, response)
        try:
            return response.json()
        except ValueError as error:
            raise BackendError(
                f"{where}: answered something that is not JSON; check that this is the engine's own address"
            ) from error


def _refusal(where: str, response: httpx.Response) -> BackendError:
    status, said = response.status_code, _message(response)
    if status in (401, 403):
        return BackendError(f"{where}: {status}, {said}; give the server's key with --api-key")
    if status in (404, 405, 501):
        return NotFoundError(f"{where}: {status}, no such route ({said})")
    if status in (400, 413, 422):
        return RefusedError(said)
    if status in (429, 503):
        return BackendError(f"{where}: {status}, {said}; try again when the server is ready and less busy")
    if 300 <= status < 400:
        return BackendError(f"{where}: {status}, redirects to {response.headers.get('location')}; give that address")
    kind = CrashedError if said else SilentError
    return kind(f"{where}: {status}, {said or 'without a word'}; the server's log has the details")


def _message(response: httpx.Response) -> str:
    """The server's own words: `error.message` (OpenAI, vLLM, SGLang), `message`, `detail` (FastAPI), or the body."""
    try:
        body = response.json()
    except ValueError:
        body = response.text.strip() or response.reason_phrase
    if isinstance(body, dict):
        error = body.get("error")
        body = (error.get("message") if isinstance(error, dict) else error) or body.get("message") or body.get("detail")
        body = body or ""
    said = body if isinstance(body, str) else json.dumps(body)
    said = " ".join(said.split())
    return said if len(said) <= _MAX_SHOWN else f"{said[:_MAX_SHOWN]}..."
