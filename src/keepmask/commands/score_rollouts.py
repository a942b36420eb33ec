"""Scores of rollouts under a plain `transformers` model, with and without replay on the masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from keepmask.outputs import Rollout
from keepmask.replay.policy_head import Head
from keepmask.replay.replay_batch import ReplayBatch
from keepmask.replay.score_batch import score

__all__ = ["score_rollouts"]

_MAX_TOKENS = 4096  # padded tokens in one forward


@torch.inference_mode()
def score_rollouts(
    model: Any, rollouts: Sequence[Rollout], *, on_progress: Callable[[int], None] = lambda _num_rollouts: None
) -> list[Rollout]:
    """The rollouts with `policy_logprobs` (on the recorded supports) and `policy_full_logprobs` (over the vocabulary).

    model: a causal language model of transformers; what is on its head is applied (`replay.Head.of`).
    on_progress: called with the number of rollouts just scored.
    """
    head = Head.of(model)
    scored: dict[int, Rollout] = {}
    for indices in _by_length(rollouts):
        batch = ReplayBatch.pack([rollouts[i] for i in indices], vocab_size=head.vocab_size)
        hidden = model.base_model(**batch.padded().inputs()).last_hidden_state
        scores = score(batch, hidden, head, full_log_normalizer=True)
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
