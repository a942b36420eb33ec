"""`PeerRollouts`: what the servers of vLLM and SGLang have in common as backends."""

from __future__ import annotations

import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from keepmask.backends.base import tied_once
from keepmask.backends.http import Client, as_finished
from keepmask.errors import BackendError, ConfigError, MaskError, RequestError
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PeerRollouts"]


class PeerRollouts(ABC):
    """`Rollouts` of another engine's server. Every answer must have a mask of the drawn tokens.

    Before its first request the server is asked for one token, which tells whether it keeps masks and what its
    log-probs are of. Parameters travel with every default written out, so that no generation_config.json fills them in.

    timeout_s: for each wait for bytes. weights_folder: on a disk that the server reads too, for `update_weights`.
    Raises ConfigError for a server that must be started otherwise, RequestError for what it cannot serve, and
    BackendError where it fails.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        weights_folder: Path | str | None = None,
    ) -> None:
        self._server = Client(url, api_key=api_key, timeout_s=timeout_s)
        self._weights_folder = weights_folder
        self._checking, self._checked = threading.Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See `backends.base.Rollouts`."""
        found = dict(self.rollouts_as_finished(prompts, params))
        return [found[at] for at in range(len(prompts))]

    def rollouts_as_finished(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """See `backends.base.Rollouts`. The requests travel on a thread each."""
        return as_finished(self.generate, self._abort, prompts, params)

    def generate(
        self, prompt_token_ids: ArrayLike, params: SamplingParams, *, request_id: str | None = None
    ) -> list[Rollout]:
        """Complete a prompt; one rollout a completion."""
        resolved = self.resolved_params(prompt_token_ids, params)
        self.check_server()
        return self._drawn(prompt_token_ids, resolved, request_id)

    def check_server(self) -> None:
        """Ask once for a token of which just one can be drawn. Raises ConfigError for unusable settings."""
        with self._checking:
            if self._checked:
                return
            only = SamplingParams(max_tokens=1, top_k=1, logprobs=0, ignore_eos=True, seed=0)
            (probe,) = self._drawn([1], only, None)
            if probe.logprobs is None or probe.logprobs[0] != 0:
                found = None if probe.logprobs is None else probe.logprobs[0]
                raise ConfigError(
                    f"the log-prob of the only token that could be drawn is {found}, not 0: it is of the whole "
                    f"vocabulary; {self._logprobs_remedy}"
                )
            self._checked = True

    def update_weights(self, weights: Mapping[str, Tensor], *, version: str | None = None) -> str:
        """See `backends.base.Rollouts`. The weights cross `weights_folder` as a safetensors file."""
        if self._weights_folder is None:
            raise ConfigError("weights_folder=None: give a folder that the server reads too, or push by its own ways")
        import safetensors.torch  # loads torch

        old = self.weight_version.replace("default", "0")  # what both engines call the weights they started with
        named = version or (str(int(old) + 1) if old.isdecimal() else f"{old}+1")
        folder = Path(tempfile.mkdtemp(prefix="weights-", dir=self._weights_folder))
        try:
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tied_once(weights.items())}
            safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            self._load_weights(folder, named)
        finally:
            shutil.rmtree(folder)
        if (now := self.weight_version) != named:
            raise BackendError(f"the server's weights are version {now!r} after an update to {named!r}")
        return named

    def _drawn(self, prompt: ArrayLike, params: SamplingParams, request_id: str | None) -> list[Rollout]:
        """What the server draws, checked. params: resolved."""
        token_ids = np.asarray(prompt).tolist()
        given = params.model_dump(exclude_defaults=True)
        try:
            found = self._answer(token_ids, params, given, request_id)
        except MaskError as error:
            raise BackendError(f"the server's answer cannot be read: {error}") from error
        if len(found) != params.n:
            raise BackendError(f"the server answered {len(found)} completions for n={params.n}")
        named = [each if request_id is None else replace(each, request_id=request_id) for each in found]
        return [self._verified(replace(rollout, seed=params.seed)) for rollout in named]

    def _verified(self, rollout: Rollout) -> Rollout:
        mask = rollout.sampling_mask
        if mask is None:
            raise ConfigError(f"sampling_mask: null in the server's answer; {self._remedy}")
        if mask.logprobs is None and rollout.sampling_params.get("return_sampling_mask_logprobs"):
            raise ConfigError(f"sampling_mask_logprobs: none in the server's answer; {self._logprobs_remedy}")
        if len(mask) != rollout.token_ids.size:
            raise BackendError(f"sampling_mask: {len(mask)} rows for {rollout.token_ids.size} tokens; {self._remedy}")
        if (outside := np.flatnonzero(~mask.contains(rollout.token_ids))).size:
            at = outside[0]
            raise BackendError(
                f"sampling_mask: token {rollout.token_ids[at]} at position {at} is outside its row, which was kept at "
                "another position or of another draw; such a rollout cannot be replayed"
            )
        return rollout

    _remedy: str
    """How to start the server so that it keeps masks."""
    _logprobs_remedy: str
    """And so that its log-probs are of the support."""

    @property
    @abstractmethod
    def weight_version(self) -> str:
        """See `backends.base.Rollouts`."""

    @abstractmethod
    def weight_checksums(self) -> dict[str, str]:
        """A digest of every weight, by the server's own names."""

    @abstractmethod
    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """See `backends.base.Rollouts`. Raises RequestError for what the server draws without masks or not at all."""

    @abstractmethod
    def _answer(
        self, token_ids: list[int], params: SamplingParams, given: dict[str, Any], request_id: str | None
    ) -> list[Rollout]:
        """One request and its answer. given: the params for the rollouts."""

    @abstractmethod
    def _abort(self, request_ids: Sequence[str]) -> None:
        """End these requests."""

    @abstractmethod
    def _load_weights(self, folder: Path, version: str) -> None:
        """Have the server load `folder`/model.safetensors and call it `version`."""


def refuse(params: SamplingParams, name: str, why: str) -> RequestError:
    """The refusal of a parameter, with its value."""
    return RequestError(f"{name}={getattr(params, name)!r}: {why}", param=name)
