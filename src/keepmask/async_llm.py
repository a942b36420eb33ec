"""`AsyncLLM`: rollouts for many callers at once, with vLLM's interface for asyncio."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine, EngineStats
from keepmask.engine.engine_thread import EngineThread, PauseMode
from keepmask.engine.prompts import Prompt, Prompts
from keepmask.engine.ticket import Order, Ticket
from keepmask.errors import EngineError, RequestError
from keepmask.outputs import RequestOutput
from keepmask.params import SamplingParams
from keepmask.sampling import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsyncLLM", "OutputKind"]

OutputKind = Literal["cumulative", "delta", "final_only"]


class AsyncLLM:
    """A model with its engine on a thread of its own.

    model, logits_processors, options: as of `LLM`. Any number of tasks may call its methods, of any event loop; their
    requests are computed together, and between two steps weights change, generation pauses, or requests end.

    Raises ConfigError when the engine cannot start as configured. `shutdown`, or leaving `with`, ends the thread.
    """

    def __init__(self, model: str, *, logits_processors: Sequence[LogitsProcessor] = (), **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        engine = Engine(self.config, processors=logits_processors)
        self._engine = engine
        self._prompts = Prompts(engine.tokenizer)
        self._tickets: dict[str, Ticket] = {}
        """Of unfinished requests, by their names."""
        self._lock = threading.Lock()
        """Between looking for a name and taking it."""
        self._thread = EngineThread(engine)
        self._thread.start()
        self._close = weakref.finalize(self, self._thread.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine after its current step, and wait for that; requests under way raise EngineError."""
        self._close()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._prompts.tokenizer

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._engine.stats()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        output_kind: OutputKind = "cumulative",
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: its output again and again as tokens come, until it has finished.

        output_kind: each output holds everything so far (cumulative), or what is new since the one before (delta); or
        there is but the last (final_only). Outputs that are not taken in time are joined: a slow caller holds nobody
        up. request_id: the name that `abort` knows it by, of no other unfinished request. cache_salt: prompts share
        cached prefixes only with prompts of the same salt.

        Closing the generator, or cancelling the task, ends the request. Raises RequestError when it cannot be served,
        and EngineError when the engine failed.
        """
        order = await self._order(prompt, sampling_params, output_kind, cache_salt)
        with self._lock:
            if request_id in self._tickets:
                raise RequestError(f"request_id={request_id!r}: is in use by an unfinished request", param="request_id")
            ticket = self._tickets[request_id] = self._thread.submit(order)
        try:
            async for output in ticket.outputs(request_id):
                yield output
        finally:
            del self._tickets[request_id]
            self._thread.abort([ticket])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests where they stand: their last output has what they have, and finish_reason "abort"."""
        names = [request_id] if isinstance(request_id, str) else request_id
        self._thread.abort([self._tickets[name] for name in names if name in self._tickets])

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> bool:
        """Compute no steps until `resume_generation`: after ending every request (abort), once they have all ended
        (wait), or at once, for them to go on later (keep). Requests that come meanwhile wait.

        clear_cache: forget cached prefixes; not with keep. False when a resumption came before the requests had ended.
        """
        return await self._thread.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._thread.resume()

    async def is_paused(self) -> bool:
        """Whether a pause is in force or on its way."""
        return self._thread.paused

    async def reset_prefix_cache(self) -> bool:
        """New requests compute their prompts anew. Always True: nothing holds a cached prefix back."""
        await self._thread.call(lambda engine: engine.reset_prefix_cache())
        return True

    async def update_weights(
        self,
        weights: Mapping[str, Tensor] | str | Path,
        *,
        version: str | None = None,
        partial: bool = False,
        cast: bool = False,
    ) -> str:
        """As `LLM.update_weights`, between two steps: requests under way go on with the new weights, and their
        `weight_versions` say from which token on.
        """
        stage = await asyncio.to_thread(self._engine.stage_weights, weights, partial=partial, cast=cast)
        return await self._thread.call(lambda engine: engine.update_weights(stage, version))

    async def get_weight_version(self) -> str:
        """Of the weights that draw the next token."""
        return self._engine.weight_version

    async def check_health(self) -> None:
        """Raise EngineError once the engine has stopped."""
        if self._thread.failure is not None:
            raise self._thread.failure

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread.failure is None

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped."""
        return self._thread.failure is not None

    @property
    def dead_error(self) -> EngineError | None:
        """Why it stopped, once it has."""
        return self._thread.failure

    async def _order(self, prompt: Prompt, params: SamplingParams, kind: OutputKind, cache_salt: str) -> Order:
        if kind not in ("cumulative", "delta", "final_only"):
            raise RequestError(f"output_kind={kind!r}: must be cumulative, delta or final_only", param="output_kind")
        is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt)
        token_ids, text = await asyncio.to_thread(self._prompts.read, prompt) if is_text else self._prompts.read(prompt)
        resolved = self._engine.resolve(token_ids, params, cut=True)
        if kind == "delta" and resolved.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: are not part of a delta; ask for output_kind='cumulative' or 'final_only'",
                param="prompt_logprobs",
            )
        return Order(
            prompt_token_ids=list(token_ids),
            params=resolved,
            prompt=text,
            cache_salt=cache_salt,
            stream_interval=None if kind == "final_only" else 1,
            cumulative=kind == "cumulative",
        )
