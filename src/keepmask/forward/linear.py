"""`linear_layer`: the linear layer for given weights: of compiled code on CPUs, else of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from keepmask.forward.linear_compiled import CompiledLinear

__all__ = ["Linear", "TorchLinear", "is_compiled", "linear_layer"]


class Linear(Protocol):
    """x @ weight.T + bias, for the parameters as they are at the call."""

    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """[out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""

    def float32(self, x: Tensor) -> Tensor:
        """[T, out] float32, summed up and stored in it, whatever the weight's type."""


class TorchLinear:
    """torch's own linear: the rows of the parameters [out_i, in], one after the other, are the weight.

    bias: [out] or None. A product may depend, in its last bits, on how many rows are computed with it.
    """

    _CHUNK = 16_384  # rows of the weight that are held in float32 at a time

    def __init__(self, parameters: Sequence[Tensor], bias: Tensor | None) -> None:
        self._parameters, self.bias = list(parameters), bias
        self.out_features = sum(len(parameter) for parameter in parameters)
        self.in_features = int(parameters[0].shape[1])

    @property
    def weight(self) -> Tensor:
        """[out, in]."""
        return self._parameters[0] if len(self._parameters) == 1 else torch.cat(self._parameters)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        if len(self._parameters) == 1:
            return F.linear(x, self._parameters[0], self.bias)
        product = torch.cat([F.linear(x, parameter) for parameter in self._parameters], -1)
        return product if self.bias is None else product + self.bias

    def float32(self, x: Tensor) -> Tensor:
        """[T, out] float32 from x [T, in]."""
        x = x.float()
        parts = [F.linear(x, part.float()) for each in self._parameters for part in torch.split(each, self._CHUNK)]
        product = torch.cat(parts, -1)
        return product if self.bias is None else product + self.bias.float()


def linear_layer(parameters: Sequence[Tensor], bias: Tensor | None) -> Linear:
    """The layer whose weight is the rows of these parameters, one after the other. They are read, never written."""
    module = _compiled()
    if module is not None and all(module.supports(parameter) for parameter in parameters):
        layer: Linear = module.CompiledLinear(parameters, bias)
        return layer
    return TorchLinear(parameters, bias)


def is_compiled(layer: Linear) -> TypeGuard[CompiledLinear]:
    """Whether the layer is a `CompiledLinear`, which can be a step of a program."""
    module = _compiled()
    return module is not None and isinstance(layer, module.CompiledLinear)


@cache
def _compiled() -> ModuleType | None:
    return import_module("keepmask.forward.linear_compiled") if find_spec("numba") else None
