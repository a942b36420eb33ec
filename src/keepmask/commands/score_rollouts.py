"""Scores of rollouts under a plain `transformers` model, with and without replay on the masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from keepmask.outputs import Rollout
from keepmask.replay.logprobs import logprobs_from_hidden
from keepmask.replay.replay_batch import ReplayBatch

__all__ = ["score_rollouts"]

_MAX_TOKENS = 4096  # padded tokens in one forward


@torch.inference_mode()
def score_rollouts(
    model: Any, rollouts: Sequence[Rollout], *, on_progress: Callable[[int], None] = lambda _num_rollouts: None
) -> list[Rollout]:
    """The rollouts with `policy_logprobs` (on the recorded supports) and `policy_full_logprobs` (over the vocabulary).

    model: a causal language model of transformers whose logits are the product of its last hidden state and its head.
    on_progress: called with the number of rollouts just scored.
    """
    head = model.get_output_embeddings().weight
    scored: dict[int, Rollout] = {}
    for indices in _by_length(rollouts):
        batch = ReplayBatch.pack([rollouts[i] for i in indices], vocab_size=head.shape[0])
        padded = batch.padded()
        output = model.base_model(
            input_ids=padded.input_ids, attention_mask=padded.attention_mask, position_ids=padded.position_ids
        )
        scores = logprobs_from_hidden(
            output.last_hidden_state.flatten(0, 1)[padded.logit_positions],
            head,
            batch.targets,
            batch.support,
            transforms=batch.transforms,
            full_log_normalizer=True,
        )
        sizes = np.cumsum(batch.row_lengths)[:-1]
        replayed = np.split(scores.logprobs.numpy(), sizes)
        full = np.split(scores.full_logprobs.numpy(), sizes)
        for i, on_support, over_vocabulary in zip(indices, replayed, full, strict=True):
            scored[i] = dataclasses.replace(
                rollouts[i], policy_logprobs=on_support, policy_full_logprobs=over_vocabulary
            )
        on_progress(len(indices))
    return [scored[i] for i in range(len(rollouts))]


def _by_length(rollouts: Sequence[Rollout]) -> Iterable[list[int]]:
    """Indices of the rollouts in groups of like length, each of at most `_MAX_TOKENS` padded tokens."""
    lengths = [rollout.prompt_token_ids.size + rollout.token_ids.size for rollout in rollouts]
    group: list[int] = []
    for i in sorted(range(len(rollouts)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[i] > _MAX_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
