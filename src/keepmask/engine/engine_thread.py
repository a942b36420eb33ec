"""`EngineThread`: the engine on a thread of its own. It is the only one that touches the engine's state."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from keepmask.engine.core import Engine
from keepmask.engine.request import Request
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import EngineError, KeepmaskError
from keepmask.outputs import CompletionOutput, RequestOutput

__all__ = ["EngineThread", "PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]
T = TypeVar("T")

_log = logging.getLogger(__name__)

_JOIN_S = 30.0  # a step on the slowest supported model ends well within this


@dataclass(slots=True)
class _Delivery:
    """What one ticket gets after a step."""

    ticket: Ticket
    news: list[CompletionOutput] | RequestOutput | Exception
    finished: bool


class EngineThread:
    """Steps the engine while there is work, and does between two steps what event loops ask for.

    An exception out of a step ends the engine: every ticket fails with EngineError, and so does everything asked for
    afterwards. One raised while a single request is added or read ends that request alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: EngineError | None = None
        """Why the engine stopped, once it has."""
        self.crashed = False
        """Whether it stopped because it failed."""
        self.frozen = False
        """No step is computed: paused."""
        self.holding = False
        """A pause waits for the requests in flight; new ones wait for the resumption."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Between asking and failing: nothing is asked of a thread that no longer answers."""
        self._wake = threading.Event()
        self._stopping = False
        self._jobs: deque[Callable[[], None]] = deque()
        self._keys = itertools.count()
        # Only the thread itself touches these.
        self._tickets: dict[str, Ticket] = {}
        self._unstarted: deque[Ticket] = deque()
        self._held: list[Ticket] = []
        self._drained: list[Callable[[bool], None]] = []

    @property
    def paused(self) -> bool:
        """Whether a pause is in force or on its way."""
        return self.frozen or self.holding

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="keepmask-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step, and wait for that; requests in flight fail."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def submit(
        self,
        order: Order,
        news: asyncio.Event | None = None,
        on_step: Callable[[Ticket], str | None] | None = None,
    ) -> Ticket:
        """Queue a request; its ticket is followed from the running event loop.

        news, on_step: as of `Ticket`. Raises EngineError once the engine has stopped.
        """
        ticket = Ticket(f"r{next(self._keys)}", order, news, asyncio.get_running_loop(), on_step)
        self._ask(lambda: self._add(ticket))
        return ticket

    def abort(self, tickets: Iterable[Ticket]) -> None:
        """End these requests where they stand: they are answered with what they have."""
        unfinished = [ticket for ticket in tickets if not ticket.finished]
        if unfinished:
            with contextlib.suppress(EngineError):  # a stopped engine has answered them already
                self._ask(lambda: self._abort(unfinished))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The function's result, run on the engine's thread between two steps; its exceptions are raised here."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._ask(lambda: self._call(function, future))
        return await future

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> bool:
        """Stop stepping: after ending every request (abort), after they all end (wait), or at once (keep).

        False when a resumption came before the requests had ended.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ask(lambda: self._pause(mode, clear_cache, future))
        return await future

    async def resume(self) -> None:
        """Go on stepping, and admit what came in the meantime."""
        await self.call(lambda _: self._resume())

    # The engine's thread

    def _ask(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._check_alive()
            self._jobs.append(job)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                while self._jobs:
                    self._jobs.popleft()()
                if self.holding and not self.engine.num_unfinished:
                    self._freeze(completed=True)
                if self.frozen or not self.engine.num_unfinished:
                    self._wake.wait()
                    self._wake.clear()
                    continue
                began_s = time.monotonic()
                requests = self.engine.step()
                self._note_starts(began_s)
                self._hand_over(requests)
        except BaseException as error:  # the thread's border: whatever ends it, everybody is told
            _log.exception("the engine failed")
            self.crashed = True
            self._fail(EngineError(f"the engine failed while computing a step: {type(error).__name__}: {error}"), error)
        else:
            self._fail(EngineError("the engine was stopped"))

    def _add(self, ticket: Ticket) -> None:
        if self.holding:
            self._held.append(ticket)
        else:
            self._admit(ticket)

    def _admit(self, ticket: Ticket) -> None:
        order = ticket.order
        try:
            self._check_alive()
            ticket.request = self.engine.add(
                ticket.key, order.prompt_token_ids, order.params, prompt=order.prompt, cache_salt=order.cache_salt
            )
        except Exception as error:  # one request's border
            if not isinstance(error, KeepmaskError):
                _log.exception("a request cannot be added")
            self._post([_Delivery(ticket, error, finished=True)])
            return
        self._tickets[ticket.key] = ticket
        self._unstarted.append(ticket)

    def _note_starts(self, began_s: float) -> None:
        """Requests are served in order of arrival: those that a step began to compute are the first ones."""
        while self._unstarted:
            request = self._unstarted[0].request
            assert request is not None
            if not (request.finished or request.completions[0].num_computed):
                return
            self._unstarted.popleft().times.scheduled_s = began_s

    def _abort(self, tickets: list[Ticket]) -> None:
        if self.failure is not None:
            return
        for ticket in tickets:
            if ticket in self._held:
                self._held.remove(ticket)
                self._admit(ticket)
        self._hand_over(self.engine.abort([ticket.key for ticket in tickets]))

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(*self.failure.args) from self.failure.__cause__

    def _call(self, function: Callable[[Engine], Any], future: asyncio.Future[Any]) -> None:
        try:
            self._check_alive()
            result = function(self.engine)
        except Exception as error:  # the border of whoever asked: it is raised there
            self._settle(future, error=error)
        else:
            self._settle(future, result)

    def _pause(self, mode: PauseMode, clear_cache: bool, future: asyncio.Future[bool]) -> None:
        if self.failure is not None:
            self._settle(future, error=self.failure)
            return
        if mode == "abort":
            self._hand_over(self.engine.abort(list(self._tickets)))
        if mode == "keep" or not self.engine.num_unfinished:
            self._freeze(completed=True)
            if clear_cache and mode != "keep":
                self.engine.reset_prefix_cache()
            self._settle(future, True)
            return
        self.frozen, self.holding = False, True

        def drained(completed: bool) -> None:
            if completed and clear_cache:
                self.engine.reset_prefix_cache()
            self._settle(future, completed)

        self._drained.append(drained)

    def _freeze(self, *, completed: bool) -> None:
        self.frozen, self.holding = True, False
        self._end_waits(completed)

    def _resume(self) -> None:
        self.frozen = self.holding = False
        self._end_waits(False)

    def _end_waits(self, completed: bool) -> None:
        waits, self._drained = self._drained, []
        for wait in waits:
            wait(completed)
        held, self._held = self._held, []
        for ticket in held:
            self._add(ticket)

    def _hand_over(self, requests: list[Request]) -> None:
        """Send what these requests have to their tickets, in one visit to each event loop."""
        deliveries = []
        for request in requests:
            ticket = self._tickets[request.request_id]
            news: list[CompletionOutput] | RequestOutput | Exception | None
            try:
                if ticket.on_step is not None and (problem := ticket.on_step(ticket)) and not request.finished:
                    self.engine.abort([request.request_id], problem)
                news = ticket.collect(self.engine)
            except Exception as error:  # one request's border: its text or log-probs cannot be built
                _log.exception("the answer of a request cannot be built")
                self.engine.abort([request.request_id])
                news = EngineError(f"the answer cannot be built: {type(error).__name__}: {error}")
            if request.finished:
                del self._tickets[request.request_id]
            if news is not None:
                deliveries.append(_Delivery(ticket, news, request.finished))
        self._post(deliveries)

    def _fail(self, failure: EngineError, cause: BaseException | None = None) -> None:
        """Answer everybody, now and from now on, with `failure`."""
        failure.__cause__ = cause
        with self._lock:
            self.failure = failure
        while self._jobs:
            self._jobs.popleft()()
        tickets = [*self._tickets.values(), *self._held]
        self._tickets, self._held = {}, []
        self._post([_Delivery(ticket, failure, finished=True) for ticket in tickets])
        self._end_waits(False)

    def _post(self, deliveries: list[_Delivery]) -> None:
        for loop in {delivery.ticket.loop for delivery in deliveries}:
            assert loop is not None
            theirs = [delivery for delivery in deliveries if delivery.ticket.loop is loop]
            self._on_loop(loop, partial(_deliver, theirs))

    def _settle(self, future: asyncio.Future[Any], result: object = None, error: Exception | None = None) -> None:
        def settle() -> None:
            if future.done():  # whoever asked went away
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._on_loop(future.get_loop(), settle)

    def _on_loop(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            _log.debug("the event loop is gone", exc_info=True)


def _deliver(deliveries: list[_Delivery]) -> None:
    for delivery in deliveries:
        try:
            if isinstance(delivery.news, Exception):
                delivery.ticket.fail(delivery.news)
            else:
                delivery.ticket.deliver(delivery.news, finished=delivery.finished)
        except Exception as error:  # one request's border: the others get theirs
            _log.exception("the news of a request cannot be delivered")
            delivery.ticket.fail(error)
