"""`Admission`: what is asked of a request before it is queued."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from keepmask.sampling.param_checks import check_token_ids

__all__ = ["Admission"]

_CONTEXT = "context_length_exceeded"

_VLLM_TEMPERATURE = 0.01  # vLLM raises what lies between it and 0, for fear of overflow


class Admission:
    """Checks requests against everything the engine knows: vocabulary, context, tokenizer and sampler.

    Every method raises RequestError naming the field, the rule and the remedy, and changes nothing.
    """

    def __init__(self, sampler: Sampler, tokenizer: Any | None, *, vocab_size: int, max_model_len: int) -> None:
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}

    def resolve(self, prompt_len: int, params: SamplingParams, *, cut: bool = False) -> SamplingParams:
        """The params with their defaults filled in for a prompt of this length, if they can be served.

        cut: lower max_tokens to what the context has room for, where it is more.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: must be SamplingParams, got {type(params).__name__}", param="sampling_params"
            )
        params = self._with_max_tokens(params, prompt_len, cut=cut)
        changes: dict[str, Any] = {
            name: self._vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1
        }
        if self._sampler.spec.contract == "vllm" and 0 < params.temperature < _VLLM_TEMPERATURE:
            changes |= {"temperature": _VLLM_TEMPERATURE}
        if ids := [token_id for token_id in self.stop_ids(params) if token_id not in params.stop_token_ids]:
            changes |= {"stop_token_ids": [*params.stop_token_ids, *ids]}
        params = params.replace(**changes) if changes else params
        if params.stop and self._tokenizer is None:
            raise RequestError("stop: stop strings need a tokenizer, and this engine has none", param="stop")
        self._sampler.check(params)
        return params

    def stop_ids(self, params: SamplingParams) -> dict[int, str]:
        """The stop strings that are one special token each, by its id: the text may never show them."""
        return {self._special_ids[text]: text for text in params.stop if text in self._special_ids}

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
        """Token ids of each bad word as it begins a text and as it follows a space.

        In contract vllm, as in vLLM: the latter only where it begins with another token and has as many as the former.
        """
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words: need a tokenizer, and this engine has none", param="bad_words")
        exact = self._sampler.spec.contract == "exact"
        words: list[list[int]] = []
        for word in params.bad_words:
            bare = word.lstrip()
            plain = self._tokenizer.encode(bare or word, add_special_tokens=False)
            spaced = self._tokenizer.encode(f" {bare}" if bare else word, add_special_tokens=False)
            if not plain:
                raise RequestError(f"bad_words={word!r}: is no token of this model; leave it out", param="bad_words")
            words.append(plain)
            if exact or (spaced[0] != plain[0] and len(spaced) == len(plain)):
                words.append(spaced)
        for ids in words:
            check_token_ids("bad_words", ids, self._vocab_size)
        return words

    def _with_max_tokens(self, params: SamplingParams, prompt_len: int, *, cut: bool) -> SamplingParams:
        room = self._max_model_len - prompt_len
        limit = f"this model's maximum context length is {self._max_model_len} tokens, and the prompt "
        if room < 1:
            raise RequestError(f"prompt: {limit}has {prompt_len}; shorten it", param="prompt", code=_CONTEXT)
        where = f"{limit}of {prompt_len} leaves room for {room}"
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens}: {where}; lower it, or shorten the prompt",
                param="min_tokens",
                code=_CONTEXT,
            )
        if params.max_tokens is None or (cut and params.max_tokens > room):
            return params.replace(max_tokens=room)
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens={params.max_tokens}: {where}; lower it, or give None to fill the context",
                param="max_tokens",
                code=_CONTEXT,
            )
        return params
