"""`Admission`: what is asked of a request before it is queued."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from keepmask.sampling.param_checks import check_token_ids

__all__ = ["Admission"]


class Admission:
    """Checks requests against everything the engine knows: vocabulary, context, tokenizer and sampler.

    Every method raises RequestError naming the field, the rule and the remedy, and changes nothing.
    """

    def __init__(self, sampler: Sampler, tokenizer: Any | None, *, vocab_size: int, max_model_len: int) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def resolve(self, prompt_len: int, params: SamplingParams) -> SamplingParams:
        """The params with their defaults filled in for a prompt of this length, if they can be served."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: must be SamplingParams, got {type(params).__name__}", param="sampling_params"
            )
        params = self._with_max_tokens(params, prompt_len)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop: stop strings need a tokenizer, and this engine has none", param="stop")
        self._sampler.check(params)
        return params

    def token_ids(self, prompt: Any) -> list[int]:
        """The prompt as Python integers, if it is a list or array of the model's token ids."""
        try:
            ids = np.asarray(prompt)
        except (ValueError, OverflowError):  # lists of different lengths, integers of any size
            ids = np.empty((0, 0))
        if ids.ndim == 1 and not ids.size:
            raise RequestError("prompt: is empty; give at least one token", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            shown = repr(prompt)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            raise RequestError(
                f"prompt_token_ids={shown}: must be a list of integers in [0, {self._vocab_size}), the vocabulary",
                param="prompt_token_ids",
            )
        token_ids: list[int] = ids.tolist()
        check_token_ids("prompt_token_ids", token_ids, self._vocab_size)
        return token_ids

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of each bad word as it begins a text and as it follows a space, as in vLLM."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words: need a tokenizer, and this engine has none", param="bad_words")
        words: list[list[int]] = []
        for word in params.bad_words:
            bare = word.lstrip()
            plain = self._tokenizer.encode(bare or word, add_special_tokens=False)
            spaced = self._tokenizer.encode(f" {bare}" if bare else word, add_special_tokens=False)
            if not plain:
                raise RequestError(f"bad_words={word!r}: is no token of this model; leave it out", param="bad_words")
            words.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                words.append(spaced)
        for ids in words:
            check_token_ids("bad_words", ids, self._vocab_size)
        return words

    def _with_max_tokens(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        room = self._max_model_len - prompt_len
        where = f"the prompt of {prompt_len} tokens leaves room for {room} in the context of {self._max_model_len}"
        if room < 1:
            raise RequestError(f"prompt: {where}; shorten it", param="prompt")
        if params.max_tokens is not None:
            if params.max_tokens > room:
                raise RequestError(
                    f"max_tokens={params.max_tokens}: {where}; lower it, or give None to fill the context",
                    param="max_tokens",
                )
            return params
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: {where}; lower it, or shorten the prompt", param="min_tokens"
            )
        return params.replace(max_tokens=room)
