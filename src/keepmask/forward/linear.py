"""`linear_layer`: the fastest linear layer for given weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

from torch import Tensor

from keepmask.forward.linear_packed import PackedLinear

__all__ = ["Linear", "is_tiled", "linear_layer"]


class Linear(Protocol):
    """x @ weight.T + bias. Whoever reads or changes the weight calls `restore` before, and `refresh` afterwards."""

    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """[out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""

    def restore(self) -> None:
        """Give the parameters their memory and values."""

    def refresh(self) -> None:
        """Follow a change of the parameters."""


def linear_layer(parameters: Sequence[Tensor], bias: Tensor | None, *, sole: bool = False) -> Linear:
    """The layer whose weight is the rows of these parameters, one after the other.

    sole: the weight may be kept in the layout of the CPU's kernels only, see `PackedLinear`.
    """
    module = _tiled()
    if module is not None and all(module.supports(parameter) for parameter in parameters):
        layer: Linear = module.TiledLinear(parameters, bias)
        return layer
    return PackedLinear(parameters, bias, sole=sole)


def is_tiled(layer: Linear) -> bool:
    """Whether the layer is a `TiledLinear`, which can be a step of a program."""
    module = _tiled()
    return module is not None and isinstance(layer, module.TiledLinear)


@cache
def _tiled() -> ModuleType | None:
    return import_module("keepmask.forward.linear_tiles") if find_spec("numba") else None
