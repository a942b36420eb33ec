"""`Connection`: one client's connection, while it is not yet, or not any more, a request.

Written by hand, since uvicorn has no time limit before the first byte of a request and none for its headers, answers
what is no HTTP in plain text, and lets connections come until the process has no file descriptor left for anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepmask.server.error_answers import ApiError, error_body, error_response

__all__ = ["Connection", "connection_limit"]

_log = logging.getLogger(__name__)

_HEADERS_S = 30.0
_SPARE_FILES = 64  # for everything but connections


def connection_limit() -> int:
    """Connections that the process has file descriptors for, after it has raised its limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return (
        max(1, hard - len(os.listdir("/proc/self/fd")) - _SPARE_FILES) if os.path.isdir("/proc/self/fd") else hard // 2
    )


class Connection(H11Protocol):
    """uvicorn's connection, closed where the headers of a request do not arrive in time: nobody has shown a key by
    then, so whoever sends nothing must not keep a file descriptor. What is no HTTP is told so in our shape.

    Beyond `most` connections, a new one takes the place of the one that has been idle longest; where none is idle, it
    is answered 503.
    """

    headers_s = _HEADERS_S
    """How long a client may take to send a request's line and headers."""
    most = 2**31

    _full = False
    """Whether it was said that there are too many."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            # Closed at once, the client would find a reset instead of an answer to what it has sent meanwhile.
            busy = ApiError(503, f"{self.most} connections are busy; try again", retry_after_s=1, close=True)
            self.app = error_response(busy)
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

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request, if one does."""
        if not Connection._full:
            Connection._full = True
            _log.warning("%d connections: idle ones are closed for new ones; raise `ulimit -n` for more", self.most)
        ours = [each for each in self.connections if isinstance(each, Connection)]
        fresh = [each for each in ours if each._deadline is not None]
        kept = [each for each in ours if each.timeout_keep_alive_task is not None]
        if not fresh and not kept:
            return False
        oldest = min(fresh, key=lambda each: each._waits_until_s) if fresh else kept[0]
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    @property
    def _waits_until_s(self) -> float:
        return self._deadline.when() if self._deadline is not None else float("inf")

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self.transport.close)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
