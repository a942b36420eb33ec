"""`ask`: rollouts with masks from a server that runs now, vLLM's, SGLang's or keepmask's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from keepmask.conform.json_client import JsonClient
from keepmask.errors import BackendError, MaskError
from keepmask.outputs import Rollout
from keepmask.wire.peers import rollouts_from_sglang, rollouts_from_vllm

__all__ = ["Api", "ask"]

Api = Literal["vllm", "sglang"]

_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def ask(
    client: JsonClient,
    api: Api,
    prompts: Sequence[Sequence[int]],
    params: Mapping[str, Any],
    *,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> list[Rollout]:
    """One completion of each prompt, token ids, on `/inference/v1/generate` (vllm) or `/generate` (sglang).

    Raises BackendError when the server refuses, or answers without masks or log-probabilities.
    """
    rollouts = []
    for i, prompt in enumerate(prompts):
        rollouts += (_ask_sglang if api == "sglang" else _ask_vllm)(client, list(prompt), params)
        on_progress(i + 1)
    lacking = [rollout for rollout in rollouts if rollout.sampling_mask is None or rollout.logprobs is None]
    if lacking:
        raise BackendError(
            f"{client.url}: {len(lacking)} of {len(rollouts)} answers are without a mask or log-probabilities; "
            "start the server with --return-sampling-mask --logprobs-mode processed_logprobs"
        )
    return rollouts


def _ask_vllm(client: JsonClient, prompt: list[int], params: Mapping[str, Any]) -> list[Rollout]:
    # vLLM gives masks to all requests or to none and passes over the member; keepmask gives them to those that ask.
    asked = {**params, "logprobs": 1, "return_sampling_mask": True}
    answer = client.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": asked})
    return _read(client, lambda: rollouts_from_vllm(answer, prompt_token_ids=prompt, sampling_params=params))


def _ask_sglang(client: JsonClient, prompt: list[int], params: Mapping[str, Any]) -> list[Rollout]:
    body = {
        "input_ids": prompt,
        "sampling_params": {_SGLANG_NAMES.get(name, name): value for name, value in params.items()},
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
    }
    answer = client.post("/generate", body)
    return _read(client, lambda: rollouts_from_sglang(answer, prompt_token_ids=prompt, sampling_params=params))


def _read(client: JsonClient, read: Callable[[], list[Rollout]]) -> list[Rollout]:
    try:
        return read()
    except (AttributeError, MaskError) as error:
        raise BackendError(f"{client.url}: an answer that cannot be used: {error}") from error
