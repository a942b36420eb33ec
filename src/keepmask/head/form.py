"""`HeadForm` and `PairTransforms`: from the product of a hidden state and a head row to a transformed logit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["HeadForm", "PairTransforms"]

# Cohere; Granite and HyperCLOVA X; Falcon H1; Muse. Gemma, NanoChat and others; RecurrentGemma; xLSTM.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True, kw_only=True)
class HeadForm:
    """How hidden states and head rows make logits: cap * tanh(scale * (h . w + bias) / cap).

    The order is that of transformers' models which have both (Muse Spark). softcap and rounding None leave their step
    out.
    """

    softcap: float | None = None
    scale: float = 1.0
    rounding: Literal["bf16"] | None = None
    """Rounds h . w + bias as a head that computes in bfloat16 does; the gradient passes as if it did not."""

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: must be a positive number; None leaves it out")
        if self.scale == 0 or not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale}: must be a number other than 0; 1.0 changes nothing")
        if self.rounding not in (None, "bf16"):
            raise ValueError(f'rounding={self.rounding!r}: must be "bf16", or None for none')

    @classmethod
    def of(cls, config: Any) -> HeadForm:
        """The form that a text model's config of transformers asks for, by the names its models give the numbers."""
        factors = {name: getattr(config, name, None) or 1.0 for name in _SCALES}
        divisor = factors.pop("logits_scaling")
        scale = math.prod(factors.values())
        # Granite divides by logits_scaling; HyperCLOVA X multiplies.
        scale = scale * divisor if config.model_type.startswith("hyperclovax") else scale / divisor
        return cls(softcap=next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None))), None), scale=scale)

    @property
    def is_identity(self) -> bool:
        """Whether logits are the products themselves."""
        return self.softcap is None and self.scale == 1.0 and self.rounding is None

    def apply(self, products: Tensor) -> Tensor:
        """The logits of h . w + bias. Differentiable."""
        if self.rounding is not None:
            rounded = products.detach().bfloat16().to(products.dtype)
            products = products + (rounded - products.detach()) if products.requires_grad else rounded
        if self.scale != 1.0:
            products = products * self.scale
        return products if self.softcap is None else self.softcap * torch.tanh(products / self.softcap)

    def backward(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient of h . w + bias, from that of the logits and their values."""
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        return grad if self.scale == 1.0 else grad * self.scale


@dataclass(frozen=True, eq=False, kw_only=True)
class PairTransforms:
    """The transforms of some logits, element by element; None leaves a step out.

    Each tensor has the shape of the logits, [M] pairs or [T, V] whole rows, or broadcasts to it.
    """

    bias: Tensor | None = None
    repetition: Tensor | None = None
    """The repetition penalty where the id is in the history, 1 elsewhere."""
    subtract: Tensor | None = None
    """Frequency penalty x count + presence penalty where the count is not 0."""
    temperature: Tensor | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The transformed logits, differentiable in `logits`.

        The bias is added, then positive ones are divided and others multiplied by the repetition penalty, then the
        other penalties are subtracted, then all are divided by the temperature.
        """
        z = logits if self.bias is None else logits + self.bias
        if self.repetition is not None:
            z = torch.where(z > 0, z / self.repetition, z * self.repetition)
        if self.subtract is not None:
            z = z - self.subtract
        return z if self.temperature is None else z / self.temperature

    def slope(self, logits: Tensor) -> Tensor | None:
        """The derivative of `apply` at each of `logits`, None where it is 1 everywhere."""
        slope = None
        if self.repetition is not None:
            biased = logits if self.bias is None else logits + self.bias
            slope = torch.where(biased > 0, 1 / self.repetition, self.repetition)
        if self.temperature is None:
            return slope
        return self.temperature.reciprocal() if slope is None else slope / self.temperature
