"""`Service`: what all routes share: the engine's thread, the limits, and who is being served."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial

from keepmask.engine.core import Engine
from keepmask.engine.engine_thread import EngineThread
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.server.body import Bodies
from keepmask.server.error_answers import ApiError
from keepmask.server.prometheus import Metrics
from keepmask.server.settings import ServerConfig
from keepmask.server.texts import Texts
from keepmask.server.work_limits import Admission, Charge

__all__ = ["Service"]

_log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 5
_NAME = re.compile(r"[ -~]{1,256}")


class Service:
    """One served model. Lives on the event loop.

    `order` turns a request into an `Order` or refuses it; `submit` queues orders, all or none.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.engine_config = engine.config
        self.engine = EngineThread(engine)
        self.outputs = engine.outputs
        self.model_name = config.served_model_name or engine.config.model
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.runner.vocab_size
        self.started_s = int(time.time())
        self.bodies = Bodies(config.max_body_bytes, ignore_unknown=config.ignore_unknown_fields)
        self.admission = Admission(config, engine.config)
        self.metrics = Metrics(engine.stats, model_name=self.model_name, vocab_size=self.vocab_size)
        self.texts = Texts(engine.tokenizer, max_model_len=engine.max_model_len)
        self.draining = False
        """No new request is taken: the server is about to stop."""
        self.awaits_weights = config.await_weights
        """No request is served before an update of the weights was finished."""
        self._names: dict[str, list[Ticket]] = {}

    @property
    def weight_version(self) -> str:
        """Of the weights that draw the next token."""
        return self.engine.engine.weight_version

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        if name is not None and name != self.model_name:
            raise ApiError(404, f"model={name[:200]!r}: only {self.model_name!r} is served", param="model")

    def check_alive(self) -> None:
        """Raise ApiError 503 once the engine has stopped."""
        if self.engine.failure is not None:
            raise ApiError(503, f"{self.engine.failure}; restart the server")

    def check_ready(self) -> None:
        """Raise ApiError 503 when the server is not in service, or soon will not be."""
        self.check_alive()
        if self.draining:
            raise ApiError(503, "the server is stopping", retry_after_s=_DRAIN_RETRY_S)

    def check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise RequestError for an id outside the vocabulary."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise RequestError(
                f"{param}: token id {max(token_ids)} must be in [0, {self.vocab_size}), the model's vocabulary",
                param=param,
            )

    async def order(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        names: Mapping[str, str],
        prompt: str | None = None,
        cache_salt: str | None = None,
        stream_interval: int | None = None,
    ) -> Order:
        """The request with every default resolved.

        names: what the client calls the field that brought the prompt (as "prompt"), and fields of `SamplingParams` it
        has other names for. Raises RequestError for what this engine cannot do.
        """
        if stream_interval is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: are not part of a stream; send the request with stream=false",
                param="prompt_logprobs",
            )
        try:
            resolve = partial(self.engine.engine.resolve, prompt_token_ids, params)
            # Spelling words out, and compiling the form of a text, take their time.
            slow = params.bad_words or params.structured_outputs is not None
            resolved = await asyncio.to_thread(resolve) if slow else resolve()
        except RequestError as error:
            name = names.get(error.param or "")
            raise error.renamed(name) if name else error from None
        return Order(
            prompt_token_ids=list(prompt_token_ids),
            params=resolved,
            prompt=prompt,
            cache_salt=cache_salt or "",
            stream_interval=stream_interval,
        )

    def submit(self, orders: Sequence[Order], names: str | Sequence[str]) -> list[Ticket]:
        """Queue the orders of one request, under one name or each under its own.

        Raises ApiError or RequestError, and queues none, when there is no room.
        """
        self.check_ready()
        if self.awaits_weights:
            raise ApiError(503, "this server waits for its weights: send them by /update_weights and finish the update")
        self.admission.check(orders)
        news = asyncio.Event()
        each = [names] * len(orders) if isinstance(names, str) else names
        return [self._submit(order, name, news) for order, name in zip(orders, each, strict=True)]

    def _submit(self, order: Order, name: str, news: asyncio.Event) -> Ticket:
        charge = self.admission.enter(order)
        try:
            ticket = self.engine.submit(order, news, partial(self._on_step, charge))
        except BaseException:
            charge.leave()
            raise
        self._names.setdefault(name, []).append(ticket)
        self.metrics.watch(ticket)
        ticket.on_end(partial(self._on_end, name, ticket, charge))
        return ticket

    def _on_step(self, charge: Charge, ticket: Ticket) -> str | None:
        """On the engine's thread: count what a step brought; why the request has to end, where it has."""
        self.metrics.on_step(ticket)
        assert ticket.request is not None
        supports = [each.supports for each in ticket.request.completions if each.supports is not None]
        return charge.cover(sum(each.num_ids for each in supports)) if supports else None

    def tickets(self, names: Sequence[str] | None = None) -> list[Ticket]:
        """Unfinished tickets of the requests with these names, or of all."""
        if names is None:
            return [ticket for tickets in self._names.values() for ticket in tickets]
        return [ticket for name in dict.fromkeys(names) for ticket in self._names.get(name, ())]

    def drain(self) -> None:
        """Take no more requests. Those under way are finished, or, where they are paused, end with what they have."""
        self.draining = True
        if self.engine.paused:
            self.engine.abort(self.tickets())

    def name(self, given: str | None, header: str | None, prefix: str) -> str:
        """What the request is called: as its body says, as its X-Request-Id header says, or as nobody else is."""
        if given is None and header is not None and _NAME.fullmatch(header):
            return header
        return given or f"{prefix}-{secrets.token_hex(16)}"

    def _on_end(self, name: str, ticket: Ticket, charge: Charge) -> None:
        charge.leave()
        tickets = self._names[name]
        tickets.remove(ticket)
        if not tickets:
            del self._names[name]
        if _log.isEnabledFor(logging.DEBUG):
            request, took_s = ticket.request, time.monotonic() - ticket.times.submitted_s
            each = request.completions if request else ()
            ended = ", ".join(f"{len(one.token_ids)} tokens ({one.finish_reason})" for one in each) or "refused"
            prompt_len = len(ticket.order.prompt_token_ids)
            _log.debug("request %s: prompt of %d tokens; %s after %.3f s", name, prompt_len, ended, took_s)
