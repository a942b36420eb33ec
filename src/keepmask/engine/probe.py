"""`check_model`: proof, at load, that the engine computes what the model computes by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from keepmask.engine import attention
from keepmask.engine.request import Completion, Request
from keepmask.engine.runner import ModelRunner
from keepmask.engine.scheduler import ScheduledChunk
from keepmask.errors import ConfigError
from keepmask.params import SamplingParams
from keepmask.sampling import SamplerSpec, SamplingRow

__all__ = ["check_model"]

_CHUNKS = (6, 1, 5, 1, 3)  # a prompt in chunks and single tokens, as it and a decode would come

_TOLERANCE = {torch.float32: 0.01}
"""Largest difference of logits that is still rounding, in standard deviations of a position's logits."""

_TOLERANCE_HALF = 0.5  # half-precision types; an architecture that is not understood is off by several


def check_model(runner: ModelRunner, name: str) -> None:
    """Compute a few tokens through the paged cache and through the model's own attention, and compare the logits.

    Raises ConfigError naming the model where it cannot run on the cache, or gives other logits there: its layers are
    not causal attention over past tokens, or its head is more than a linear map.
    """
    what = f"model {name!r} ({runner.model.config.model_type}): is not supported"
    token_ids = [(7919 * at + 1) % runner.vocab_size for at in range(min(sum(_CHUNKS), runner.max_model_len))]
    try:
        ours = _paged_logits(runner, token_ids)
        own = _own_logits(runner, token_ids)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    except Exception as error:  # the border to model code, which may raise anything
        raise ConfigError(f"{what}: it does not run on a paged cache: {type(error).__name__}: {error}") from error
    # The cache starts out as zeros.
    if unused := [at for at, layer in enumerate(runner.cache.layers) if not layer.keys[0].any()]:
        raise ConfigError(f"{what}: layers {unused} do not go through transformers' attention interface")
    # The median over positions: in a mixture of experts, rounding may send a single token another way.
    off = float(((ours - own).abs().amax(-1) / own.std(-1)).median())
    if not off <= _TOLERANCE.get(runner.dtype, _TOLERANCE_HALF):
        raise ConfigError(f"{what}: on a paged cache its logits are off by {off:.2g} standard deviations")


@torch.inference_mode()
def _paged_logits(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """[T, V] float32 logits as the engine computes them, in several steps."""
    params = SamplingParams()
    row = SamplingRow(
        params, SamplerSpec(vocab_size=runner.vocab_size), prompt_token_ids=token_ids, seed=0, completion_index=0
    )
    request = Request(request_id="", prompt_token_ids=token_ids, params=params, seed=0)
    block_size = runner.cache.block_size
    completion = Completion(request=request, index=0, row=row, blocks=list(range(-(-len(token_ids) // block_size))))
    logits = []
    for size in _CHUNKS:
        if num_tokens := min(size, completion.num_pending):
            chunks = [ScheduledChunk(completion, num_tokens)]
            batch = runner.lay_out(chunks)
            head = runner.head(runner.forward(batch, []))
            logits.append(head.float32(torch.arange(num_tokens, device=runner.device)))
            completion.num_computed += num_tokens
    return torch.cat(logits)


@torch.inference_mode()
def _own_logits(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """[T, V] float32 logits of a plain forward."""
    ids = torch.tensor([token_ids], device=runner.device)
    runner.model.set_attn_implementation("eager")
    try:
        logits: Tensor = runner.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        runner.model.set_attn_implementation(attention.NAME)
    return logits
