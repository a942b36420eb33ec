"""The elementwise operations of a decoder layer, each in one pass.

The functions here define the operations; `cpu_decoder` computes the same, to the same roundings, on CPUs where numba is
installed. A value is rounded to the tensors' type wherever the model code of transformers rounds it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "head_rms_norm", "rms_norm", "rotate", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019). x: [T, E]; returns [T, E]."""
    if (kernel := _compiled(x)) is not None:
        return kernel.rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += update, in place; returns rms_norm(x, weight, eps). x, update: [T, E]."""
    if (kernel := _compiled(x)) is not None:
        return kernel.add_rms_norm(x, update, weight, eps)  # type: ignore[no-any-return]
    x += update
    return rms_norm(x, weight, eps)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Each head of x, in place: x[t, h] = rms_norm(x[t, h], weight, eps). x: [T, H, D]; weight: [D]."""
    if (kernel := _compiled(x)) is not None:
        kernel.head_rms_norm(x, weight, eps)
        return
    x.copy_(rms_norm(x, weight, eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding (Su et al. 2021), in place: x · cos + [-x₂, x₁] · sin with x = [x₁, x₂] by halves of D.

    x: [T, H, D]. cos, sin: [T, D], of x's type.
    """
    if cos.shape != (x.shape[0], x.shape[2]) or sin.shape != cos.shape or cos.dtype != x.dtype:
        raise ValueError(f"cos {list(cos.shape)} {cos.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if (kernel := _compiled(x)) is not None:
        kernel.rotate(x, cos, sin)
        return
    first, second = x.chunk(2, -1)
    x.copy_(x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None])


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020). gate_up: [T, 2F], gate first; returns [T, F]."""
    if (kernel := _compiled(gate_up)) is not None:
        return kernel.silu_mul(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _compiled(x: Tensor) -> ModuleType | None:
    """The module of compiled kernels, where it serves such tensors."""
    kernel = _module()
    return kernel if kernel is not None and kernel.supports(x) else None


@cache
def _module() -> ModuleType | None:
    return import_module("keepmask.kernels.cpu_decoder") if find_spec("numba") else None
