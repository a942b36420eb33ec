"""`Service`: what all routes share: the engine's thread, the limits, and who is being served."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial

from keepmask.engine.core import Engine
from keepmask.engine.engine_thread import EngineThread
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.server.error_answers import ApiError
from keepmask.server.prometheus import Metrics
from keepmask.server.settings import ServerConfig
from keepmask.server.texts import Texts
from keepmask.server.work_limits import Admission

__all__ = ["Service"]

_DRAIN_RETRY_S = 5


class Service:
    """One served model. Lives on the event loop.

    `order` turns a request into an `Order` or refuses it; `submit` queues orders, all or none.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.engine_config = engine.config
        self.engine = EngineThread(engine)
        self.model_name = config.served_model_name or engine.config.model
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.runner.vocab_size
        self.started_s = int(time.time())
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

    def order(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        param: str,
        prompt: str | None = None,
        cache_salt: str | None = None,
        stream_interval: int | None = None,
    ) -> Order:
        """The request with every default resolved.

        param: the field that brought the prompt. Raises RequestError for what this engine cannot do.
        """
        if stream_interval is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: are not part of a stream; send the request with stream=false",
                param="prompt_logprobs",
            )
        try:
            resolved = self.engine.engine.resolve(prompt_token_ids, params)
        except RequestError as error:
            if error.param not in ("prompt", "prompt_token_ids"):
                raise
            raise error.renamed(param) from None
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
        tickets = [self.engine.submit(order, news) for order in orders]
        each = [names] * len(tickets) if isinstance(names, str) else names
        for ticket, name in zip(tickets, each, strict=True):
            self._names.setdefault(name, []).append(ticket)
            self.admission.enter(ticket)
            self.metrics.watch(ticket)
            ticket.on_end(partial(self._forget, name, ticket))
        return tickets

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

    @staticmethod
    def new_name(prefix: str) -> str:
        """A name for a request whose client gave none."""
        return f"{prefix}-{secrets.token_hex(16)}"

    def _forget(self, name: str, ticket: Ticket) -> None:
        tickets = self._names[name]
        tickets.remove(ticket)
        if not tickets:
            del self._names[name]
