"""`Connection`: one client's connection, while it is not yet, or not any more, a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepmask.server.error_answers import ApiError, error_body

__all__ = ["Connection"]

_HEADERS_S = 30.0


class Connection(H11Protocol):
    """uvicorn's connection, closed where the headers of a request do not arrive in time: nobody has shown a key by
    then, so whoever sends nothing must not keep a file descriptor. What is no HTTP is told so in our shape.
    """

    headers_s = _HEADERS_S
    """How long a client may take to send a request's line and headers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has connected."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._end_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was closed."""
        self._end_wait()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with the bytes that came, where no answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(ApiError(400, f"{msg} Send HTTP/1.1, with headers within the server's limit."))
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            head = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self.transport.close)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
