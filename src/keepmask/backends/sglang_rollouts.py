"""`SglangRollouts`: rollouts from an SGLang server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keepmask.backends.peer_rollouts_http import PeerRollouts, refuse
from keepmask.errors import BackendError
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.wire.peer_rollouts import rollouts_from_sglang

__all__ = ["SglangRollouts"]

_LOADING = "/update_weights_from_disk"
_SEEDS = 2**31  # SGLang hashes 32 bits of a seed
# By our names. Those of SGLang's that are not here have no counterpart, and theirs are at their defaults.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "no_stop_trim",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
}
_ELSEWHERE = {"n", "seed", "logprobs", "detokenize", "return_sampling_mask", "return_sampling_mask_logprobs"}


class SglangRollouts(PeerRollouts):
    """A server of SGLang ≥ 0.5.20. Seeds count with --enable-deterministic-inference only.

    n > 1 travels as copies of the prompt, completion i with seed + i: SGLang answers no masks for its own n.
    """

    _remedy = "use SGLang 0.5.20 or newer, with a sampling backend that captures supports"
    _logprobs_remedy = "use SGLang 0.5.20 or newer, which tells log-probs of the support"
    _context_length: int | None = None

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._under_way: dict[str, list[str]] = {}
        """By the id of a request, those of its copies."""

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """See `PeerRollouts`."""
        if not params.greedy and params.top_k <= 0:
            raise refuse(params, "top_k", "SGLang keeps masks with a positive top_k only; give the widest you replay")
        if params.repetition_penalty != 1:
            raise refuse(
                params, "repetition_penalty", "SGLang's counts the output only; use a frequency or presence penalty"
            )
        for name in params.model_fields_set - _NAMES.keys() - _ELSEWHERE:
            if getattr(params, name) != type(params).model_fields[name].get_default(call_default_factory=True):
                raise refuse(params, name, "SGLang has no such parameter; leave it out")
        if params.max_tokens is not None:
            return params
        if self._context_length is None:
            info = self._server.get("/v1/models")
            self._context_length = int(info["data"][0]["max_model_len"])
        return params.replace(max_tokens=self._context_length - np.asarray(prompt).size)

    @property
    def weight_version(self) -> str:
        """See `PeerRollouts`."""
        return str(self._server.get("/model_info")["weight_version"])

    def weight_checksums(self) -> dict[str, str]:
        """See `PeerRollouts`. One digest of all weights for each rank."""
        told = self._server.post("/weights_checker", {"action": "checksum"})
        if not told.get("per_engine_checksum"):
            raise BackendError(f"/weights_checker: no checksum in the answer: {str(told)[:300]}")
        return {"engine": str(told["per_engine_checksum"])}

    def _answer(
        self, token_ids: list[int], params: SamplingParams, given: dict[str, Any], request_id: str | None
    ) -> list[Rollout]:
        fields = params.model_dump(mode="json", include=set(_NAMES))
        sampling = {_NAMES[name]: value if value not in ([], {}) else None for name, value in fields.items()}
        sampling["top_k"] = 1 if params.greedy else params.top_k
        each = [
            sampling if params.seed is None else sampling | {"sampling_seed": (params.seed + copy) % _SEEDS}
            for copy in range(params.n)
        ]
        body: dict[str, Any] = {
            "input_ids": [token_ids] * params.n,
            "sampling_params": each,
            "return_sampling_mask": [True] * params.n,
            "return_logprob": [params.logprobs is not None] * params.n,
            "sampling_logprobs_mode": ["support" if params.return_sampling_mask_logprobs else "selected"] * params.n,
        }
        if request_id is not None:
            body["rid"] = self._under_way[request_id] = [f"{request_id}-{copy}" for copy in range(params.n)]
        try:
            answers = self._server.post("/generate", body)
        finally:
            self._under_way.pop(request_id or "", None)
        if not isinstance(answers, list):
            raise BackendError(f"/generate: a list of {params.n} answers was expected, got {str(answers)[:200]}")
        return [
            replace(rollout, completion_index=copy)
            for copy, answer in enumerate(answers)
            for rollout in rollouts_from_sglang(answer, prompt_token_ids=token_ids, sampling_params=given)
        ]

    def _abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            for copy in self._under_way.get(name, ()):
                self._server.post("/abort_request", {"rid": copy})

    def _load_weights(self, folder: Path, version: str) -> None:
        told = self._server.post(_LOADING, {"model_path": str(folder), "weight_version": version, "flush_cache": True})
        if not told.get("success"):
            raise BackendError(f"{_LOADING}: {str(told.get('message'))[:500]}")
