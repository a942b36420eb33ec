"""`RolloutBackend`: where a trainer's rollouts come from, an engine in its process or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import safetensors.torch
import torch
from torch import Tensor, nn

from keepmask.backends.http import AsyncClient, Client
from keepmask.errors import ConfigError
from keepmask.llm import LLM
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

__all__ = ["EmbeddedRollouts", "RolloutBackend", "ServerRollouts", "policy_weights", "rollouts_from"]

_PART_BYTES = 64 * 2**20  # of weights that travel in one request


@runtime_checkable
class RolloutBackend(Protocol):
    """What a trainer asks of whoever draws its rollouts."""

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Rollout]]:
        """The completions of each prompt, with masks and log-probabilities. prompts: token ids."""

    def update_weights(self, model: nn.Module, version: str) -> None:
        """Draw with the weights of `model` from now on, and call them `version`."""


class EmbeddedRollouts:
    """An engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> EmbeddedRollouts:
        """An engine for the policy `model`, in its type, on its device. options: of `EngineConfig`."""
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        weight = next(base.parameters())
        given = {
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "return_sampling_mask": True,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
        }
        return cls(LLM(base.config._name_or_path, **given | options))

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Rollout]]:
        """See `RolloutBackend`."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [output.rollouts() for output in self.llm.generate(asked, list(params), use_tqdm=False)]

    def update_weights(self, model: nn.Module, version: str) -> None:
        """See `RolloutBackend`."""
        self.llm.update_weights(dict(policy_weights(model)), version=version, cast=True)


class ServerRollouts:
    """A keepmask server, which answers all requests at once."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._url = url
        self._options: dict[str, Any] = {"api_key": api_key, "timeout_s": timeout_s}

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Rollout]]:
        """See `RolloutBackend`."""

        async def everything() -> list[list[Rollout]]:
            async with AsyncClient(self._url, **self._options) as client:
                requests = zip(prompts, params, strict=True)
                return await asyncio.gather(*(client.generate(list(prompt), each) for prompt, each in requests))

        return asyncio.run(everything())

    def update_weights(self, model: nn.Module, version: str) -> None:
        """See `RolloutBackend`."""
        with Client(self._url, **self._options) as client:
            client.update_weights(map(safetensors.torch.save, _parts(policy_weights(model))), version, cast=True)


def rollouts_from(where: str | RolloutBackend, model: nn.Module, options: Mapping[str, Any]) -> RolloutBackend:
    """The backend that `where` names: "embedded", a server's URL, or a backend already.

    options: of `EngineConfig` for an embedded engine, of `ServerRollouts` for a URL. Raises ConfigError for others.
    """
    if where == "embedded":
        return EmbeddedRollouts.of(model, **options)
    if isinstance(where, str):
        if not where.startswith(("http://", "https://")):
            raise ConfigError(f"rollouts={where!r}: must be 'embedded', a server's URL, or a RolloutBackend")
        return ServerRollouts(where, **options)
    if not isinstance(where, RolloutBackend):
        raise ConfigError(f"rollouts: {type(where).__name__} has no generate and update_weights as RolloutBackend has")
    return where


@torch.no_grad()
def policy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the plain model's state dict, adapters of PEFT merged; the model is left alone.

    Raises ConfigError for adapters that have no merged form.
    """
    if not hasattr(model, "get_base_model"):
        yield from ((name, _whole(tensor)) for name, tensor in model.state_dict().items())
        return
    base: Any = model.get_base_model()  # type: ignore[operator]
    merged: dict[str, Tensor] = {}
    renamed: dict[str, str] = {}  # where the tensors of an adapted layer are, and what they are called without PEFT
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            if not hasattr(module, "get_delta_weight"):
                raise ConfigError(f"{name}: {type(module).__name__} has no weights to merge for the rollout engine")
            weight = module.base_layer.weight
            changes = [] if module.merged else [module.get_delta_weight(each) for each in module.active_adapters]
            merged[f"{name}.base_layer.weight"] = sum(changes, weight)
            renamed[f"{name}.base_layer."] = f"{name}."
        elif hasattr(module, "modules_to_save"):
            renamed[f"{name}.modules_to_save.{module.active_adapters[0]}."] = f"{name}."
    layers = tuple(renamed.values())
    for name, tensor in base.state_dict().items():
        inside = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        if inside is not None:
            yield renamed[inside] + name.removeprefix(inside), _whole(merged.get(name, tensor))
        elif not name.startswith(layers):
            yield name, _whole(tensor)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _parts(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of about 64 MB together, each with memory of its own; of tied ones the first."""
    part: dict[str, Tensor] = {}
    size, seen = 0, set()
    for name, tensor in weights:
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        if size >= _PART_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
