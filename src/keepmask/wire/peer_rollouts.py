"""Rollouts from the answers of other engines, and from the flat sequences of other trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.outputs import FinishReason, Rollout, WeightVersionSpan
from keepmask.wire.limits import DEFAULT_LIMITS, Limits
from keepmask.wire.peer_arrays import INT32, brief, field, read_array, read_flags
from keepmask.wire.peer_masks import from_sglang, from_vllm

__all__ = ["rollouts_from_flat", "rollouts_from_sglang", "rollouts_from_vllm"]

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "error": "error",
    "tool_calls": "stop",  # a stop whose text parsed as a tool call
    "repetition": "stop",  # vLLM's repetition detection; stop_reason names it
}


def rollouts_from_vllm(
    response: Mapping[str, Any],
    *,
    prompt_token_ids: ArrayLike | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Rollout]:
    """One `Rollout` a choice of a vLLM `/inference/v1/generate` answer.

    prompt_token_ids: the request's; by default what the answer repeats. sampling_params: the request's, with the
    server's own defaults filled in (a server may take a temperature from the model's generation config).
    """
    given = response.get("prompt_token_ids") if prompt_token_ids is None else prompt_token_ids
    if given is None:
        raise MaskError("prompt_token_ids: not in the answer; pass the ids that were sent")
    shared = {
        "prompt_token_ids": _tokens("prompt_token_ids", given, limits),
        "sampling_params": dict(sampling_params or {}),
        "request_id": str(response.get("request_id") or ""),
    }
    return [
        _vllm_rollout(f"choices[{index}]", _mapping(f"choices[{index}]", choice), shared, limits)
        for index, choice in enumerate(_list("choices", response.get("choices")))
    ]


def rollouts_from_sglang(
    response: Mapping[str, Any],
    *,
    prompt_token_ids: ArrayLike,
    sampling_params: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Rollout]:
    """The `Rollout` of one SGLang `/generate` answer (`output_ids`, `meta_info`), as a list of one.

    SGLang's repetition penalty looks at the output only and comes after the other penalties, unlike vLLM's, whose
    order replay follows: a request with one is refused.
    """
    params = dict(sampling_params or {})
    if params.get("repetition_penalty", 1.0) != 1.0:
        raise MaskError(
            f"repetition_penalty={params['repetition_penalty']}: SGLang's counts the output only, which cannot be "
            "replayed as vLLM's; use frequency_penalty or presence_penalty"
        )
    meta = _mapping("meta_info", response.get("meta_info"))
    token_ids = _tokens("output_ids", response.get("output_ids"), limits)
    mask = from_sglang(meta, limits=limits)
    reason = _mapping("finish_reason", meta.get("finish_reason") or {})
    return [
        Rollout(
            prompt_token_ids=_tokens("prompt_token_ids", prompt_token_ids, limits),
            token_ids=token_ids,
            sampling_mask=mask,
            logprobs=_sglang_logprobs(meta, mask, token_ids),
            sampling_params=params,
            request_id=str(meta.get("id") or ""),
            text=str(response.get("text") or ""),
            finish_reason=_finish_reason(reason.get("type")),
            stop_reason=reason.get("matched"),
            weight_versions=_spans(meta.get("weight_versions")),
        )
    ]


def rollouts_from_flat(
    token_ids: object,
    sampled: ArrayLike,
    mask: SamplingMask | None = None,
    *,
    logprobs: object = None,
    sampling_params: Mapping[str, Any] | None = None,
    request_id: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> list[Rollout]:
    """The turns of a flat sequence, one `Rollout` a run of sampled tokens, each with all before it as its prompt.

    token_ids: [T], prompt, generated and tool tokens (verifiers' Branch.token_ids, slime's and miles' Sample.tokens).
    sampled: [T] flags of the tokens the policy drew. mask: one row a sampled token. logprobs: one a sampled token, or
    [T], of which those of the other tokens are left out (Branch.logprobs).
    """
    tokens = _tokens("token_ids", token_ids, limits)
    flags = read_flags("sampled", sampled, tokens.size)
    num_sampled = int(flags.sum())
    values = None if logprobs is None else _floats("logprobs", logprobs)
    values = values[flags] if values is not None and values.shape == flags.shape else values
    for name, value in (("mask", mask), ("logprobs", values)):
        if value is not None and len(value) != num_sampled:
            raise MaskError(f"{name}: {len(value)} rows for {num_sampled} sampled tokens")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    drawn = np.concatenate([[0], np.cumsum(flags)])
    return [
        Rollout(
            prompt_token_ids=tokens[:start],
            token_ids=tokens[start:stop],
            sampling_mask=None if mask is None else mask[drawn[start] : drawn[stop]],
            logprobs=None if values is None else values[drawn[start] : drawn[stop]],
            sampling_params=dict(sampling_params or {}),
            request_id=request_id,
            completion_index=turn,
        )
        for turn, (start, stop) in enumerate(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    ]


def _vllm_rollout(name: str, choice: Mapping[str, Any], shared: dict[str, Any], limits: Limits) -> Rollout:
    token_ids = _tokens(f"{name}.token_ids", choice.get("token_ids"), limits)
    mask = choice.get("sampling_mask")
    return Rollout(
        token_ids=token_ids,
        sampling_mask=None if mask is None else from_vllm(mask, choice.get("sampling_mask_logprobs"), limits=limits),
        logprobs=_vllm_logprobs(f"{name}.logprobs", choice.get("logprobs"), token_ids),
        completion_index=_index(f"{name}.index", choice.get("index", 0)),
        text=str(choice.get("text") or ""),
        finish_reason=_finish_reason(choice.get("finish_reason")),
        stop_reason=choice.get("stop_reason"),
        weight_versions=_spans(choice.get("weight_versions")),
        **shared,
    )


def _vllm_logprobs(name: str, logprobs: object, token_ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
    content = None if logprobs is None else _mapping(name, logprobs).get("content")
    if content is None:
        return None
    entries = [_mapping(name, entry) for entry in _list(name, content)]
    if len(entries) != token_ids.size:
        raise MaskError(f"{name}: {len(entries)} entries for {token_ids.size} tokens")
    for position, (entry, token_id) in enumerate(zip(entries, token_ids.tolist(), strict=True)):
        # Tokens are named by id, or as "token_id:<id>"; in text mode by their text, which names no id.
        named = str(entry.get("token_id", entry.get("token", ""))).removeprefix("token_id:")
        by_id = "token_id" in entry or str(entry.get("token", "")).startswith("token_id:")
        if by_id and named != str(token_id):
            raise MaskError(f"{name}: position {position} is of token {brief(named)}, not {token_id}")
    return _floats(name, [entry.get("logprob") for entry in entries])


def _sglang_logprobs(
    meta: Mapping[str, Any], mask: SamplingMask, token_ids: NDArray[Any]
) -> NDArray[np.float32] | None:
    if meta.get("output_token_sampling_logprobs") is None:
        return None
    drawn = _list("output_token_sampling_logprobs", meta["output_token_sampling_logprobs"])
    if len(drawn) != token_ids.size or len(mask) != token_ids.size:
        raise MaskError(
            f"output_token_sampling_logprobs: {len(drawn)} entries and {len(mask)} rows for {token_ids.size} tokens"
        )
    if mask.logprobs is None or not drawn or not isinstance(drawn[0], Sequence):
        return _floats("output_token_sampling_logprobs", drawn)
    if (outside := np.flatnonzero(~mask.contains(token_ids))).size:
        raise MaskError(f"output_token_sampling_mask: the drawn token is outside its row at position {outside[0]}")
    at_row = np.repeat(np.arange(len(mask)), mask.counts)
    return np.asarray(mask.logprobs[mask.ids == token_ids[at_row]], np.float32)


def _tokens(name: str, value: object, limits: Limits) -> NDArray[np.int32]:
    array = read_array(name, value, INT32, limits)
    if array.size and (array.min() < 0 or array.max() >= 2**31):
        raise MaskError(f"{name}: token ids must be in [0, 2**31), got {array.min()}..{array.max()}")
    return array.astype(np.int32)


def _floats(name: str, values: object) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise MaskError(f"{name}: needs one number a token ({error})") from None
    if array.ndim != 1 or not np.isfinite(array).all():
        raise MaskError(f"{name}: needs one finite number a token")
    return array


def _index(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise MaskError(f"{name}: must be an integer in [0, 2147483648), got {brief(value)}")
    return value


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MaskError(f"{name}: must be an object, got {brief(value)}")
    return value


def _finish_reason(reason: object) -> FinishReason | None:
    if reason is None:
        return None
    if not isinstance(reason, str) or reason not in _FINISH_REASONS:
        raise MaskError(f"finish_reason={brief(reason)}: known are {', '.join(_FINISH_REASONS)}")
    return _FINISH_REASONS[reason]


def _spans(spans: object) -> tuple[WeightVersionSpan, ...]:
    """The spans of weight versions; whether they cover the tokens is the writer's and the reader's to check."""
    return tuple(
        WeightVersionSpan(
            _index(f"weight_versions[{i}].start", field(span, "start")),
            _index(f"weight_versions[{i}].end", field(span, "end")),
            str(field(span, "version")),
        )
        for i, span in enumerate(_list("weight_versions", spans) if spans is not None else ())
    )


def _list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise MaskError(f"{name}: must be a list, got {brief(value)}")
    return value
