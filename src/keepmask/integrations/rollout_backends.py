"""Who draws a trainer's rollouts, and the weights it draws them with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from keepmask.backends.base import Rollouts
from keepmask.backends.http import Client
from keepmask.errors import ConfigError
from keepmask.llm import LLM

__all__ = ["embedded", "policy_weights", "rollouts_from"]


def rollouts_from(where: str | Rollouts, model: nn.Module, options: Mapping[str, Any]) -> Rollouts:
    """The backend that `where` names: "embedded", a server's URL, or a backend already.

    options: of `EngineConfig` for an embedded engine, of `Client` for a URL. Raises ConfigError for others.
    """
    if where == "embedded":
        return embedded(model, **options)
    if isinstance(where, str):
        if not where.startswith(("http://", "https://")):
            raise ConfigError(f"rollouts={where!r}: must be 'embedded', a server's URL, or an object like Rollouts")
        return Client(where, **options)
    if not isinstance(where, Rollouts):
        raise ConfigError(f"backend: {type(where).__name__} has not the methods of keepmask.backends.base.Rollouts")
    return where


def embedded(model: nn.Module, **options: Any) -> LLM:
    """An engine in this process for the policy `model`, in its type and on its device, from the checkpoint it was
    loaded from; a model that was made in memory is written to one first. options: of `EngineConfig`.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    weight = next(base.parameters())
    given = {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": weight.device.type,
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
    }
    if base.config._name_or_path:
        return LLM(base.config._name_or_path, **given | options)
    with tempfile.TemporaryDirectory(prefix="keepmask-policy-") as folder:
        base.config.save_pretrained(folder)
        base.generation_config.save_pretrained(folder)
        distinct = {tensor.data_ptr(): (name, tensor.contiguous()) for name, tensor in policy_weights(model)}
        safetensors.torch.save_file(dict(distinct.values()), Path(folder) / "model.safetensors", {"format": "pt"})
        return LLM(folder, **given | options)


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
