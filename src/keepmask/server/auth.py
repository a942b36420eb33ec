"""`Auth`: who may call. Everything is denied without a key but GET /health."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from keepmask.server.error_answers import ApiError, error_response

__all__ = ["Auth"]

_OPEN = {("GET", "/health"), ("HEAD", "/health")}


class Auth:
    """ASGI middleware. With no keys everybody may call, which the configuration allows on a loopback address only.

    A key comes as `Authorization: Bearer KEY`, or as the password of `Authorization: Basic`, which HTTP clients make
    of `http://user:KEY@host`. The path compared is the one that is routed.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or not self._keys or (scope["method"], scope["path"]) in _OPEN:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and self._known(_key(given[0])):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(401, "send a valid API key as 'Authorization: Bearer KEY'", close=True)
        await error_response(refusal)(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        # Digests of all keys are compared in constant time, so the time taken tells nothing about any of them.
        given = _digest(key)
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key(header: bytes) -> bytes:
    """The key in an Authorization header; empty when there is none."""
    scheme, _, value = header.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
