"""`add_lm_head`: a `transformers` model whose forward returns log-probabilities on the recorded supports."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from keepmask.errors import MaskError
from keepmask.replay.logprobs import ScoreOptions
from keepmask.replay.mask_store import FoundRows, MaskStore
from keepmask.replay.policy_head import Head
from keepmask.replay.replay_batch import ReplayBatch
from keepmask.replay.score_batch import score
from keepmask.replay.scores import SupportScores

__all__ = ["SupportLMOutput", "add_lm_head"]

IGNORED_LABEL = -100
"""The label of positions that are not scored, as in `transformers`."""


@dataclass
class SupportLMOutput(ModelOutput):  # type: ignore[misc]
    """What a model with this head returns of a call with `fused_lm_head=True`."""

    loss: Tensor | None = None
    """Scalar: the mean of -log_probs over the labels, and a mixture of experts' load-balancing loss where it is on."""
    log_probs: Tensor | None = None
    """[B, L - 1], or [B, L] with shift_labels; float32, nats."""
    entropy: Tensor | None = None
    """The same shape: the entropy on the support."""
    kept_mass: Tensor | None = None
    """The same shape: the model's probability of the support within the whole vocabulary, NaN where it was not asked
    for. No gradient."""
    label_mask: Tensor | None = None
    """The same shape: where there was a label."""
    aux_loss: Tensor | None = None
    """Scalar: the load-balancing loss alone."""


def add_lm_head(
    model: nn.Module, store: MaskStore, *, entropy: Literal["value", "grad"] = "value", mass_samples: int = 0
) -> None:
    """Let `model(..., labels=labels, fused_lm_head=True)` score labels on the supports they were drawn from.

    Such a call returns `log_probs` and `entropy`, [B, L - 1] float32 in nats: at position t those of token t + 1 under
    the model renormalised on the support that the store has for it, temperature, penalties and bias replayed; and
    `loss`, the mean negative log-probability (the sum over `num_items_in_batch` where that is given). With
    `shift_labels` instead of `labels`, position t of [B, L] scores shift_labels[t]. Positions whose label is -100, and
    tokens that nobody drew (prompts, tool output, what was appended), hold 0 and pass no gradient. Other calls, and so
    generation, go to the model's own forward. No logits over the vocabulary are made, but for rows without a support.

    A sequence is the tokens of a row of `input_ids` that `attention_mask` [B, L] lets in; packed rows are parted where
    `position_ids` begin again at 0. The store finds each by its tokens, which takes one copy of `input_ids` to the CPU.

    model: a causal LM of transformers, before or after PEFT has wrapped it; wrap it with DDP or FSDP afterwards.
    entropy: "grad" to differentiate the entropies as well. mass_samples: of how many rows of a call with gradients to
    compute `kept_mass` too, each of which costs logits over the whole vocabulary.

    Raises ValueError for a model whose logits `Head.of` cannot make; the call raises MaskError for a sequence without a
    rollout and for labels that are not the tokens drawn.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    Head.of(base)
    own_forward = base.forward

    # The signature stays the model's own, which `generate` reads.
    @functools.wraps(type(base).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return own_forward(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        if labels is None and shift_labels is None:
            raise MaskError("fused_lm_head=True: needs labels, or shift_labels, of the positions to score")
        if args:
            raise MaskError("fused_lm_head=True: takes its inputs by name, input_ids=... and attention_mask=...")
        return _score(self, store, (entropy, mass_samples), kwargs, labels, shift_labels, num_items_in_batch)

    base.forward = types.MethodType(forward, base)


def _score(
    model: Any,
    store: MaskStore,
    options: tuple[Literal["value", "grad"], int],
    inputs: dict[str, Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Tensor | int | None,
) -> SupportLMOutput:
    """The forward with `fused_lm_head=True`."""
    found = _find(store, inputs, labels, shift_labels)
    settings = model.config.get_text_config()
    if getattr(settings, "output_router_logits", False):
        inputs.setdefault("output_router_logits", True)
    output = model.base_model(**inputs | {"use_cache": False})
    hidden: Tensor = output.last_hidden_state
    width = hidden.shape[1] - (shift_labels is None)

    def compute(states: Tensor) -> tuple[Tensor, ...]:
        head = Head.of(model)
        states = states.to(head.weight.device)
        flat = states.flatten(0, 1)
        scores = [states.new_full((len(states), width), fill, dtype=torch.float32) for fill in (0.0, 0.0, torch.nan)]
        if not found:  # differentiable all the same, as data-parallel trainers need it
            scores[0] = scores[0] + flat[:0].sum() + head.weight[:0].sum()
        for rows in found:
            values = _score_rows(rows, flat, head, *options)
            at = rows.outputs.to(states.device)
            where = (at // width, at % width)
            scores = [each.index_put(where, value) for each, value in zip(scores, values, strict=True)]
        return tuple(scores)

    Head.of(model)  # what PEFT has changed since the last call is checked before the head's own forward is replaced
    log_probs, entropies, kept_mass = _through(model.get_output_embeddings(), hidden, compute)
    wanted = labels[:, 1:] if shift_labels is None and labels is not None else shift_labels
    assert wanted is not None
    asked = wanted.ne(IGNORED_LABEL)
    loss = -log_probs.sum() / (asked.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    balance = _load_balancing(output, settings, inputs)
    if balance is not None:
        loss = loss + getattr(settings, "router_aux_loss_coef", 0.0) * balance
    return SupportLMOutput(
        loss=loss, log_probs=log_probs, entropy=entropies, kept_mass=kept_mass, label_mask=asked, aux_loss=balance
    )


class _Rows(NamedTuple):
    """Rows to score, where their hidden states are and where their scores go, counted through [B, L] flattened."""

    found: FoundRows
    states: Tensor
    """[R] int64, into B * L."""
    outputs: Tensor
    """[R] int64, into B * width."""


def _score_rows(
    rows: _Rows, hidden: Tensor, head: Head, entropy: Literal["value", "grad"], mass_samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[R] float32 each: log-probabilities, entropies, and the kept mass of some. hidden: [B * L, E]."""
    batch = rows.found.batch

    def scored(batch: ReplayBatch, places: Tensor, **asked: Any) -> SupportScores:
        options = ScoreOptions(members=False)
        return score(batch.to(hidden.device), hidden[places.to(hidden.device)], head, options=options, **asked)

    scores = scored(batch, rows.states, entropy=entropy)
    assert scores.entropy is not None
    mass = torch.full_like(scores.logprobs, torch.nan)
    if mass_samples and batch.num_rows and torch.is_grad_enabled():
        chosen = torch.zeros(batch.num_rows, dtype=torch.bool)
        chosen[torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(0))[:mass_samples]] = True
        with torch.no_grad():
            sample = scored(batch.select_rows(chosen), rows.states[chosen], full_log_normalizer=True)
            mass[chosen.to(mass.device)] = sample.kept_mass
    return scores.logprobs.float(), scores.entropy.float(), mass.float()


