"""`read_any`: rollouts from files of answers and samples, in every layout that carries sampling masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keepmask.errors import MaskError
from keepmask.outputs import Rollout
from keepmask.wire.peers import (
    from_ids_offsets,
    from_skyrl,
    from_slime,
    from_verifiers,
    rollouts_from_flat,
    rollouts_from_sglang,
    rollouts_from_vllm,
)
from keepmask.wire.rollout_file import read_rollouts

__all__ = ["read_any", "rollouts_of"]

_PARQUET = b"PAR1"


def read_any(path: Path, params: Mapping[str, Any]) -> tuple[list[Rollout], dict[str, Any]]:
    """The rollouts of a file, and what it says about its run.

    A rollout file or the folder of its parts; or JSON, one document or one a line: answers of vLLM's
    `/inference/v1/generate` and SGLang's `/generate`, each alone or as `{request, response}`; samples of slime and
    miles; branches of verifiers; generator outputs of SkyRL. params: sampling parameters of answers that come without
    their request. Raises MaskError naming the document.
    """
    if path.is_dir() or _begins(path, _PARQUET):
        return read_rollouts(path)
    rollouts: list[Rollout] = []
    for number, document in _documents(path):
        try:
            rollouts += rollouts_of(document, params)
        except MaskError as error:
            raise MaskError(f"{path}, document {number}: {error}") from error
    return rollouts, {}


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(magic)) == magic


def rollouts_of(document: Any, params: Mapping[str, Any]) -> list[Rollout]:
    """The rollouts of one JSON document. Raises MaskError when it has none of the known layouts."""
    if isinstance(document, list):  # SGLang answers a list where n > 1
        return [rollout for each in document for rollout in rollouts_of(each, params)]
    if not isinstance(document, Mapping):
        raise MaskError(f"must be an object, got {type(document).__name__}")
    if isinstance(response := document.get("response"), Mapping | list):
        request = document.get("request") or {}
        own = {**params, **(request.get("sampling_params") or {})}
        given = request.get("token_ids") or request.get("input_ids")
        return [
            rollout
            for each in (response if isinstance(response, list) else [response])
            for rollout in rollouts_of({"prompt_token_ids": given, **each} if given else each, own)
        ]
    for member, read in _LAYOUTS.items():
        if member in document:
            return read(document, params)
    raise MaskError(f"has none of the members that tell a layout: {', '.join(_LAYOUTS)}")


def _documents(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each JSON document: the whole file, or its lines."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        yield 1, json.loads(data)
        return
    except RecursionError:
        raise MaskError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        if b"\n" not in data.strip():
            raise MaskError(f"{path}: neither a rollout file nor JSON ({str(error)[:100]})") from None
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MaskError(f"{path}, line {number}: is not JSON ({str(error)[:100]})") from None


def _vllm(document: Mapping[str, Any], params: Mapping[str, Any]) -> list[Rollout]:
    return rollouts_from_vllm(document, sampling_params=params)


def _sglang(document: Mapping[str, Any], params: Mapping[str, Any]) -> list[Rollout]:
    prompt = document.get("prompt_token_ids")
    if prompt is None:
        raise MaskError("prompt_token_ids: not in SGLang's answer; put it beside, or save {request, response}")
    return rollouts_from_sglang(document, prompt_token_ids=prompt, sampling_params=params)


def _slime(sample: Mapping[str, Any], params: Mapping[str, Any]) -> list[Rollout]:
    tokens, length = sample["tokens"], sample.get("response_length")
    if not isinstance(tokens, list) or type(length) is not int or not 0 <= length <= len(tokens):
        raise MaskError(f"response_length={length!r}: must be a number of the tokens")
    loss_mask = sample.get("loss_mask") or [1] * length
    # miles keeps the rows as ids and offsets, with the log-probability of every id
    mask = (
        from_ids_offsets(sample["ids"], sample.get("offsets"), sample.get("support_logprobs"))
        if "ids" in sample
        else from_slime(sample)
    )
    logprobs = sample.get("rollout_log_probs")
    flags = [0] * (len(tokens) - length) + list(loss_mask)
    if len(mask) == length and sum(map(bool, loss_mask)) != length:  # a row, maybe empty, for every token of the answer
        kept = np.flatnonzero(loss_mask)
        mask, logprobs = mask.take(kept), None if logprobs is None else [logprobs[t] for t in kept]
    return rollouts_from_flat(
        tokens, flags, mask, logprobs=logprobs, sampling_params=params, request_id=str(sample.get("index", ""))
    )


def _verifiers(branch: Mapping[str, Any], params: Mapping[str, Any]) -> list[Rollout]:
    flags = next((branch[name] for name in ("sampled", "sampled_mask", "completion_mask") if name in branch), None)
    if flags is None:
        raise MaskError("sampled: absent; a branch has a flag for each of its tokens")
    rows = branch.get("sampling_mask")
    counts = rows.get("counts") if isinstance(rows, Mapping) else None
    whole = isinstance(counts, Sequence) and len(counts) == len(flags) != sum(map(bool, flags))
    mask = None if rows is None else from_verifiers(rows, sampled=flags if whole else None)
    return rollouts_from_flat(branch["token_ids"], flags, mask, logprobs=branch.get("logprobs"), sampling_params=params)


def _skyrl(output: Mapping[str, Any], params: Mapping[str, Any]) -> list[Rollout]:
    prompts, answers = output.get("prompt_token_ids") or [], output["response_ids"]
    rows, logprobs = output.get("rollout_sample_support"), output.get("rollout_logprobs")
    masks = output.get("loss_masks") or [[1] * len(answer) for answer in answers]
    if not len(prompts) == len(answers) == len(masks) or any(x and len(x) != len(answers) for x in (rows, logprobs)):
        raise MaskError("prompt_token_ids, response_ids, loss_masks, rollout_*: must have one entry a trajectory")
    rollouts = []
    for i, (prompt, answer, flags) in enumerate(zip(prompts, answers, masks, strict=True)):
        mask = from_skyrl(rows[i], loss_mask=flags) if rows else None
        rollouts += rollouts_from_flat(
            [*prompt, *answer], [0] * len(prompt) + list(flags), mask,
            logprobs=[0.0] * len(prompt) + list(logprobs[i]) if logprobs else None,
            sampling_params=params, request_id=str(i),
        )  # fmt: skip
    return rollouts


_LAYOUTS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], list[Rollout]]] = {
    "choices": _vllm,
    "meta_info": _sglang,
    "response_ids": _skyrl,
    "tokens": _slime,
    "token_ids": _verifiers,
}
"""The member that tells each layout."""
