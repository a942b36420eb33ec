"""`ModelProbe`: proof, at load, that the engine computes what the model computes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepmask.errors import ConfigError
from keepmask.forward import attention
from keepmask.forward.attention import KVCache

__all__ = ["ModelProbe", "ProbeChunk", "ProbeSequence"]

_CHUNKS = (6, 1, 5, 1, 3)  # a prompt in chunks and single tokens, as it and a decode would come

_TOLERANCE = {torch.float32: 0.01}
"""Largest difference of logits that is still rounding, in standard deviations of a position's logits."""

_TOLERANCE_HALF = 0.5  # half-precision types; an architecture that is not understood is off by several


@dataclass(slots=True)
class ProbeSequence:
    """The probe's tokens, in the first blocks of the cache."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """Its tokens at positions [start, stop)."""
        return self.token_ids[start:stop]


@dataclass(frozen=True, slots=True)
class ProbeChunk:
    """A `forward_batch.Chunk` of a probe, whose tokens are what is computed and nothing more."""

    completion: ProbeSequence
    num_tokens: int
    draws: bool = False
    draft: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return self.num_tokens


class ModelProbe:
    """Takes a model's own logits of a few tokens, when it is built, and compares a runner's with them later.

    Both raise ConfigError naming the model where it cannot run, or gives other logits on the paged cache: its layers
    are not causal attention over past tokens, or its head is more than a linear map.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._what = f"model {name!r} ({model.config.model_type}): is not supported"
        settings = model.config.get_text_config()
        longest = getattr(settings, "max_position_embeddings", None) or sum(_CHUNKS)
        num_tokens = min(sum(_CHUNKS), longest)
        self._token_ids = [(7919 * at + 1) % settings.vocab_size for at in range(num_tokens)]
        with self._failures():
            self._own = _own_logits(model, self._token_ids)

    def check(self, logits: Callable[[ProbeChunk], Tensor], cache: KVCache, max_model_len: int) -> None:
        """Compute the tokens through the paged cache, and compare the logits.

        logits: [T, V] float32 of a chunk's T tokens, whose keys and values it puts into the cache.
        """
        token_ids = self._token_ids[:max_model_len]
        with self._failures():
            ours = _paged_logits(logits, token_ids, cache.block_size)
        own = self._own[: len(token_ids)]
        # The cache starts out as zeros.
        if unused := [at for at, layer in enumerate(cache.layers) if not layer.keys[0].any()]:
            raise ConfigError(f"{self._what}: layers {unused} do not go through transformers' attention interface")
        # The median over positions: in a mixture of experts, rounding may send a single token another way.
        off = float(((ours - own).abs().amax(-1) / own.std(-1)).median())
        if not off <= _TOLERANCE.get(cache.layers[0].keys.dtype, _TOLERANCE_HALF):
            raise ConfigError(f"{self._what}: on a paged cache its logits are off by {off:.2g} standard deviations")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self._what}: {error}") from error
        except Exception as error:  # the border to model code, which may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self._what}: it does not run on a paged cache: {reason}") from error


def _paged_logits(logits: Callable[[ProbeChunk], Tensor], token_ids: list[int], block_size: int) -> Tensor:
    """[T, V] float32 logits as the engine computes them, in several steps."""
    sequence = ProbeSequence(token_ids, blocks=list(range(-(-len(token_ids) // block_size))))
    parts = []
    for size in _CHUNKS:
        if num_tokens := min(size, len(token_ids) - sequence.num_computed):
            parts.append(logits(ProbeChunk(sequence, num_tokens)))
            sequence.num_computed += num_tokens
    return torch.cat(parts)


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[T, V] float32 logits of a plain forward."""
    ids = torch.tensor([token_ids], device=model.device)
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention.NAME)
    return logits
