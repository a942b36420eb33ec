"""`score`, `score_padded`: one call from a model's hidden states to the scores of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden
from keepmask.replay.policy_head import Head
from keepmask.replay.replay_batch import ReplayBatch
from keepmask.replay.scores import SupportScores
from keepmask.replay.scoring import Entropy
from keepmask.replay.turns import NEUTRAL_PARAMS
from keepmask.replay.views import scattered
from keepmask.wire.peer_rollouts import rollouts_from_flat

__all__ = ["PaddedScores", "score", "score_padded"]


def score(
    batch: ReplayBatch,
    hidden: Tensor,
    head: Head,
    *,
    entropy: Entropy = "none",
    ref_member_logprobs: Tensor | None = None,
    full_log_normalizer: bool = False,
    options: ScoreOptions = ScoreOptions(),  # noqa: B008 - frozen
) -> SupportScores:
    """The scores of a batch's rows: `logprobs_from_hidden` with the batch's own targets, supports, transforms and mask.

    hidden: the last hidden states of the tokens, as the model gives them: [1, T, E] or [T, E] for `batch.packed()`,
        [S, L, E] for `batch.padded()`; or [R, E], those at `logit_positions` alone.
    head: of the same model, `Head.of(model)`.

    Rows outside `batch.loss_mask` are left out: 0 everywhere. The rest is as in `logprobs_from_hidden`. Raises
    MaskError for hidden states of another shape, and for a head of another vocabulary.
    """
    if not isinstance(head, Head):
        raise TypeError(f"head: must be a replay.Head, got {type(head).__name__}; replay.Head.of(model) reads it")
    if head.vocab_size != batch.vocab_size:
        raise MaskError(
            f"the head has {head.vocab_size} rows, the batch was packed with vocab_size={batch.vocab_size}; pack it "
            "with vocab_size=head.vocab_size"
        )
    return logprobs_from_hidden(
        _states(batch, hidden),
        head,
        batch.targets,
        batch.support,
        transforms=batch.transforms,
        loss_mask=batch.loss_mask,
        entropy=entropy,
        ref_member_logprobs=ref_member_logprobs,
        full_log_normalizer=full_log_normalizer,
        options=options,
    )


def _states(batch: ReplayBatch, hidden: Tensor) -> Tensor:
    """[R, E]: the hidden states that give the rows' logits."""
    T, S, L = batch.num_tokens, batch.num_sequences, max(batch.lengths, default=0)
    shape = tuple(hidden.shape[:-1])
    if shape in ((T,), (1, T)):
        return hidden.reshape(T, -1)[batch.logit_positions]
    if shape == (S, L):
        return hidden.flatten(0, 1)[batch.padded().logit_positions]
    if shape == (batch.num_rows,):
        return hidden
    raise MaskError(
        f"hidden: {list(hidden.shape)} are the states neither of packed tokens, [1, {T}, E], nor of padded ones, "
        f"[{S}, {L}, E], nor of the {batch.num_rows} rows; give the model batch.packed() or batch.padded()"
    )


class PaddedScores(NamedTuple):
    """Scores in the shape of the tokens, [B, S]; 0 at tokens that were not drawn. In nats, differentiable."""

    logprobs: Tensor
    entropy: Tensor | None
    """On the support; None unless asked for."""
    rows: SupportScores
    """Everything else, one entry a drawn token: sequence by sequence, in order."""


def score_padded(
    hidden: Tensor,
    head: Head,
    input_ids: Tensor,
    masks: Sequence[SamplingMask],
    response_mask: Tensor,
    *,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    attention_mask: Tensor | None = None,
    entropy: Entropy = "none",
    full_log_normalizer: bool = False,
    options: ScoreOptions = ScoreOptions(),  # noqa: B008 - frozen
) -> PaddedScores:
    """Scores of padded sequences, for trainers that keep [B, S] tensors. Padding may be on either side.

    hidden: [B, S, E], the state at a token, which gives the logits of the next one.
    input_ids: [B, S]: prompts, responses and padding. masks: B, one row for each drawn token of the sequence.
    response_mask: [B, S], 1 at the tokens that were drawn, which may be in several stretches (turns).
    sampling_params: of each sequence, or of all, as the engine resolved them: temperature, logit_bias and penalties
        change the logits. `{}` says that nothing did.
    attention_mask: [B, S], 1 at tokens and 0 at padding; needed where penalties count the tokens of the prompt.

    The rest is as in `logprobs_from_hidden`. Raises MaskError for other numbers of rows than drawn tokens, drawn tokens
    outside their rows, and whatever `ReplayBatch.pack` refuses.
    """
    if not hidden.shape[:-1] == input_ids.shape == response_mask.shape or input_ids.ndim != 2:
        raise MaskError(
            f"hidden {list(hidden.shape)}, input_ids {list(input_ids.shape)} and response_mask "
            f"{list(response_mask.shape)}: must be [B, S, E], [B, S] and [B, S]"
        )
    drawn = response_mask.bool()
    batch = _packed(head.vocab_size, input_ids, masks, drawn, sampling_params, attention_mask).to(hidden.device)
    places = drawn.flatten().nonzero()[:, 0]
    rows = score(
        batch, hidden.flatten(0, 1)[places - 1], head,
        entropy=entropy, full_log_normalizer=full_log_normalizer, options=options,
    )  # fmt: skip
    logprobs, entropies = (
        None if values is None else scattered(values, places, drawn.numel(), 0.0).view(drawn.shape)
        for values in (rows.logprobs, rows.entropy)
    )
    assert logprobs is not None
    return PaddedScores(logprobs, entropies, rows)


def _packed(
    vocab_size: int,
    input_ids: Tensor,
    masks: Sequence[SamplingMask],
    drawn: Tensor,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    attention_mask: Tensor | None,
) -> ReplayBatch:
    """The sequences as a batch, whose rows are the drawn tokens in their order. The arguments as in `score_padded`."""
    read = torch.ones_like(drawn) if attention_mask is None else attention_mask.bool() | drawn
    if drawn[:, 0].any():
        raise MaskError("response_mask: a first token is marked as drawn, but no state comes before it")
    given = [sampling_params] * len(drawn) if isinstance(sampling_params, Mapping) else list(sampling_params)
    if not len(masks) == len(given) == len(drawn):
        raise MaskError(f"{len(masks)} masks and {len(given)} sampling_params for {len(drawn)} sequences")
    counting = NEUTRAL_PARAMS.keys() - {"temperature"}
    if attention_mask is None and any(
        params.get(name) not in (None, NEUTRAL_PARAMS[name]) for params in given for name in counting
    ):
        raise MaskError(
            "attention_mask: needed where penalties count the tokens before, so that padding is not counted"
        )
    sequences = [
        rollouts_from_flat(tokens[kept].numpy(), flags[kept].numpy(), mask, sampling_params=params)
        for tokens, kept, flags, mask, params in zip(
            input_ids.cpu(), read.cpu(), drawn.cpu(), masks, given, strict=True
        )
    ]
    return ReplayBatch.pack([turns for turns in sequences if turns], vocab_size=vocab_size)
