"""`HeadChecks`: what is wrong with a request before its body is read."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from keepmask.server.error_answers import ApiError, error_response

__all__ = ["HeadChecks"]


class HeadChecks:
    """ASGI middleware that refuses, and closes the connection of, a request

    - whose line and headers take more than `max_bytes`. The HTTP parser stops at the same size when headers come in
      pieces, but not when they come in one;
    - that gives its length twice, as Content-Length and as Transfer-Encoding: what stands before this server may
      have believed the other one;
    - for another host than `hosts` or an address, where hosts are given: a page in a browser can have its own name
      point to this machine, and its requests come from here.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, hosts: Sequence[str] | None) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        refusal = self._problem(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in headers) > self._max_bytes:
            return ApiError(431, f"headers: at most {self._max_bytes} bytes are accepted", close=True)
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            return ApiError(400, "content-length: goes not with transfer-encoding; send one", close=True)
        if self._hosts is not None:
            host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
            if not self._is_ours(host):
                return ApiError(403, f"host={host[:80]!r}: is not served; name it by --allowed-hosts", close=True)
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether the Host header names an address, which no page can point elsewhere, or one of the hosts."""
        assert self._hosts is not None
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self._hosts
        return True
