"""Custom logits processors on the trainer's side: refused, or replayed as additive changes at the supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.replay.turns import Turn

__all__ = ["ReplayProcessor", "additive_changes", "check_processors"]

# Request fields of vLLM and SGLang under which a request names processors of its own.
_REQUEST_FIELDS = ("logits_processors", "custom_logit_processor", "watermark")
_TOLERANCE = 1e-4


class ReplayProcessor(Protocol):
    """A custom logits processor as the engine applied it to every request, after bad words and before temperature.

    One that does not preserve relative weights brings `replay(logits [K] float32, ids [K], context) -> [K]`, the same
    change at the support alone. context has `params` (the request's, by attribute), `prompt_token_ids` and
    `output_token_ids`.
    """

    @property
    def preserves_relative_weights(self) -> bool: ...  # noqa: D102


def check_processors(processors: Sequence[ReplayProcessor], turns: list[Turn]) -> None:
    """Raise MaskError for processors whose effect on the survivors' weights is unknown or cannot be replayed."""
    for processor in processors:
        name = type(processor).__name__
        preserves = getattr(processor, "preserves_relative_weights", None)
        if not isinstance(preserves, bool):
            raise MaskError(f"processors: {name}.preserves_relative_weights must be True or False, got {preserves!r}")
        if not preserves and not callable(getattr(processor, "replay", None)):
            raise MaskError(
                f"processors: {name} changes the survivors' relative weights; it needs a replay(logits, ids, context) "
                "that makes the same change at the support, or its rollouts cannot be trained on"
            )
    named = [(turn.name, field) for turn in turns for field in _REQUEST_FIELDS if turn.params.get(field)]
    if named and not processors:
        where, field = named[0]
        raise MaskError(
            f"{where}: sampling_params has {field}, a custom logits processor; pass it in processors, with "
            "preserves_relative_weights and, unless that is True, replay"
        )
    changing = [processor for processor in processors if not processor.preserves_relative_weights]
    penalised = [turn.name for turn in turns if turn.params.get("repetition_penalty") not in (None, 1, 1.0)]
    if changing and penalised:
        raise MaskError(
            f"processors: {type(changing[0]).__name__} acts after the repetition penalty of {penalised[0]}, which does "
            "not commute with it; roll out with repetition_penalty=1"
        )


def additive_changes(
    processors: Sequence[ReplayProcessor], turn: Turn, bias: Mapping[int, float]
) -> NDArray[np.float64]:
    """[N]: what the request's bias and the processors together add to the logit of every member of every row.

    Without a repetition penalty every step up to temperature adds, so their sum is what has to be replayed. Raises
    MaskError for a processor whose change depends on the logits, and for whole-vocabulary rows, which have no members.
    """
    if bool(((turn.mask.counts == 0) & turn.loss_mask).any()):
        raise MaskError(f"{turn.name}: a custom processor cannot be replayed over whole-vocabulary rows")
    added = np.array([bias.get(int(token_id), 0.0) for token_id in turn.mask.ids], np.float64)
    params = SimpleNamespace(**dict(turn.params))
    for t in range(turn.num_tokens):
        ids = turn.mask.row(t)
        if ids is None:
            continue
        context = SimpleNamespace(
            params=params, prompt_token_ids=turn.prompt_token_ids, output_token_ids=turn.token_ids[:t]
        )
        change = sum(_change(processor, ids, context, f"{turn.name} position {t}") for processor in processors)
        added[turn.mask.offsets[t] : turn.mask.offsets[t + 1]] += change
    return added


def _change(processor: Any, ids: NDArray[np.int32], context: SimpleNamespace, where: str) -> NDArray[np.float64]:
    """What `replay` adds to the logits; it must add the same to any logits."""
    probes = np.zeros(ids.size, np.float32), np.linspace(-4, 4, ids.size, dtype=np.float32)
    first, second = (np.asarray(processor.replay(probe.copy(), ids, context), np.float64) - probe for probe in probes)
    name = type(processor).__name__
    if any(change.shape != ids.shape or not np.isfinite(change).all() for change in (first, second)):
        raise MaskError(f"processors: {name}.replay must return one finite logit an id; it did not at {where}")
    if not np.allclose(first, second, atol=_TOLERANCE):
        raise MaskError(
            f"processors: {name}.replay changes logits by amounts that depend on them, at {where}; only processors "
            "that add to logits can be replayed"
        )
    return first
