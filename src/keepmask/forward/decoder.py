"""`Decoder`: the forward of Llama-like models in few operations, on the weights of the transformers model.

One matrix product for queries, keys and values; norms, rotation and activation each in one pass. The numbers are those
of the model's own code: products are merged along their outputs, and values are rounded where that code rounds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from keepmask.forward import layer_ops
from keepmask.forward.attention import AttentionContext
from keepmask.forward.decoder_layer import Layer, Norm, is_usual, layer_of
from keepmask.forward.layer_ops import fastest
from keepmask.forward.linear import is_compiled
from keepmask.forward.linear_torch import Linear
from keepmask.forward.paged_attention import compiled_for
from keepmask.forward.rotation import Rotation

if TYPE_CHECKING:
    from keepmask.forward.decoder_program import DecoderProgram

__all__ = ["Decoder"]

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class Decoder:
    """Computes what `model.base_model` computes, for the models that `of` accepts."""

    def __init__(self, model: PreTrainedModel, layers: list[Layer], max_num_tokens: int) -> None:
        self._base = model.base_model
        self._layers, self._max_num_tokens = layers, max_num_tokens
        self._norm = Norm.of(self._base.norm)
        self._rotation = Rotation(self._base.rotary_emb, model.get_input_embeddings().weight)
        first, parameter = layers[0], model.get_input_embeddings().weight
        kind = parameter.device, parameter.dtype
        self._ops = fastest(*kind, parameter.shape[1], first.gate.out_features)
        self._head_ops = fastest(*kind, first.head_dim)
        self._is_compiled = layer_ops not in (self._ops, self._head_ops) and all(
            is_compiled(linear) for linear in self.linears
        )
        self._program: DecoderProgram | None = None
        self._latest: DecoderProgram | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, max_num_tokens: int) -> Decoder | None:
        """The decoder of a Llama, Mistral, Qwen2 or Qwen3 model; None for any other, or where a part is unusual.

        max_num_tokens: tokens of a forward that memory is held for.
        """
        if type(model).__name__ not in _FAMILY or model.config.hidden_act != "silu":
            return None
        modules = list(model.base_model.layers)
        if any(not is_usual(module) for module in modules):
            return None
        return cls(model, [layer_of(model.config, module) for module in modules], max_num_tokens)

    def __call__(self, input_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states [T, E] of tokens [T] at positions [T]."""
        x = self._base.embed_tokens(input_ids)
        cos, sin = self._rotation(positions)
        self._latest = self._program_for(context, x.shape[0])
        if self._latest is not None:
            return self._latest(x, cos, sin, context.batch)
        ops, update = self._ops, None
        for layer in self._layers:
            y = self._normed(x, update, layer.attention_norm)
            y = self._normed(x, layer.attend(y, cos, sin, context, self._head_ops), layer.mlp_norm)
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
        if not self._is_compiled or context.batch.spans or compiled_for(cache.layers[0].keys, context.impl) is None:
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
