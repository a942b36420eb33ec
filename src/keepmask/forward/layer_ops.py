"""The elementwise operations of a decoder layer, each in one pass.

The functions here define the operations; `layer_ops_cpu` computes the same, to the same roundings, on CPUs where numba
is installed, and `fastest` chooses. A value is rounded to the tensors' type wherever the model code of transformers
rounds it.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "fastest", "head_rms_norm", "rms_norm", "rotate", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019). x: [T, E], contiguous; returns [T, E]."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += update, in place; returns rms_norm(x, weight, eps). x, update: [T, E], contiguous."""
    x += update
    return rms_norm(x, weight, eps)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Each head of x, in place: x[t, h] = rms_norm(x[t, h], weight, eps). x: [T, H, D]; weight: [D]."""
    x.copy_(rms_norm(x, weight, eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding (Su et al. 2021), in place: x · cos + [-x₂, x₁] · sin with x = [x₁, x₂] by halves of D.

    x: [T, H, D]. cos, sin: [T, D], of x's type.
    """
    first, second = x.chunk(2, -1)
    x.copy_(x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020). gate, up: [T, F], contiguous; returns [T, F]."""
    return F.silu(gate) * up


def fastest(device: torch.device, dtype: torch.dtype, *widths: int) -> ModuleType:
    """The module whose functions to call for contiguous rows of these widths: this one, or that of compiled kernels."""
    kernels = _compiled() if device.type == "cpu" else None
    return kernels if kernels is not None and kernels.supports(dtype, *widths) else sys.modules[__name__]


@cache
def _compiled() -> ModuleType | None:
    return import_module("keepmask.forward.layer_ops_cpu") if find_spec("numba") else None
