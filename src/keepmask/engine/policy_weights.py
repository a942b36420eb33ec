"""Weights of a trainer's module, and their way into an engine's model without a second copy of either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keepmask.errors import ConfigError, RequestError

__all__ = ["copy_changed", "policy_weights"]

_MAX_LISTED = 8  # offending tensors named in one error


@torch.no_grad()
def policy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the plain model's state dict, adapters of PEFT merged one by one; the model is left
    alone.

    Raises ConfigError for adapters that have no merged form.
    """
    if not hasattr(model, "get_base_model"):
        yield from ((name, _whole(tensor)) for name, tensor in model.state_dict().items())
        return
    base: Any = model.get_base_model()  # type: ignore[operator]
    adapted: dict[str, Any] = {}
    renamed: dict[str, str] = {}  # where the tensors of an adapted layer are, and what they are called without PEFT
    for name, module in base.named_modules():
        if hasattr(module, "base_layer"):
            if not hasattr(module, "get_delta_weight"):
                raise ConfigError(f"{name}: {type(module).__name__} has no weights to merge for the rollout engine")
            adapted[f"{name}.base_layer.weight"] = module
            renamed[f"{name}.base_layer."] = f"{name}."
        elif hasattr(module, "modules_to_save"):
            renamed[f"{name}.modules_to_save.{module.active_adapters[0]}."] = f"{name}."
    layers = tuple(renamed.values())
    for name, tensor in base.state_dict().items():
        inside = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        if inside is not None:
            value = _merged(adapted[name]) if name in adapted else tensor
            yield renamed[inside] + name.removeprefix(inside), _whole(value)
        elif not name.startswith(layers):
            yield name, _whole(tensor)


@torch.no_grad()
def copy_changed(model: nn.Module, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> int:
    """Write into `model` those weights that differ from its own, one after the other; returns how many there were.

    weights: gives all of them by their names in the state dict, each time it is called; they are rounded to the model's
    type. It is called twice: everything is checked before anything is written. Raises RequestError naming what is
    missing, unknown, of another shape or not finite, and then writes nothing.
    """
    targets = model.state_dict()
    problems, missing = [], dict.fromkeys(targets)
    for name, value in weights():
        missing.pop(name, None)
        if name not in targets:
            problems.append(f"{name}: the model has no such weight")
        elif value.shape != targets[name].shape:
            problems.append(f"{name}: shape {list(value.shape)} instead of {list(targets[name].shape)}")
        elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
            problems.append(f"{name}: holds NaN or infinity")
    problems += [f"{name}: is missing" for name in missing]
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise RequestError(
            f"weights: the model keeps its own: {'; '.join(problems[:_MAX_LISTED])}{more}", param="weights"
        )
    num_changed = 0
    for name, value in weights():
        target = targets[name]
        new = value.detach().to(device=target.device, dtype=target.dtype)
        if not torch.equal(new, target):
            target.copy_(new)
            num_changed += 1
    return num_changed


def _merged(layer: Any) -> Tensor:
    """The weight of an adapted layer with its active adapters added."""
    changes = [] if layer.merged else [layer.get_delta_weight(each) for each in layer.active_adapters]
    merged: Tensor = sum(changes, layer.base_layer.weight)
    return merged


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
