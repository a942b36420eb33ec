"""`SamplerSpec`: what one engine fixes for every request it samples; and the processors it may be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from keepmask.config import LogprobsMode, SamplingMaskContract
from keepmask.errors import ConfigError
from keepmask.params import SamplingParams, SamplingSemantics

__all__ = ["LogitsProcessor", "ProcessorContext", "SamplerSpec"]


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a custom logits processor may know of the completion it changes. The arrays are read-only."""

    params: SamplingParams
    prompt_token_ids: NDArray[np.int64]
    output_token_ids: NDArray[np.int64]


class LogitsProcessor(Protocol):
    """A custom change of the logits, given to the engine and applied to every request, after bad words.

    It may bring `replay(logits [K] float32, ids [K], context) -> [K]`, the same change at the support alone, which
    training needs when relative weights are not preserved.
    """

    @property
    def preserves_relative_weights(self) -> bool:
        """Whether logits it leaves finite keep their differences: True for one that only bans ids."""
        ...

    def apply(self, logits: Tensor, context: ProcessorContext) -> Tensor:
        """logits: [V] float32, its own copy. Returns the changed logits, [V] float32; -inf bans an id.

        An exception ends the request it was raised for, and no other.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """Vocabulary, defaults and limits of a sampler. Raises ConfigError where they cannot work together."""

    vocab_size: int
    """V, the width of the logits."""
    eos_token_ids: tuple[int, ...] = ()
    logprobs_mode: LogprobsMode = "raw_logprobs"
    semantics: SamplingSemantics = "vllm"
    """Profile of requests that name none."""
    contract: SamplingMaskContract = "exact"
    return_sampling_mask: bool = False
    """For requests that do not say."""
    max_logprobs: int = 20
    max_mask_bytes_per_request: int = 2**28
    banned_token_ids: tuple[int, ...] = ()
    """Ids never drawn, such as those the tokenizer does not map to a token."""
    thinking_start_token_ids: tuple[int, ...] = ()
    thinking_end_token_ids: tuple[int, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size}: must be at least 1")
        for name in ("eos_token_ids", "banned_token_ids", "thinking_start_token_ids", "thinking_end_token_ids"):
            for token_id in getattr(self, name):
                if not 0 <= token_id < self.vocab_size:
                    raise ConfigError(f"{name}: {token_id} is no token id; must be in [0, {self.vocab_size})")
        if bool(self.thinking_start_token_ids) != bool(self.thinking_end_token_ids):
            raise ConfigError("thinking_start_token_ids and thinking_end_token_ids: give both or neither")
        if len(set(self.banned_token_ids)) >= self.vocab_size:
            raise ConfigError(f"banned_token_ids: all {self.vocab_size} ids are banned; leave at least one")
        self._check_masks()
        self._check_processors()

    def _check_masks(self) -> None:
        if self.return_sampling_mask and self.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"return_sampling_mask=True with logprobs_mode={self.logprobs_mode!r}: a mask and its log-probs must "
                "share one normaliser; set logprobs_mode='processed_logprobs'"
            )
        if self.return_sampling_mask and self.contract == "vllm" and self.processors:
            raise ConfigError(
                "return_sampling_mask=True with custom logits processors: refused by sampling_mask_contract='vllm'; "
                "leave the processors out, or set sampling_mask_contract='exact'"
            )

    def _check_processors(self) -> None:
        for processor in self.processors:
            name = type(processor).__name__
            if not callable(getattr(processor, "apply", None)):
                raise ConfigError(f"processors: {name} has no method apply(logits, context); give it one")
            if not isinstance(getattr(processor, "preserves_relative_weights", None), bool):
                raise ConfigError(
                    f"processors: {name}.preserves_relative_weights must be True or False: whether the logits it "
                    "leaves finite keep their differences, so that a mask alone replays them"
                )
            if not callable(getattr(processor, "replay", lambda: None)):
                raise ConfigError(f"processors: {name}.replay must be a method, or absent")
