"""How answers go out: JSON, server-sent events, and a watch that ends the work when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Self

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keepmask.engine.engine_thread import EngineThread
from keepmask.engine.ticket import Ticket
from keepmask.outputs import RequestOutput
from keepmask.server.error_answers import describe, error_body
from keepmask.server.json_rows import json_pieces
from keepmask.server.service import Service

__all__ = ["JsonAnswer", "json_response", "respond"]

_log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_MANY_TOKENS = 2048  # whose entries take some 50 ms to build
_EVENT_PIECES = 8  # of an event that are sent as one: nearly all have one to five
_LONG_BYTES = 2**20  # answers from here on go out as they are written


def json_response(data: dict[str, Any] | list[Any]) -> Response:
    """A JSON answer without masks."""
    return Response(pydantic_core.to_json(data), media_type="application/json")


async def respond(
    service: Service,
    request: Request,
    tickets: Sequence[Ticket],
    *,
    name: str,
    whole: Callable[[Sequence[RequestOutput]], Response],
    events: AsyncIterator[Mapping[str, Any]] | None,
) -> Response:
    """The answer to the request of this name: its events as they come, or what `whole` builds of the outputs.

    A long answer is built on a thread, so that nobody waits for it.
    """
    if events is not None:
        return EventStream(service, tickets, events, name=name)
    async with Attended(service.engine, tickets, request.receive, timeout_s=service.config.request_timeout_s):
        outputs = [await ticket.output() for ticket in tickets]
    num_tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    num_tokens += sum(len(output.prompt_logprobs or ()) for output in outputs)
    return await asyncio.to_thread(whole, outputs) if num_tokens > _MANY_TOKENS else whole(outputs)


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


class JsonAnswer(Response):
    """A JSON answer that may hold masks. A long one is written while it is sent, a block of rows at a time."""

    def __init__(self, service: Service, data: Any, *, name: str) -> None:
        super().__init__(media_type="application/json", headers={"x-request-id": name})
        self._write_timeout_s = service.config.write_timeout_s
        self._pieces = json_pieces(data)
        self._begin: list[bytes] = []
        size = 0
        for piece in self._pieces:
            self._begin.append(piece)
            size += len(piece)
            if size > _LONG_BYTES:
                del self.headers["content-length"]
                return
        self.headers["content-length"] = str(size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            async with _Patience(self._write_timeout_s) as patience:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                begin, self._begin = b"".join(self._begin), []
                await patience.send(send, begin)
                for piece in self._pieces:
                    await patience.send(send, piece)
                    await asyncio.sleep(0)  # others get their turn even where this client takes everything at once
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            _log.warning("a client took nothing of its answer for %s s", self._write_timeout_s)


class EventStream(Response):
    """Server-sent events of some tickets. Errors after the first byte are an event too; `[DONE]` ends the stream."""

    def __init__(
        self, service: Service, tickets: Sequence[Ticket], events: AsyncIterator[Mapping[str, Any]], *, name: str
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-request-id": name})
        del self.headers["content-length"]
        self._engine, self._tickets, self._events = service.engine, tickets, events
        self._timeout_s, self._write_timeout_s = service.config.request_timeout_s, service.config.write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with Attended(self._engine, self._tickets, receive, timeout_s=self._timeout_s):
            try:
                async with _Patience(self._write_timeout_s) as patience:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    async for piece in self._answer():
                        await patience.send(send, piece)
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                _log.warning("a client took nothing of its stream for %s s", self._write_timeout_s)

    async def _answer(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._events:
                pieces = json_pieces(data)
                begin = b"".join((b"data: ", *islice(pieces, _EVENT_PIECES)))
                for piece in pieces:
                    yield begin
                    begin = piece
                    await asyncio.sleep(0)
                yield begin + b"\n\n"
        except Exception as error:  # the request's border: answered and logged
            shown = describe(error)
            if shown.status == 500:
                _log.warning("a stream ended with an error", exc_info=True)
            yield b"data: " + error_body(shown) + b"\n\n"
        yield _DONE


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

    async def send(self, send: Send, body: bytes) -> None:
        """Send a part of a body, which is to end from now on within the limit."""
        self._begun_s = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._begun_s = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._begun_s is not None and time.monotonic() - self._begun_s > self._limit_s:
            self._timeout.reschedule(loop.time())
        self._timer = loop.call_later(self._limit_s / 4, self._look)
