"""`Decoder`: the forward of Llama-like models in few operations, on the weights of the transformers model.

One matrix product for queries, keys and values; norms, rotation and activation each in one pass. The numbers are those
of the model's own code: products are merged along their outputs, and values are rounded where that code rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepmask.forward import layer_ops
from keepmask.forward.attention import AttentionContext, attend
from keepmask.forward.layer_ops import fastest
from keepmask.forward.linear import Linear, is_tiled, linear_layer
from keepmask.forward.paged_attention import compiled_for

if TYPE_CHECKING:
    from keepmask.forward.decoder_program import DecoderProgram

__all__ = ["Decoder", "Layer", "Norm"]

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


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


class Decoder:
    """Computes what `model.base_model` computes, for the models that `of` accepts."""

    def __init__(self, model: PreTrainedModel, layers: list[Layer], max_num_tokens: int) -> None:
        self._base = model.base_model
        self._layers, self._max_num_tokens = layers, max_num_tokens
        self._norm = Norm.of(self._base.norm)
        first, parameter = layers[0], model.get_input_embeddings().weight
        widths = (parameter.shape[1], first.head_dim, first.gate.out_features)
        self._ops = fastest(parameter.device, parameter.dtype, *widths)
        self._is_tiled = self._ops is not layer_ops and all(is_tiled(linear) for linear in self.linears)
        self._program: DecoderProgram | None = None
        self._latest: DecoderProgram | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, max_num_tokens: int) -> Decoder | None:
        """The decoder of a Llama, Mistral, Qwen2 or Qwen3 model; None for any other, or where a part is unusual.

        The weights of its linear layers may be kept for the CPU's kernels only, see `linear_layer`.
        max_num_tokens: tokens of a forward that memory is held for.
        """
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return None
        modules = list(model.base_model.layers)
        if any(not _is_usual(module) for module in modules):
            return None
        return cls(model, [_layer(model.config, module) for module in modules], max_num_tokens)

    def __call__(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states [T, E] of tokens [T] at positions [T]."""
        x = self._base.embed_tokens(input_ids)
        cos, sin = (part[0].contiguous() for part in self._base.rotary_emb(x[None], positions[None]))
        self._latest = self._program_for(context, x.shape[0])
        if self._latest is not None:
            return self._latest(x, cos, sin, context.batch)
        ops, update = self._ops, None
        for layer in self._layers:
            y = self._normed(x, update, layer.attention_norm)
            y = self._normed(x, layer.attend(y, cos, sin, context, ops), layer.mlp_norm)
            update = layer.down(ops.silu_mul(layer.gate(y), layer.up(y)))
        return self._normed(x, update, self._norm)

    def seconds(self) -> dict[str, float]:
        """Where the time of the latest forward went, if it was one call of compiled code.

        "linear" and "attention", and "model" for the rest.
        """
        return {} if self._latest is None else self._latest.program.seconds()

    @property
    def linears(self) -> list[Linear]:
        """The matrix products of a forward, in order."""
        return [
            linear
            for layer in self._layers
            for linear in (layer.query_key_value, layer.output, layer.gate, layer.up, layer.down)
        ]

    def _program_for(self, context: AttentionContext, num_tokens: int) -> DecoderProgram | None:
        """The compiled forward over this cache, where all tokens attend one by one and it has room for them."""
        cache = context.cache
        if not self._is_tiled or context.batch.spans or compiled_for(cache.layers[0].keys, context.impl) is None:
            return None
        if self._program is None or self._program.cache is not cache:
            # Loads numba, which not every platform has.
            from keepmask.forward.decoder_program import DecoderProgram

            self._program = DecoderProgram(self._layers, self._norm, cache, self._max_num_tokens)
        return self._program if num_tokens <= self._program.capacity else None

    def _normed(self, x: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
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


def _layer(settings: Any, module: Any) -> Layer:
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
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat([bias.data for bias in biases]) if biases else None
    if bias is not None:
        for parameter, part in zip(biases, torch.split(bias, [len(each) for each in biases]), strict=True):
            parameter.data = part  # so that changes of it are followed
    return linear_layer([each.weight for each in linears], bias, sole=True)
