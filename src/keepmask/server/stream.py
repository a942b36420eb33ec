"""How answers go out: JSON, server-sent events, and a watch that ends the work when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pydantic_core
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keepmask.engine.engine_thread import EngineThread
from keepmask.engine.ticket import Ticket
from keepmask.outputs import RequestOutput
from keepmask.server.error_answers import describe, error_body
from keepmask.server.settings import ServerConfig

__all__ = ["DONE", "Attended", "EventStream", "answered", "event", "json_response"]

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_MANY_TOKENS = 2048  # which take some 50 ms to write as JSON


def json_response(data: dict[str, Any] | list[Any]) -> Response:
    """A JSON answer."""
    return Response(pydantic_core.to_json(data), media_type="application/json")


async def answered(outputs: Sequence[RequestOutput], build: Callable[[], Response]) -> Response:
    """The response to these outputs. That of a long answer is built on a thread, so that nobody waits for it."""
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return await asyncio.to_thread(build) if num_tokens > _MANY_TOKENS else build()


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + pydantic_core.to_json(data) + b"\n\n"


class Attended:
    """Tickets that are aborted when the client goes away, takes too long, or the block is left before they end."""

    def __init__(
        self, engine: EngineThread, tickets: Sequence[Ticket], receive: Receive, *, timeout_s: float | None = None
    ) -> None:
        self._engine, self._tickets, self._receive, self._timeout_s = engine, tickets, receive, timeout_s
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._watch = asyncio.create_task(self._until_disconnected())
        if self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._abort)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._abort()

    def _abort(self) -> None:
        self._engine.abort(self._tickets)

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._abort()


class EventStream(Response):
    """Server-sent events of some tickets. Errors after the first byte are an event too; `[DONE]` ends the stream."""

    def __init__(
        self, engine: EngineThread, tickets: Sequence[Ticket], events: AsyncIterator[bytes], *, config: ServerConfig
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._engine, self._tickets, self._events = engine, tickets, events
        self._timeout_s, self._write_timeout_s = config.request_timeout_s, config.write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with Attended(self._engine, self._tickets, receive, timeout_s=self._timeout_s):
            try:
                async with _Patience(self._write_timeout_s) as patience:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    async for chunk in self._answer():
                        patience.begin()
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        patience.end()
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                _log.warning("a client took nothing of its stream for %s s", self._write_timeout_s)

    async def _answer(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._events:
                yield chunk
        except Exception as error:  # the request's border: answered and logged
            shown = describe(error)
            if shown.status == 500:
                _log.warning("a stream ended with an error", exc_info=True)
            yield b"data: " + error_body(shown) + b"\n\n"
        yield DONE


class _Patience:
    """Raises TimeoutError in its block when what was begun does not end within `limit_s`.

    Costs two assignments a time, where a timeout of its own for every chunk would cost more than sending it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def begin(self) -> None:
        """Something is to end from now on."""
        self._begun_s = time.monotonic()

    def end(self) -> None:
        """It has."""
        self._begun_s = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._begun_s is not None and time.monotonic() - self._begun_s > self._limit_s:
            self._timeout.reschedule(loop.time())
        self._timer = loop.call_later(self._limit_s / 4, self._look)
