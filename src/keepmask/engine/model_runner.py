"""`ModelRunner`: the model, its KV cache, and one forward."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepmask.config import EngineConfig
from keepmask.engine.loading import copy_model, device_of, dtype_of, layer_settings, load_model
from keepmask.engine.probe import ModelProbe, ProbeChunk
from keepmask.engine.scheduler import BlockCopy
from keepmask.errors import ConfigError
from keepmask.forward.attention import AttentionContext, KVCache
from keepmask.forward.decoder import Decoder
from keepmask.forward.forward_batch import ChunkT, ForwardBatch
from keepmask.forward.linear import compile_linears, linear_layer
from keepmask.forward.linear_torch import Linear
from keepmask.head.form import HeadForm
from keepmask.head.pair_products import Impl, numba_can_read, pair_logits
from keepmask.head.pairs import Pairs

__all__ = ["LMHead", "ModelRunner"]

_KV_SHARE_OF_FREE = 0.4
"""Of the memory that is free once the model is loaded, the share that the KV cache takes by default."""

_MAX_PAIRS = 16_384
"""Rows of the head that are gathered at a time."""


class LMHead:
    """Logits of B hidden states: cheap ones over the whole vocabulary, exact float32 ones where asked.

    hidden: [B, E]. Satisfies `keepmask.sampling.Head`.
    """

    def __init__(self, hidden: Tensor, linear: Linear, form: HeadForm, *, logits: Tensor | None = None) -> None:
        self._hidden, self._linear, self._form = hidden, linear, form
        self._weight, self._bias = linear.weight, linear.bias
        if logits is None:
            logits = linear(hidden)
            if not form.is_identity:
                # In float32, so that half-precision logits are rounded twice at most: selection allows for that.
                logits = form.apply(logits.float()).to(logits.dtype)
        self.logits = logits

    def take(self, rows: Sequence[int]) -> LMHead:
        """The same of these hidden states alone."""
        if list(rows) == list(range(len(self._hidden))):
            return self
        at = torch.tensor(rows, device=self._hidden.device)
        return LMHead(self._hidden[at], self._linear, self._form, logits=self.logits[at])

    def rescore(self, rows: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """[P] float32 logits of ids [P], accumulated and stored in float32; see `keepmask.sampling.Head`."""
        if self.logits.dtype == torch.float32:
            return self.logits[rows.repeat_interleave(offsets.diff()), ids]
        states = self._hidden.contiguous()
        compiled = numba_can_read(states, self._weight)
        pairs = Pairs(rows, ids, offsets)
        impl: Impl = "numba" if compiled else "gather"
        exact = pair_logits(states, self._weight, pairs, max_pairs=_MAX_PAIRS, impl=impl)
        return self._form.apply(exact if self._bias is None else exact + self._bias[ids].float())

    def float32(self, rows: Tensor) -> Tensor:
        """[M, V] float32 logits at rows [M] int64."""
        if self.logits.dtype == torch.float32:
            return self.logits[rows]
        return self._form.apply(self._linear.float32(self._hidden[rows]))


class ModelRunner:
    """Loads the model, or copies a trainer's module, and runs it on flat batches of tokens.

    Raises ConfigError naming what cannot be served: the model, its length, or the cache's size.
    """

    def __init__(self, config: EngineConfig, module: nn.Module | None = None) -> None:
        self.device = device_of(config)
        self.dtype = dtype_of(config, self.device)
        if module is None:
            self.model = load_model(config, self.device, self.dtype)
        else:
            self.model = copy_model(config, module, self.device, self.dtype)
        probe = ModelProbe(self.model, config.model)  # before its layers compute in compiled code
        settings = self.model.config.get_text_config()
        self._decoder = Decoder.of(self.model, max_num_tokens=config.max_num_batched_tokens)
        if self._decoder is None:
            compile_linears(self.model.base_model)
        head = self.model.get_output_embeddings()
        self.linear_head = linear_layer([head.weight], [getattr(head, "bias", None)])
        self.vocab_size = int(head.weight.shape[0])
        self._form = HeadForm.of(settings)
        self.max_model_len = _max_model_len(config, settings)
        shapes = _kv_shapes(self.model)
        block_bytes = sum(2 * heads * dim for heads, dim in shapes) * config.block_size * self.dtype.itemsize
        num_blocks = _num_blocks(config, self.device, block_bytes, self.max_model_len)
        if num_blocks * config.block_size < self.max_model_len:
            if config.max_model_len is not None or not num_blocks:
                needed = block_bytes * (1 if not num_blocks else -(-self.max_model_len // config.block_size))
                have = config.kv_cache_memory_bytes or "what is free after loading the model"
                raise ConfigError(
                    f"kv_cache_memory_bytes={have}: max_model_len={self.max_model_len} needs {needed} bytes of KV "
                    "cache; raise kv_cache_memory_bytes or lower max_model_len"
                )
            self.max_model_len = num_blocks * config.block_size
        self.cache = KVCache.allocate(
            shapes, num_blocks=num_blocks, block_size=config.block_size, dtype=self.dtype, device=self.device
        )
        self.num_blocks = num_blocks
        self.kv_cache_bytes = num_blocks * block_bytes
        probe.check(self._logits_of, self.cache, self.max_model_len)
        _give_back_memory()

    def lay_out(self, chunks: Sequence[ChunkT]) -> ForwardBatch[ChunkT]:
        """The batch of one forward over these chunks."""
        cache = self.cache
        return ForwardBatch.build(
            chunks, block_size=cache.block_size, device=self.device, pages_chunks=cache.pages_chunks
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch[Any], copies: list[BlockCopy]) -> Tensor:
        """[T, E] hidden states of the batch's tokens; their keys and values are in the cache afterwards."""
        if copies:
            pairs = torch.tensor([[copy.source, copy.target] for copy in copies], device=self.device)
            self.cache.copy(pairs[:, 0], pairs[:, 1])
        context = AttentionContext(batch, self.cache)
        if self._decoder is not None:
            return self._decoder(batch.input_ids, batch.positions, context)
        output = self.model.base_model(
            input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False, keepmask=context
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> LMHead:
        """The LM head over hidden states [B, E]."""
        return LMHead(hidden, self.linear_head, self._form)

    @torch.inference_mode()
    def _logits_of(self, chunk: ProbeChunk) -> Tensor:
        """[T, V] float32 logits of a chunk that is alone in its batch."""
        hidden = self.forward(self.lay_out([chunk]), [])
        return self.head(hidden).float32(torch.arange(chunk.num_tokens, device=self.device))

    def seconds(self) -> dict[str, float]:
        """`Decoder.seconds` of the latest forward."""
        return self._decoder.seconds() if self._decoder is not None else {}

    @property
    def linears(self) -> list[Linear]:
        """The matrix products that the runner does itself: those of the layers in order, then the head."""
        return [*(self._decoder.linears if self._decoder is not None else ()), self.linear_head]


def _give_back_memory() -> None:
    """Let the system have what was freed in between: the C library would keep it for later."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _max_model_len(config: EngineConfig, settings: Any) -> int:
    own = getattr(settings, "max_position_embeddings", None)
    if config.max_model_len is None:
        if own is None:
            raise ConfigError("max_model_len: the model's config names no context length; give one")
        return int(own)
    if own is not None and config.max_model_len > own:
        raise ConfigError(f"max_model_len={config.max_model_len}: the model's context is {own} tokens")
    return config.max_model_len


def _kv_shapes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """(Hkv, D) of each attention layer."""
    text = model.config.get_text_config()
    shapes = []
    for layer_idx in range(text.num_hidden_layers):
        layer = layer_settings(text, layer_idx)
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        shapes.append((int(kv_heads), int(getattr(layer, "head_dim", None) or layer.hidden_size // heads)))
    return shapes


def _num_blocks(config: EngineConfig, device: torch.device, block_bytes: int, max_model_len: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block_bytes
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    return min(useful, int(_free_bytes(device) * _KV_SHARE_OF_FREE) // block_bytes)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _cgroup_free_bytes())
    return 4 * 2**30  # no such file on this platform: a size that any machine running a model has


def _cgroup_free_bytes() -> int:
    root = Path("/sys/fs/cgroup")
    limit, used = _lines(root / "memory.max"), _lines(root / "memory.current")
    return int(limit[0]) - int(used[0]) if limit and used and limit[0].isdecimal() else 2**63


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
