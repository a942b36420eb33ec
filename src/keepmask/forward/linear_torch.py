"""`Linear`: what a linear layer is, and torch's own, which runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Linear", "TorchLinear", "whole_bias"]


class Linear(Protocol):
    """x @ weight.T + bias, for the parameters as they are at the call."""

    in_features: int
    out_features: int

    @property
    def weight(self) -> Tensor:
        """[out, in]."""

    @property
    def bias(self) -> Tensor | None:
        """[out] or None."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""

    def float32(self, x: Tensor) -> Tensor:
        """[T, out] float32, summed up and stored in it, whatever the weight's type."""


class TorchLinear:
    """torch's own linear: the rows of the parameters [out_i, in], one after the other, are the weight.

    biases: of each parameter, [out_i] or None. A product may depend, in its last bits, on the rows computed with it.
    """

    _CHUNK = 16_384  # rows of the weight that are held in float32 at a time

    def __init__(self, parameters: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._parameters, self._biases = list(parameters), list(biases)
        self.out_features = sum(len(parameter) for parameter in parameters)
        self.in_features = int(parameters[0].shape[1])

    @property
    def weight(self) -> Tensor:
        """[out, in]."""
        return self._parameters[0] if len(self._parameters) == 1 else torch.cat(self._parameters)

    @property
    def bias(self) -> Tensor | None:
        """[out] or None."""
        return whole_bias(self._parameters, self._biases)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        parts = [F.linear(x, *each) for each in zip(self._parameters, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def float32(self, x: Tensor) -> Tensor:
        """[T, out] float32 from x [T, in]."""
        x = x.float()
        parts = [F.linear(x, part.float()) for each in self._parameters for part in torch.split(each, self._CHUNK)]
        product, bias = torch.cat(parts, -1), self.bias
        return product if bias is None else product + bias.float()


def whole_bias(parameters: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of these parameters one after the other, zeros for those without one; None where none has any."""
    if all(bias is None for bias in biases):
        return None
    parts = [
        parameter.new_zeros(len(parameter)) if bias is None else bias
        for parameter, bias in zip(parameters, biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
