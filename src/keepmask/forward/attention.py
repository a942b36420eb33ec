"""Attention over the paged KV cache, plugged under unmodified Hugging Face models.

The models call the function registered as `keepmask`; it stores the step's keys and values in the cache, and lets each
query see its own sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from keepmask.errors import ConfigError
from keepmask.forward.cache_memory import zeros
from keepmask.forward.forward_batch import ChunkSpan, ForwardBatch
from keepmask.forward.paged_attention import AttentionImpl, compiled_for, decode_attention, store_tokens

__all__ = ["NAME", "AttentionContext", "KVCache", "LayerCache", "attend", "register"]

NAME = "keepmask"
"""The name to give transformers as attn_implementation."""

_REFUSED = {"s_aux": "attention sinks", "position_bias": "position bias", "head_mask": "head masks"}


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. A block's keys are stored transposed, so that its tokens are adjacent."""

    keys: Tensor
    """[num_blocks, Hkv, D, block_size]"""
    values: Tensor
    """[num_blocks, Hkv, block_size, D]"""

    def gather(self, blocks: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, L, D] of the first L = context_len tokens in these blocks."""
        keys = self.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)
        values = self.values[blocks].transpose(0, 1).flatten(1, 2)
        return keys[:, :context_len], values[:, :context_len]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV cache of all layers."""

    layers: list[LayerCache]
    block_size: int

    @classmethod
    def allocate(
        cls,
        shapes: list[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Zeroed blocks for layers of these (Hkv, D); on a CPU a block takes memory once it is written."""
        sizes = [num_blocks * heads * dim * block_size for heads, dim in shapes for _ in range(2)]
        memory: Tensor = zeros(sum(sizes), dtype=dtype, device=device)
        parts = iter(torch.split(memory, sizes))
        layers = [
            LayerCache(
                next(parts).view(num_blocks, heads, dim, block_size),
                next(parts).view(num_blocks, heads, block_size, dim),
            )
            for heads, dim in shapes
        ]
        return cls(layers, block_size)

    @property
    def pages_chunks(self) -> bool:
        """`ForwardBatch.build` for this cache: in compiled kernels, tokens of chunks get what single ones get."""
        return compiled_for(self.layers[0].keys, "auto") is not None

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in every layer."""
        for layer in self.layers:
            layer.keys[targets] = layer.keys[sources]
            layer.values[targets] = layer.values[sources]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What attention needs of one forward: the batch, the cache, and which kernels to use."""

    batch: ForwardBatch[Any]
    cache: KVCache
    impl: AttentionImpl = "auto"


def register() -> None:
    """Make `NAME` known to transformers. The causal structure is in the batch, so no mask is built."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_args: object, **_kwargs: object) -> None:
    return None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    keepmask: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] to ([1, T, Hq, D], None)."""
    if keepmask is None:
        raise ConfigError(
            f"{type(module).__name__}: does not hand its caller's arguments on to the attention interface"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{type(module).__name__}: {what} are not supported")
    out = attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keepmask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


def attend(
    layer_idx: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: AttentionContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Store the keys and values of the batch's T tokens, and let each query see its own sequence up to itself.

    query: [T, Hq, D]. key, value: [T, Hkv, D]. window: how many tokens a query sees, itself included; None for all.
    Returns [T, Hq, D].
    """
    batch, cache = context.batch, context.cache.layers[layer_idx]
    store_tokens(cache.keys, cache.values, key, value, batch.slot_blocks, batch.slot_offsets, impl=context.impl)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if paged := batch.num_paged:
        decode_attention(
            query[:paged] if batch.spans else query,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.token_chunks,
            batch.context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            out=out[:paged] if batch.spans else out,
            impl=context.impl,
        )
    for span in batch.spans:
        blocks = batch.block_tables[span.chunk, : -(-span.context_len // context.cache.block_size)]
        keys, values = cache.gather(blocks, span.context_len)
        rows = slice(span.start, span.stop)
        out[rows] = _attend_span(query[rows], keys, values, span, scale=scale, window=window, softcap=softcap)
    return out


def _attend_span(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    span: ChunkSpan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of a chunk's queries [Tq, Hq, D] over its context [Hkv, L, D]; returns [Tq, Hq, D]."""
    groups = query.shape[1] // keys.shape[0]
    keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))  # [Hq, L, D]
    q = query.transpose(0, 1)
    last = torch.arange(span.context_len - query.shape[0], span.context_len, device=q.device)  # position of each query
    seen = torch.arange(span.context_len, device=q.device)
    keep = seen <= last[:, None]
    if window is not None:
        keep &= seen > last[:, None] - window
    if softcap is None:
        whole = query.shape[0] == span.context_len and (window is None or window >= span.context_len)
        mask = None if whole else keep
        return F.scaled_dot_product_attention(q[None], keys[None], values[None], mask, is_causal=whole, scale=scale)[
            0
        ].transpose(0, 1)
    scores = torch.tanh(q.float() @ keys.float().transpose(1, 2) * scale / softcap) * softcap
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return (weights @ values.float()).to(query.dtype).transpose(0, 1)
