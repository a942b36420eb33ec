"""`Texts`: text to tokens and back, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from keepmask.errors import RequestError
from keepmask.messages import Message, render_chat
from keepmask.server.error_answers import ApiError

__all__ = ["Encoded", "Texts"]

_MAX_PENDING = 1024  # texts that wait to be tokenized


class Encoded(NamedTuple):
    """A prompt as token ids, and as the text they were made of."""

    text: str | None
    token_ids: list[int]


class Texts:
    """The model's tokenizer and chat template, run one at a time on a thread of their own.

    Templates are the model's own and are rendered by transformers in Jinja's sandbox; none comes from a request.
    Raises ApiError 404 for everything on a server without a tokenizer.
    """

    def __init__(self, tokenizer: Any | None, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="keepmask-text")
        self._pending = 0
        longest = 0 if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        self._max_characters = max_model_len * longest
        """No text that is longer fits in the model's context."""

    async def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> Encoded:
        """Raises RequestError naming `param` for text that is empty or cannot fit."""
        self._check_length(len(text), param)
        token_ids = await self._run(lambda tokenizer: tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return Encoded(text, token_ids)

    async def render(
        self, messages: Sequence[Message], *, template: Mapping[str, Any], add_special_tokens: bool = False
    ) -> Encoded:
        """The conversation as the model's chat template writes it. template: the template's other arguments.

        Raises RequestError when the template refuses it.
        """
        self._check_length(sum(len(message.content or "") for message in messages), "messages")

        def render(tokenizer: Any) -> Encoded:
            text = render_chat(tokenizer, messages, **template)
            self._check_length(len(text), "messages")
            return Encoded(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))

        encoded: Encoded = await self._run(render)
        return encoded

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        text: str = await self._run(lambda tokenizer: tokenizer.decode(token_ids, skip_special_tokens=False))
        return text

    async def names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own name of each id."""
        names: list[str] = await self._run(lambda tokenizer: tokenizer.convert_ids_to_tokens(list(token_ids)))
        return names

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, characters: int, param: str) -> None:
        if self._tokenizer is not None and characters > self._max_characters:
            raise RequestError(
                f"{param}: {characters} characters do not fit in the model's context, whatever they say; at most "
                f"{self._max_characters} are taken",
                param=param,
            )

    async def _run(self, function: Any) -> Any:
        if self._tokenizer is None:
            raise ApiError(404, "this server runs without a tokenizer: send token ids to /inference/v1/generate")
        if self._pending >= _MAX_PENDING:
            raise ApiError(429, "too many texts wait to be tokenized; try again", retry_after_s=1)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, function, self._tokenizer)
        finally:
            self._pending -= 1
