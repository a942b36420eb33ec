"""`linear_layer`: the linear layer for given weights: of compiled code on CPUs, else of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from keepmask.forward.linear_torch import Linear, TorchLinear

if TYPE_CHECKING:
    from keepmask.forward.linear_compiled import CompiledLinear

__all__ = ["compile_linears", "is_compiled", "linear_layer"]


def linear_layer(parameters: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
    """The layer whose weight is the rows of these parameters [out_i, in], one after the other.

    biases: of each parameter, [out_i] or None. All are read at each call, and never written.
    """
    module = _compiled()
    if module is not None and all(module.supports(parameter) for parameter in parameters):
        layer: Linear = module.CompiledLinear(parameters, biases)
        return layer
    return TorchLinear(parameters, biases)


def compile_linears(model: nn.Module) -> None:
    """Let the plain linear layers within a model compute in compiled code, where it takes their weights.

    What other modules compute, such as experts merged into one parameter, stays torch's.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            layer = linear_layer([module.weight], [module.bias])
            if is_compiled(layer):
                module.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: Linear, x: Tensor) -> Tensor:
    """[..., out] from x [..., in]."""
    return layer(x.reshape(-1, layer.in_features)).view(*x.shape[:-1], layer.out_features)


def is_compiled(layer: Linear) -> TypeGuard[CompiledLinear]:
    """Whether the layer is a `CompiledLinear`, which can be a step of a program."""
    module = _compiled()
    return module is not None and isinstance(layer, module.CompiledLinear)


@cache
def _compiled() -> ModuleType | None:
    return import_module("keepmask.forward.linear_compiled") if find_spec("numba") else None
