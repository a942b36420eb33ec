"""`Decoder`: the forward of Llama-like models in few operations, on the weights of the transformers model.

One matrix product for queries, keys and values; norms, rotation and activation each in one pass. The numbers are those
of the model's own code: products are merged along their outputs, and values are rounded where that code rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepmask.engine.attention import AttentionContext, attend
from keepmask.kernels.decoder_ops import fastest
from keepmask.kernels.packed_linear import PackedLinear

__all__ = ["Decoder"]

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(weight=module.weight, eps=module.variance_epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The parts of one decoder layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    attention_norm: _Norm
    query_key_value: PackedLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: PackedLinear
    mlp_norm: _Norm
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

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


class Decoder:
    """Computes what `model.base_model` computes, for the models that `of` accepts."""

    def __init__(self, model: PreTrainedModel, layers: list[_Layer]) -> None:
        self._base = model.base_model
        self._layers = layers
        self._norm = _Norm.of(self._base.norm)
        first, parameter = layers[0], model.get_input_embeddings().weight
        widths = (parameter.shape[1], first.head_dim, first.gate.out_features)
        self._ops = fastest(parameter.device, parameter.dtype, *widths)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Decoder | None:
        """The decoder of a Llama, Mistral, Qwen2 or Qwen3 model; None for any other, or where a part is unusual.

        The weights of its linear layers may be kept for the CPU's kernels only, see `PackedLinear`.
        """
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return None
        modules = list(model.base_model.layers)
        if any(not _is_usual(module) for module in modules):
            return None
        return cls(model, [_layer(model.config, module) for module in modules])

    def __call__(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states [T, E] of tokens [T] at positions [T]."""
        x = self._base.embed_tokens(input_ids)
        cos, sin = (part[0].contiguous() for part in self._base.rotary_emb(x[None], positions[None]))
        ops, update = self._ops, None
        for layer in self._layers:
            y = self._normed(x, update, layer.attention_norm)
            y = self._normed(x, layer.attend(y, cos, sin, context, ops), layer.mlp_norm)
            update = layer.down(ops.silu_mul(layer.gate(y), layer.up(y)))
        return self._normed(x, update, self._norm)

    @property
    def linears(self) -> list[PackedLinear]:
        """The matrix products of a forward, in order."""
        return [
            linear
            for layer in self._layers
            for linear in (layer.query_key_value, layer.output, layer.gate, layer.up, layer.down)
        ]

    def _normed(self, x: Tensor, update: Tensor | None, norm: _Norm) -> Tensor:
        """x after the update, in place, and then normed."""
        normed: Tensor = (
            self._ops.rms_norm(x, norm.weight, norm.eps)
            if update is None
            else self._ops.add_rms_norm(x, update, norm.weight, norm.eps)
        )
        return normed


def _is_usual(module: Any) -> bool:
    """Whether a layer has the parts that `_layer` reads, plain linear ones where products are merged."""
    attention, mlp = module.self_attn, module.mlp
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [module.input_layernorm, module.post_attention_layernorm]
    return all(type(linear) is nn.Linear for linear in linears) and all(
        hasattr(norm, "variance_epsilon") for norm in norms
    )


def _layer(settings: Any, module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    dim = attention.head_dim
    mistral = (
        settings.model_type == "mistral"
    )  # whose attention takes the window from the config, others from the layer
    window = getattr(settings if mistral else attention, "sliding_window", None)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else _Norm.of(norm) for norm in norms)
    return _Layer(
        index=attention.layer_idx,
        num_heads=attention.q_proj.out_features // dim,
        num_kv_heads=attention.k_proj.out_features // dim,
        head_dim=dim,
        scale=attention.scaling,
        window=window,
        attention_norm=_Norm.of(module.input_layernorm),
        query_key_value=_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=query_norm,
        key_norm=key_norm,
        output=_linear(attention.o_proj),
        mlp_norm=_Norm.of(module.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(*linears: nn.Linear) -> PackedLinear:
    """One linear layer with the outputs of all, one after the other."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat([bias.data for bias in biases]) if biases else None
    if bias is not None:
        for parameter, part in zip(biases, torch.split(bias, [len(each) for each in biases]), strict=True):
            parameter.data = part  # so that changes of it are followed
    return PackedLinear([linear.weight for linear in linears], bias, sole=True)
