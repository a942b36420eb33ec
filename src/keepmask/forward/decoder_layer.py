"""`Layer`: the parts of one decoder layer, read from the model of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from keepmask.forward.attention import AttentionContext, attend
from keepmask.forward.linear import linear_layer
from keepmask.forward.linear_torch import Linear

__all__ = ["Layer", "Norm", "is_usual", "layer_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Root mean square norm."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """That of a module of transformers."""
        return cls(weight=module.weight, eps=module.variance_epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parts of one decoder layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    attention_norm: Norm
    query_key_value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, ops: Any) -> Tensor:
        """The attention's output [T, E] from its normed input [T, E]."""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        merged = self.query_key_value(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = merged.split_with_sizes([heads, kv_heads, kv_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            ops.head_rms_norm(q, self.query_norm.weight, self.query_norm.eps)
            ops.head_rms_norm(k, self.key_norm.weight, self.key_norm.eps)
        ops.rotate(merged[:, : heads + kv_heads], cos, sin)
        out = attend(self.index, q, k, v, context, scale=self.scale, window=self.window)
        return self.output(out.view(x.shape[0], heads * dim))


def is_usual(module: Any) -> bool:
    """Whether a layer has the parts that `layer_of` reads, plain linear ones where products are merged."""
    attention, mlp = module.self_attn, module.mlp
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [module.input_layernorm, module.post_attention_layernorm]
    return all(type(linear) is nn.Linear for linear in linears) and all(
        hasattr(norm, "variance_epsilon") for norm in norms
    )


def layer_of(settings: Any, module: Any) -> Layer:
    """The parts of a layer of transformers that `is_usual`."""
    attention, mlp = module.self_attn, module.mlp
    dim = attention.head_dim
    mistral = (
        settings.model_type == "mistral"
    )  # whose attention takes the window from the config, others from the layer
    window = getattr(settings if mistral else attention, "sliding_window", None)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else Norm.of(norm) for norm in norms)
    return Layer(
        index=attention.layer_idx,
        num_heads=attention.q_proj.out_features // dim,
        num_kv_heads=attention.k_proj.out_features // dim,
        head_dim=dim,
        scale=attention.scaling,
        window=window,
        attention_norm=Norm.of(module.input_layernorm),
        query_key_value=_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=query_norm,
        key_norm=key_norm,
        output=_linear(attention.o_proj),
        mlp_norm=Norm.of(module.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(*linears: nn.Linear) -> Linear:
    """One linear layer with the outputs of all, one after the other."""
    return linear_layer([each.weight for each in linears], [each.bias for each in linears])
