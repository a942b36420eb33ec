"""`VllmRollouts`: rollouts from a vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keepmask.backends.peer_rollouts_http import PeerRollouts, refuse
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.wire.peer_rollouts import rollouts_from_vllm

__all__ = ["VllmRollouts"]

_LEAST_TEMPERATURE = 0.01  # vLLM raises what is above 0 and below it
_OURS = {"return_sampling_mask", "return_sampling_mask_logprobs", "sampling_semantics"}  # settled when vLLM starts


class VllmRollouts(PeerRollouts):
    """A server of vLLM ≥ 0.28, started as `vllm serve MODEL --enable-scale-out --return-sampling-mask --logprobs-mode
    processed_logprobs`; with VLLM_SERVER_DEV_MODE=1 for weights.
    """

    _remedy = "start vLLM with --return-sampling-mask, on the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)"
    _logprobs_remedy = (
        "start vLLM with --logprobs-mode processed_logprobs, and with --return-sampling-mask-logprobs for those of rows"
    )
    _max_model_len: int | None = None

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """See `PeerRollouts`."""
        if params.greedy:
            raise refuse(params, "temperature", "vLLM keeps no masks of greedy draws; use top_k=1 with temperature=1.0")
        if params.top_k <= 0:
            raise refuse(params, "top_k", "vLLM keeps masks with a positive top_k only; give the widest you replay")
        if params.sampling_semantics not in (None, "vllm"):
            raise refuse(params, "sampling_semantics", "a vLLM server follows its own; leave it out")
        changes: dict[str, Any] = {}
        if params.temperature < _LEAST_TEMPERATURE:
            changes["temperature"] = _LEAST_TEMPERATURE
        if params.max_tokens is None:
            if self._max_model_len is None:
                self._max_model_len = int(self._server.get("/v1/models")["data"][0]["max_model_len"])
            changes["max_tokens"] = self._max_model_len - np.asarray(prompt).size
        return params.replace(**changes) if changes else params

    @property
    def weight_version(self) -> str:
        """See `PeerRollouts`."""
        return self._server.weight_version

    def weight_checksums(self) -> dict[str, str]:
        """See `PeerRollouts`."""
        return self._server.weight_checksums()

    def _answer(
        self, token_ids: list[int], params: SamplingParams, given: dict[str, Any], request_id: str | None
    ) -> list[Rollout]:
        body = {"token_ids": token_ids, "sampling_params": _all_of(params)}
        answer = self._server.post(
            "/inference/v1/generate", body if request_id is None else {**body, "request_id": request_id}
        )
        return rollouts_from_vllm(answer, prompt_token_ids=token_ids, sampling_params=given)

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._server.abort([f"generate-tokens-{name}" for name in request_ids])

    def _load_weights(self, folder: Path, version: str) -> None:
        self._server.post("/pause?mode=wait")
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._server.post("/collective_rpc", body)
            self._server.post("/update_weight_version", {"new_version": version})
        finally:
            self._server.post("/resume")


def _all_of(params: SamplingParams) -> dict[str, Any]:
    """Every field, so that the server fills in none; null stands only where it is the default itself."""
    fields = params.model_dump(mode="json", exclude=_OURS)
    return {name: value if value not in ([], {}) else None for name, value in fields.items()}
