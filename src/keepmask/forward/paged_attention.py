"""Keys and values in blocks: storing those of new tokens, and attention of single queries to their sequences.

The functions here define the operations; `paged_attention_cpu` computes the same on CPUs where numba is installed, and
`paged_attention_triton` the attention on GPUs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AttentionImpl", "compiled_for", "decode_attention", "store_tokens"]

AttentionImpl = Literal["auto", "triton", "reference"]


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    impl: AttentionImpl = "auto",
) -> Tensor:
    """softmax(softcap(q · kᵀ · scale)) · v for each token over the last `window` tokens of its context, in float32.

    query: [T, Hq, D]. keys: [num_blocks, Hkv, D, block_size]. values: [num_blocks, Hkv, block_size, D].
    block_tables: [S, blocks] int32. rows: [≥ T] int32, the table of each token. context_lens: [≥ T] int32, the tokens
    that each sees. Returns `out`, [T, Hq, D] in query's dtype, new unless given. Query head h reads head
    h // (Hq / Hkv) of keys and values. softcap(x) = softcap · tanh(x / softcap), or x where softcap is None.
    """
    D, Hkv = keys.shape[2], keys.shape[1]
    if query.shape[2] != D or query.shape[1] % Hkv or query.dtype != keys.dtype or values.shape[3] != D:
        raise ValueError(
            f"query {list(query.shape)} {query.dtype} does not fit a cache of {Hkv} heads of {D} {keys.dtype}"
        )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if (kernel := compiled_for(keys, impl) or _triton_for(keys, impl)) is not None:
        kernel.decode(
            query,
            keys,
            values,
            block_tables,
            rows,
            context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            out=out,
        )
        return out
    T = query.shape[0]
    return out.copy_(
        _reference(
            query,
            keys,
            values,
            block_tables[rows[:T].long()],
            context_lens[:T],
            scale=scale,
            window=window,
            softcap=softcap,
        )
    )


def store_tokens(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    *,
    impl: AttentionImpl = "auto",
) -> None:
    """keys[blocks[t], :, :, offsets[t]] = new_keys[t] and values[blocks[t], :, offsets[t]] = new_values[t], in place.

    keys: [num_blocks, Hkv, D, block_size]. values: [num_blocks, Hkv, block_size, D]. new_keys, new_values: [T, Hkv, D].
    blocks, offsets: [T] int64, distinct slots.
    """
    slot = (keys.shape[1], keys.shape[2])
    for name, new in (("keys", new_keys), ("values", new_values)):
        if new.shape[1:] != slot or new.dtype != keys.dtype:
            raise ValueError(f"new {name} {list(new.shape)} {new.dtype} do not fit a cache of {slot} {keys.dtype}")
    if (kernel := compiled_for(keys, impl)) is not None:
        kernel.store(keys, values, new_keys, new_values, blocks, offsets)
        return
    keys[blocks, :, :, offsets] = new_keys
    values[blocks, :, offsets] = new_values


def compiled_for(keys: Tensor, impl: AttentionImpl) -> ModuleType | None:
    """The module of compiled kernels, where they can serve this cache and `impl` allows them."""
    kernel = _module("numba", "paged_attention_cpu") if impl == "auto" else None
    return kernel if kernel is not None and kernel.supports(keys) else None


def _triton_for(keys: Tensor, impl: AttentionImpl) -> ModuleType | None:
    asked = impl == "triton" or (impl == "auto" and keys.is_cuda)
    kernel = _module("triton", "paged_attention_triton") if asked else None
    return kernel if kernel is not None and kernel.supports(keys) else None


@cache
def _module(needed: str, name: str) -> ModuleType | None:
    return import_module(f"keepmask.forward.{name}") if find_spec(needed) else None


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Pads every row to the longest context."""
    S, Hq, D = query.shape
    block_size = values.shape[2]
    used = -(-int(context_lens.max()) // block_size)
    blocks = block_tables[:, :used].long()
    k = keys[blocks].permute(0, 2, 1, 4, 3).flatten(2, 3).float()  # [S, Hkv, L, D]
    v = values[blocks].permute(0, 2, 1, 3, 4).flatten(2, 3).float()
    q = query.reshape(S, k.shape[1], -1, D).float()  # [S, Hkv, G, D]
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.arange(k.shape[2], device=query.device)
    keep = seen < context_lens[:, None]  # [S, L]
    if window is not None:
        keep &= seen >= context_lens[:, None] - window
    weights = scores.masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)
    v = v.masked_fill(~keep[:, None, :, None], 0)  # a freed block may hold another request's NaN
    return (weights @ v).to(query.dtype).reshape(S, Hq, D)
