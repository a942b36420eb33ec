"""`Admission`: how much work may be in the house at a time."""

from __future__ import annotations

from collections.abc import Sequence

from keepmask.config import EngineConfig
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import RequestError
from keepmask.server.error_answers import ApiError
from keepmask.server.settings import ServerConfig

__all__ = ["Admission", "answer_bytes"]

_TOKEN_BYTES = 96  # an id as a Python integer in a list, and its share of the JSON
_LOGPROB_BYTES = 320  # an entry with its text, likewise
_ROW_BYTES = 64  # offset and bookkeeping of a support
_ID_BYTES = 24  # an id of a support: in the buffer, in the mask, in the JSON
_ROW_IDS = 64
_PARAM_BYTES = 64  # an id or a bias of the parameters: as they came and as the sampler holds them
_RETRY_AFTER_S = 1


class Admission:
    """Counts what is admitted and unanswered; refuses what would be too much.

    What one request may never ask for is refused 400, what is too much just now 429 with Retry-After. Both before
    anything is queued.
    """

    def __init__(self, config: ServerConfig, engine: EngineConfig) -> None:
        self._config = config
        self._engine = engine
        self._places = engine.max_num_seqs + config.max_waiting
        self.num_completions = 0
        self.num_bytes = 0

    def check(self, orders: Sequence[Order]) -> None:
        """Raise RequestError when one request asks for more than any may, ApiError 429 when the house is full."""
        config = self._config
        self.check_count(len(orders), orders[0].params.n)
        completions = sum(order.params.n for order in orders)
        tokens = sum(order.params.n * (order.params.max_tokens or 0) for order in orders)
        if tokens > config.max_tokens_per_request:
            raise RequestError(
                f"max_tokens={orders[0].params.max_tokens}: times n={orders[0].params.n} and {len(orders)} prompt(s) "
                f"that is {tokens} tokens, at most {config.max_tokens_per_request} are made for one request; lower it",
                param="max_tokens",
            )
        needed = sum(map(self._bytes, orders))
        if needed > config.max_answer_bytes:
            raise RequestError(
                f"max_tokens={orders[0].params.max_tokens}: the answer may take {needed} bytes, at most "
                f"{config.max_answer_bytes} are held; lower max_tokens, n or top_k",
                param="max_tokens",
            )
        if self.num_completions + completions > self._places:
            raise ApiError(
                429,
                f"{self.num_completions} completions are under way or waiting; try again",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.num_bytes + needed > config.max_answer_bytes:
            raise ApiError(
                429,
                "the answers under way may already fill the memory set aside for them; try again",
                retry_after_s=_RETRY_AFTER_S,
            )

    def check_count(self, num_prompts: int, n: int) -> None:
        """Raise RequestError for more completions than are made for one request."""
        most = min(self._config.max_completions_per_request, self._places)
        if num_prompts * n > most:
            raise RequestError(
                f"n={n} for {num_prompts} prompt(s): at most {most} completions are made for one request; split it",
                param="n",
            )

    def enter(self, ticket: Ticket) -> None:
        """Count an admitted request until it ends."""
        completions, needed = ticket.order.params.n, self._bytes(ticket.order)
        self.num_completions += completions
        self.num_bytes += needed

        def leave() -> None:
            self.num_completions -= completions
            self.num_bytes -= needed

        ticket.on_end(leave)

    def _bytes(self, order: Order) -> int:
        asked = order.params.return_sampling_mask
        return answer_bytes(order, with_mask=self._engine.return_sampling_mask if asked is None else asked)


def answer_bytes(order: Order, *, with_mask: bool) -> int:
    """Memory that the request and its answer may come to take, from its parameters. No row counts as wider than 64
    ids: wider ones are rare, and the request's mask budget ends it when they are not.
    """
    params = order.params
    each = _TOKEN_BYTES
    if params.logprobs is not None:
        each += _LOGPROB_BYTES * (params.logprobs + 1)
    if with_mask:
        width = min(params.top_k, _ROW_IDS) if params.top_k > 0 else _ROW_IDS
        each += _ROW_BYTES + width * _ID_BYTES * (2 if params.return_sampling_mask_logprobs else 1)
    prompt_logprobs = 0 if params.prompt_logprobs is None else _LOGPROB_BYTES * (params.prompt_logprobs + 1)
    prompt = len(order.prompt_token_ids) * (_TOKEN_BYTES + prompt_logprobs)
    ids = len(params.allowed_token_ids or ()) + len(params.stop_token_ids) + len(params.logit_bias)
    return params.n * (params.max_tokens or 0) * each + prompt + _PARAM_BYTES * ids
