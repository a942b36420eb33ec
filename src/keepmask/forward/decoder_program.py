"""`DecoderProgram`: a whole forward of a decoder as one call of compiled code.

Step by step it computes what the layers of `Decoder` compute one operation at a time, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepmask.compiled.program import Program
from keepmask.compiled.team import rows_an_item
from keepmask.forward import layer_ops_cpu, linear_compiled, paged_attention_cpu
from keepmask.forward.attention import KVCache
from keepmask.forward.decoder_layer import Layer, Norm
from keepmask.forward.forward_batch import ForwardBatch
from keepmask.forward.linear import is_compiled
from keepmask.forward.linear_compiled import CompiledLinear, padded
from keepmask.forward.linear_torch import Linear

__all__ = ["DecoderProgram"]


class DecoderProgram:
    """The layers and the last norm, over this cache, for up to `capacity` tokens at a time that attend one by one."""

    def __init__(self, layers: Sequence[Layer], norm: Norm, cache: KVCache, capacity: int) -> None:
        self.capacity = padded(capacity)
        self.cache, self._num_heads = cache, layers[0].num_heads
        self.program = Program()
        dtype, width = norm.weight.dtype, len(norm.weight)
        first = layers[0]
        attended = first.num_heads * first.head_dim

        def buffer(size: int) -> Tensor:
            return torch.empty(self.capacity, size, dtype=dtype)

        self._x, self._normed, self._attended = buffer(width), buffer(width), buffer(attended)
        self._merged = buffer(first.query_key_value.out_features)
        self._tokens, self._gated = buffer(max(width, attended)), buffer(first.gate.out_features)
        for layer, kept in zip(layers, cache.layers, strict=True):
            self._add_attention(layer, kept.keys, kept.values)
            self._add_mlp(layer)
        x = self._x.data_ptr()
        layer_ops_cpu.add_norm(self.program, norm.weight, norm.eps, x=x, out="hidden", stride=width)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch[Any]) -> Tensor:
        """[T, E] hidden states from embedded tokens x [T, E]; cos, sin: [T, D], contiguous."""
        T = x.shape[0]
        self._x[:T] = x
        hidden = torch.empty_like(x)
        self.program.run(
            T=T,
            rows=rows_an_item(T),
            heads=paged_attention_cpu.heads_an_item(self.cache.layers[0].keys, self._num_heads, T),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            blocks=batch.slot_blocks.data_ptr(),
            offsets=batch.slot_offsets.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            width=batch.block_tables.stride(0),
            chunks=batch.token_chunks.data_ptr(),
            lens=batch.context_lens.data_ptr(),
            hidden=hidden.data_ptr(),
        )
        return hidden

    def _add_attention(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        program, merged, dim = self.program, self._merged.data_ptr(), layer.head_dim
        self._add_tokens_of(layer.attention_norm)
        _compiled(layer.query_key_value).add_to(
            program,
            tokens=self._tokens.data_ptr(),
            out=_compiled(layer.query_key_value).parts_of(merged, self._merged.element_size()),
        )
        stride, at = self._merged.shape[1], merged
        for norm, heads in ((layer.query_norm, layer.num_heads), (layer.key_norm, layer.num_kv_heads)):
            if norm is not None:
                layer_ops_cpu.add_norm(program, norm.weight, norm.eps, x=at, out=at, stride=stride, num_heads=heads)
            at += heads * dim * self._merged.element_size()
        rotated = layer.num_heads + layer.num_kv_heads
        dtype = self._merged.dtype
        layer_ops_cpu.add_rotation(program, merged, dim=dim, dtype=dtype, stride=stride, num_heads=rotated)
        paged_attention_cpu.add_attention(
            program,
            keys,
            values,
            merged=merged,
            num_heads=layer.num_heads,
            scale=layer.scale,
            window=layer.window,
            out=self._attended.data_ptr(),
        )
        self._add_layout(self._attended)
        _compiled(layer.output).add_to(program, tokens=self._tokens.data_ptr(), out=[self._x.data_ptr()], ending="adds")

    def _add_mlp(self, layer: Layer) -> None:
        self._add_tokens_of(layer.mlp_norm)
        tokens, gated = self._tokens.data_ptr(), self._gated.data_ptr()
        linear_compiled.add_gated(self.program, _compiled(layer.gate), _compiled(layer.up), tokens=tokens, out=gated)
        _compiled(layer.down).add_to(self.program, tokens=gated, out=[self._x.data_ptr()], ending="adds")

    def _add_tokens_of(self, norm: Norm) -> None:
        """The normed x, laid out for products."""
        x, normed = self._x.data_ptr(), self._normed.data_ptr()
        layer_ops_cpu.add_norm(self.program, norm.weight, norm.eps, x=x, out=normed, stride=self._x.shape[1])
        self._add_layout(self._normed)

    def _add_layout(self, x: Tensor) -> None:
        row_bytes, tokens = x.stride(0) * x.element_size(), self._tokens.data_ptr()
        linear_compiled.add_layout(self.program, x.shape[1], x.dtype, x=x.data_ptr(), x_stride=row_bytes, tokens=tokens)


def _compiled(linear: Linear) -> CompiledLinear:
    if not is_compiled(linear):
        raise TypeError(f"{type(linear).__name__}: a program takes compiled linear layers")
    return linear
