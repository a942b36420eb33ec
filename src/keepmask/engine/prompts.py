"""`Prompts`: from what users give as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepmask.errors import ConfigError, RequestError

__all__ = ["Prompt", "Prompts"]

Prompt = str | Mapping[str, Any]
"""Text, {"prompt": text}, or {"prompt_token_ids": [...]}."""


class Prompts:
    """Reads prompts with the engine's tokenizer; without one, prompts are token ids. Any thread may call it."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises ConfigError on an engine without one."""
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: this engine has no tokenizer")
        return self._tokenizer

    def read(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        """Token ids of a prompt, and its text where there is one. Raises RequestError for anything else."""
        if isinstance(prompt, str):
            return self.encode(prompt), prompt
        if not isinstance(prompt, Mapping) or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                "prompt: must be text, {'prompt': text} or {'prompt_token_ids': [...]}, got " + type(prompt).__name__,
                param="prompt",
            )
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise RequestError(
                f"prompt: unknown key {min(unknown, key=str)!r}; known are 'prompt' and 'prompt_token_ids'",
                param="prompt",
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt: must be text, got {type(text).__name__}", param="prompt")
        if "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"], text
        return self.encode(text or ""), text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError for half a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: character {error.start} is half a surrogate pair, which is no text; send the whole character",
                param="prompt",
            ) from error
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids
