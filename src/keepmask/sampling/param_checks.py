"""What a sampler refuses before a request is scheduled, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.sampling.spec import SamplerSpec

__all__ = ["check_params", "check_token_ids"]


def check_params(params: SamplingParams, spec: SamplerSpec) -> None:
    """Raise RequestError naming the field, the rule and the remedy, if this sampler cannot honour `params`."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        check_token_ids(name, list(getattr(params, name) or ()), spec.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and asked > spec.max_logprobs:
            raise RequestError(
                f"{name}={asked}: this engine returns at most {spec.max_logprobs} per token; ask for fewer, "
                "or start it with a larger max_logprobs",
                param=name,
            )
    if params.allowed_token_ids is not None and set(params.allowed_token_ids) <= set(spec.banned_token_ids):
        raise RequestError(
            "allowed_token_ids: this engine never draws any of these ids; allow at least one that it draws",
            param="allowed_token_ids",
        )
    if params.thinking_token_budget is not None and not spec.thinking_end_token_ids:
        raise RequestError(
            f"thinking_token_budget={params.thinking_token_budget}: this engine knows no thinking tokens; start it "
            "with thinking_start_token_ids and thinking_end_token_ids",
            param="thinking_token_budget",
        )
    asked_mask = params.return_sampling_mask
    if spec.return_sampling_mask if asked_mask is None else asked_mask:
        _check_mask(params, spec)
    elif params.return_sampling_mask_logprobs:
        raise RequestError(
            "return_sampling_mask_logprobs=True: belongs to a sampling mask; set return_sampling_mask=True too",
            param="return_sampling_mask_logprobs",
        )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside [0, vocab_size)."""
    if not len(token_ids):
        return
    ids = np.asarray(token_ids)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise RequestError(
            f"{name}: token id {wrong[0]} must be in [0, {vocab_size}), the model's vocabulary", param=name
        )


def _check_mask(params: SamplingParams, spec: SamplerSpec) -> None:
    if spec.logprobs_mode != "processed_logprobs":
        raise RequestError(
            f"return_sampling_mask=True with logprobs_mode={spec.logprobs_mode!r}: a mask and its log-probs must share "
            "one normaliser; start the engine with logprobs_mode='processed_logprobs'",
            param="return_sampling_mask",
        )
    if spec.contract != "vllm":
        return
    if params.greedy:
        raise RequestError(
            f"temperature={params.temperature} with return_sampling_mask=True: sampling_mask_contract='vllm' requires "
            "temperature > 0; raise the temperature, or start the engine with sampling_mask_contract='exact'",
            param="temperature",
        )
    if params.top_k <= 0:
        raise RequestError(
            f"top_k={params.top_k} with return_sampling_mask=True: sampling_mask_contract='vllm' requires top_k > 0 to "
            "bound the mask; set top_k, or start the engine with sampling_mask_contract='exact'",
            param="top_k",
        )
    if spec.processors:
        raise RequestError(
            "return_sampling_mask=True with custom logits processors: refused by sampling_mask_contract='vllm'; "
            "ask for no mask, or start the engine with sampling_mask_contract='exact'",
            param="return_sampling_mask",
        )
