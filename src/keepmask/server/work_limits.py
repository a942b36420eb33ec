"""`Admission`: how much work may be in the house at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from keepmask.config import EngineConfig
from keepmask.engine.ticket import Order
from keepmask.errors import RequestError
from keepmask.server.error_answers import ApiError
from keepmask.server.settings import ServerConfig

__all__ = ["Admission", "Charge", "answer_bytes", "mask_bytes"]

_TOKEN_BYTES = 96  # an id as a Python integer in a list, and its share of the JSON
_LOGPROB_BYTES = 320  # an entry with its text, likewise
_ROW_BYTES = 64  # offset and bookkeeping of a support
_ID_BYTES = 24  # an id of a support, or its log-probability: in the buffer, in the mask, in the JSON
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
        self._lock = threading.Lock()  # supports grow on the engine's thread
        self.num_completions = 0
        self.num_bytes = 0

    def check(self, orders: Sequence[Order]) -> None:
        """Raise RequestError when one request asks for more than any may, ApiError 429 when the house is full."""
        config, first = self._config, orders[0].params
        self.check_count(len(orders), first.n)
        completions = sum(order.params.n for order in orders)
        tokens = sum(order.params.n * (order.params.max_tokens or 0) for order in orders)
        if tokens > config.max_tokens_per_request:
            raise RequestError(
                f"max_tokens={first.max_tokens}: times n={first.n} and {len(orders)} prompt(s) that is {tokens} "
                f"tokens, at most {config.max_tokens_per_request} are made for one request; lower it",
                param="max_tokens",
            )
        needed = sum(answer_bytes(order) + mask_bytes(order, with_mask=self._with_mask(order)) for order in orders)
        if needed > config.max_answer_bytes:
            raise RequestError(
                f"max_tokens={first.max_tokens}: the answer may take {needed} bytes, at most "
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

    def enter(self, order: Order) -> Charge:
        """Count an admitted request until its charge is given back."""
        charge = Charge(self, order, mask_bytes(order, with_mask=self._with_mask(order)))
        self.change(order.params.n, charge.num_bytes)
        return charge

    def change(self, completions: int, num_bytes: int) -> None:
        """Add to what is counted, or take from it."""
        with self._lock:
            self.num_completions += completions
            self.num_bytes += num_bytes

    def grow(self, num_bytes: int) -> bool:
        """Count more bytes for a request under way, if there is room for them."""
        with self._lock:
            fits = self.num_bytes + num_bytes <= self._config.max_answer_bytes
            self.num_bytes += num_bytes if fits else 0
        return fits

    def _with_mask(self, order: Order) -> bool:
        asked = order.params.return_sampling_mask
        return self._engine.return_sampling_mask if asked is None else asked


class Charge:
    """What one admitted request is counted as."""

    def __init__(self, admission: Admission, order: Order, estimated_mask_bytes: int) -> None:
        self._admission, self._completions = admission, order.params.n
        self._id_bytes = _ID_BYTES * (2 if order.params.return_sampling_mask_logprobs else 1)
        self._mask_bytes = estimated_mask_bytes
        self.num_bytes = answer_bytes(order) + estimated_mask_bytes

    def cover(self, num_ids: int) -> str | None:
        """Charge for supports of so many ids, where more than was estimated; returns why they cannot be held."""
        growth = num_ids * self._id_bytes - self._mask_bytes
        if growth <= 0:
            return None
        if not self._admission.grow(growth):
            return (
                f"its supports hold {num_ids} ids, and the memory set aside for answers (max_answer_bytes) has no room "
                "for more; lower top_k, top_p or n"
            )
        self._mask_bytes += growth
        self.num_bytes += growth
        return None

    def leave(self) -> None:
        """The request has ended."""
        self._admission.change(-self._completions, -self.num_bytes)


def answer_bytes(order: Order) -> int:
    """Memory that the request and its answer may come to take without masks, from its parameters."""
    params = order.params
    each = _TOKEN_BYTES if params.logprobs is None else _TOKEN_BYTES + _LOGPROB_BYTES * (params.logprobs + 1)
    prompt_logprobs = 0 if params.prompt_logprobs is None else _LOGPROB_BYTES * (params.prompt_logprobs + 1)
    prompt = len(order.prompt_token_ids) * (_TOKEN_BYTES + prompt_logprobs)
    ids = len(params.allowed_token_ids or ()) + len(params.stop_token_ids) + len(params.logit_bias)
    return params.n * (params.max_tokens or 0) * each + prompt + _PARAM_BYTES * ids


def mask_bytes(order: Order, *, with_mask: bool) -> int:
    """Memory that the answer's masks are expected to take: no row counts as wider than 64 ids. Wider ones are charged
    as they come.
    """
    params = order.params
    if not with_mask:
        return 0
    width = min(params.top_k, _ROW_IDS) if params.top_k > 0 else _ROW_IDS
    each = _ROW_BYTES + width * _ID_BYTES * (2 if params.return_sampling_mask_logprobs else 1)
    return params.n * (params.max_tokens or 0) * each