def _find(store: MaskStore, inputs: dict[str, Any], labels: Tensor | None, shift_labels: Tensor | None) -> list[_Rows]:
    """The rows that have a label, by where they are in the batch. Raises MaskError where labels are not what was drawn.

    One place of `own`, the flat numbering of `sequences`, is one token let in; `columns` are their places in [B, L].
    """
    input_ids, mask = _integers(inputs, "input_ids"), _integers(inputs, "attention_mask", optional=True)
    assert input_ids is not None
    positions = _integers(inputs, "position_ids", optional=True)
    given = labels if shift_labels is None else shift_labels
    assert given is not None
    wanted = given.cpu().numpy()
    if wanted.shape != input_ids.shape:
        raise MaskError(f"labels: must be {list(input_ids.shape)} as input_ids, got {list(wanted.shape)}")
    width = input_ids.shape[1] - (shift_labels is None)
    sequences, columns, labelled = [], [], []
    for row, where in _segments(input_ids, mask, positions):
        # The label of the token that follows, and the place of its score.
        own = wanted[row, where[1:]] if shift_labels is None else wanted[row, where[:-1]]
        if (own == IGNORED_LABEL).all():
            continue
        sequences.append(input_ids[row, where])
        columns.append(row * input_ids.shape[1] + where)
        places = row * width + (where[1:] - 1 if shift_labels is None else where[:-1])
        labelled.append(np.stack([np.append(own, IGNORED_LABEL), np.append(places, -1)]))
    if not sequences:
        return []
    flat_columns = torch.from_numpy(np.concatenate(columns))
    flat_labels, flat_places = torch.from_numpy(np.concatenate(labelled, axis=1))
    rows = []
    for found in store.find(sequences):
        asked = flat_labels[found.places] != IGNORED_LABEL
        chosen = FoundRows(found.batch.select_rows(asked), found.places[asked])
        other = chosen.batch.targets != flat_labels[chosen.places]
        if bool(other.any()):
            at = int(other.nonzero()[0, 0])
            raise MaskError(
                f"labels: {int(other.sum())} are not the tokens that were drawn, the first of them "
                f"{int(flat_labels[chosen.places][at])} instead of {int(chosen.batch.targets[at])}; labels must be the "
                "input ids, or -100"
            )
        rows.append(_Rows(chosen, flat_columns[chosen.places], flat_places[chosen.places]))
    return rows


def _integers(inputs: dict[str, Any], name: str, *, optional: bool = False) -> NDArray[np.int64] | None:
    value = inputs.get(name)
    if value is None and optional:
        return None
    if not isinstance(value, Tensor) or value.ndim != 2:
        got = type(value).__name__ if not isinstance(value, Tensor) else list(value.shape)
        raise MaskError(f"{name}: must be a [B, L] tensor to tell which tokens a sequence has, got {got}")
    array: NDArray[np.int64] = value.detach().cpu().numpy().astype(np.int64)
    return array


def _segments(
    input_ids: NDArray[np.int64], mask: NDArray[np.int64] | None, positions: NDArray[np.int64] | None
) -> list[tuple[int, NDArray[np.int64]]]:
    """(row, columns) of each sequence of two tokens or more."""
    segments = []
    for row in range(len(input_ids)):
        columns = np.arange(input_ids.shape[1]) if mask is None else np.flatnonzero(mask[row])
        cuts = np.zeros(0, np.int64)
        if positions is not None:
            at = positions[row if len(positions) > 1 else 0, columns]
            cuts = np.flatnonzero(at[1:] == 0) + 1
        segments += [(row, part) for part in np.split(columns, cuts) if part.size > 1]
    return segments


def _through(module: Any, hidden: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """compute(hidden) in place of the forward of the LM head, `module`.

    The head is called, not only read, so that the hooks of sharded data parallelism gather its weight before and
    spread its gradient afterwards.
    """
    before = module.__dict__.get("forward")
    module.forward = compute
    try:
        scores: tuple[Tensor, ...] = module(hidden)
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
    return scores


def _load_balancing(output: Any, settings: Any, inputs: dict[str, Any]) -> Tensor | None:
    """A mixture of experts' load-balancing loss, where its router logits were asked for."""
    if not inputs.get("output_router_logits"):
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(settings, "num_experts", None) or settings.num_local_experts
    loss: Tensor = load_balancing_loss_func(
        output.router_logits, experts, settings.num_experts_per_tok, inputs.get("attention_mask")
    )
    return loss
