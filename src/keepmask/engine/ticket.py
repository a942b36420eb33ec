"""`Ticket`: one request on its way through the engine, followed from an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from keepmask.engine.core import Engine
from keepmask.engine.request import Completion, Request
from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams

__all__ = ["Order", "Ticket", "TicketTimes", "follow", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the engine is asked for: a prompt and its parameters, every default resolved."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    cache_salt: str = ""
    stream_interval: int | None = None
    """Tokens in a chunk; None for one answer at the end."""
    cumulative: bool = False
    """Each answer of a stream holds everything so far, instead of a chunk."""


@dataclass(slots=True)
class TicketTimes:
    """When things happened, in seconds of `time.monotonic`."""

    submitted_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class _Sent:
    """How much of a completion was handed over."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False


class Ticket:
    """One request, from its order to its last chunk.

    The engine thread calls `collect`; the event loop calls everything else. Chunks that are not taken in time are
    joined, so a slow reader costs no more memory than its own answer and holds nobody up.

    news: set whenever there is something to take; the tickets of one answer share it. loop: the event loop on which
    the ticket is followed. on_step: called on the engine's thread when a step brought tokens; what it returns is why
    the request has to end.
    """

    def __init__(
        self,
        key: str,
        order: Order,
        news: asyncio.Event | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        on_step: Callable[[Ticket], str | None] | None = None,
    ) -> None:
        self.key = key
        """The engine's name for the request: never one that a client chose."""
        self.loop = loop
        self.on_step = on_step
        self.order = order
        self.request: Request | None = None
        self.times = TicketTimes()
        self.finished = False
        """No more will come."""
        self.seed: int | None = None
        self.num_cached_tokens = 0
        self.on_delivery: Callable[[Sequence[CompletionOutput]], None] | None = None
        """Told what was delivered, chunk by chunk or all at the end."""
        self.news = asyncio.Event() if news is None else news
        self._on_end: list[Callable[[], None]] = []
        self._sent: dict[int, _Sent] = {}
        self._chunks: dict[int, list[CompletionOutput]] = {}
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    # On the engine thread

    def collect(self, engine: Engine) -> list[CompletionOutput] | RequestOutput | None:
        """What there is to hand over after a step; None when nothing is due."""
        request = self.request
        assert request is not None
        now = time.monotonic()
        self.times.first_token_s = self.times.first_token_s or now
        self.times.last_token_s = now
        if self.order.stream_interval is None:
            return engine.output(request) if request.finished else None
        if self.order.cumulative:
            return engine.output(request)
        chunks = [self._chunk(engine, completion) for completion in request.completions]
        return [chunk for chunk in chunks if chunk is not None] or None

    def _chunk(self, engine: Engine, completion: Completion) -> CompletionOutput | None:
        assert self.order.stream_interval is not None
        sent = self._sent.setdefault(completion.index, _Sent())
        new = len(completion.token_ids) - sent.tokens
        finished = completion.finish_reason is not None
        due = finished or new >= self.order.stream_interval or (new and not sent.tokens)
        if sent.finished or not due:
            return None
        chunk = engine.delta(completion, sent.tokens, sent.characters)
        # Spans cover the whole output, so they come with its end.
        chunk.weight_versions = list(completion.weight_versions) if finished else []
        sent.tokens += len(chunk.token_ids)
        sent.characters += len(chunk.text)
        sent.finished = finished
        return chunk

    # On the event loop

    def deliver(self, news: list[CompletionOutput] | RequestOutput, *, finished: bool) -> None:
        """Take over what `collect` returned."""
        assert self.request is not None
        self.seed, self.num_cached_tokens = self.request.seed, self.request.num_cached_tokens
        if isinstance(news, RequestOutput):
            self._output = news
        else:
            for chunk in news:
                self._chunks.setdefault(chunk.index, []).append(chunk)
        if self.on_delivery is not None:
            self.on_delivery(news.outputs if isinstance(news, RequestOutput) else news)
        self.news.set()
        if finished:
            self._end()

    def fail(self, error: Exception) -> None:
        """No answer will come, because of `error`."""
        if not self.finished:
            self._error = error
            self.news.set()
            self._end()

    def on_end(self, call: Callable[[], None]) -> None:
        """Call this once nothing more will come."""
        if self.finished:
            call()
        else:
            self._on_end.append(call)

    async def output(self) -> RequestOutput:
        """The whole answer. Raises what `fail` was given."""
        while self._output is None and self._error is None:
            await self.news.wait()
            self.news.clear()
        self.check()
        assert self._output is not None
        return self._output

    async def outputs(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """What comes, until the request has finished, under the client's name for it. Raises what `fail` was given."""
        finished = False
        while not finished:
            await self.news.wait()
            self.news.clear()
            self.check()
            finished = self.finished
            output, self._output = self._output, None
            if output is None and (chunks := self.take()):
                output = self._delta(chunks)
            if output is not None:
                output.request_id = request_id
                yield output

    def _delta(self, chunks: list[CompletionOutput]) -> RequestOutput:
        order = self.order
        assert self.seed is not None
        return RequestOutput(
            request_id=self.key,
            prompt=order.prompt,
            prompt_token_ids=order.prompt_token_ids,
            outputs=chunks,
            finished=self.finished,
            seed=self.seed,
            num_cached_tokens=self.num_cached_tokens,
            sampling_params=order.params,
        )

    def take(self) -> list[CompletionOutput]:
        """The chunks that came since the last call, those of one completion as one."""
        taken, self._chunks = self._chunks, {}
        return [joined(parts) for parts in taken.values()]

    @property
    def failed(self) -> bool:
        """Whether `fail` was called."""
        return self._error is not None

    def check(self) -> None:
        """Raise what `fail` was given, if it was."""
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self.finished = True
        for call in self._on_end:
            call()
        self._on_end = []


async def follow(tickets: Sequence[Ticket]) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
    """What comes of the tickets of one answer, as (number of the ticket, chunk), until all have finished.

    Raises what the first of them failed with.
    """
    while True:
        await tickets[0].news.wait()
        tickets[0].news.clear()
        if taken := [(number, chunk) for number, ticket in enumerate(tickets) for chunk in ticket.take()]:
            yield taken
        for ticket in tickets:
            ticket.check()
        if all(ticket.finished for ticket in tickets) and not tickets[0].news.is_set():
            return


def joined(parts: list[CompletionOutput]) -> CompletionOutput:
    """Chunks of one completion, in order, as one."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return CompletionOutput(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=list(chain.from_iterable(part.token_ids for part in parts)),
        cumulative_logprob=last.cumulative_logprob,
        logprobs=None if last.logprobs is None else list(chain.from_iterable(part.logprobs or () for part in parts)),
        sampling_mask=None
        if last.sampling_mask is None
        else SamplingMask.concat(part.sampling_mask for part in parts if part.sampling_mask is not None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        weight_versions=last.weight_versions,
    )
