"""`explain`: why an engine's log-probabilities are not those of replay. Every cause named was tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.outputs import Rollout
from keepmask.replay.turns import NEUTRAL_PARAMS
from keepmask.verify.row_logits import PROFILES, RowLogits, row_logits

__all__ = ["Explanation", "Hypothesis", "explain"]

Floats = NDArray[np.float64]

_OUTSIDE = 0.1
_EXPLAINS = 0.25  # share of what is amiss, at most, that is left where a cause is the cause
_SAME_RULES = 0.95  # share of rows that are a profile's own, or are but for ties
_FITTED = {
    "temperature": np.geomspace(0.2, 3.0, 41),
    "repetition_penalty": np.geomspace(0.8, 2.0, 25),
    "frequency_penalty": np.linspace(-1.0, 2.0, 31),
    "presence_penalty": np.linspace(-1.0, 2.0, 31),
}
_REFINED = 4  # times a grid is made finer around its best value


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A way the log-probabilities may have come about, and how well it gives them."""

    name: str
    says: str
    """What is the matter, and the remedy."""
    outside: float
    """Share of ratios outside [0.9, 1.1] that it leaves."""
    difference: float
    """Mean |log-probability - engine's| that it leaves, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was tried, as recorded first, and the cause found, None where none of them explains it."""

    tried: tuple[Hypothesis, ...]
    cause: Hypothesis | None
    notes: tuple[str, ...]
    """What is remarkable about the masks, whatever the log-probabilities."""


def explain(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    tokenizer: Any = None,
    others: Mapping[str, Callable[[], Any]] | None = None,
    threshold: float,
    on_progress: Callable[[int], None] = lambda _num_rollouts: None,
) -> Explanation:
    """Test every cause on these rollouts, which have masks and log-probabilities.

    model: in the engine's type. tokenizer: of the model, for causes that lie in the prompt's tokens. others: models,
    by name, that may have drawn them in its place; loaded one at a time. threshold: share of ratios outside
    [0.9, 1.1] that needs no cause. on_progress: called with the number of rollouts read.
    """
    parts = []
    for rollout in rollouts:
        parts.append(row_logits(model, rollout))
        on_progress(len(parts))
    base = _measured("as recorded", "", parts, [part.predict(part.rollout.sampling_params) for part in parts])
    tried = [*_by_numbers(parts), *_by_version(parts, base)]
    if base.outside > threshold and not any(_is_cause(each, base, threshold) for each in tried):
        tried += [*_by_prompt(model, rollouts, tokenizer), *_by_weights(rollouts, others or {})]
    causes = sorted((each for each in tried if _is_cause(each, base, threshold)), key=lambda each: each.difference)
    cause = causes[0] if causes and base.outside > threshold else None
    if cause is not None:  # of equals the simplest, which is tried first
        cause = next(
            each
            for each in tried
            if each.difference <= 1.2 * cause.difference + 1e-6 and _is_cause(each, base, threshold)
        )
    return Explanation(tried=(base, *tried), cause=cause, notes=tuple(_notes(parts)))


def _is_cause(each: Hypothesis, base: Hypothesis, threshold: float) -> bool:
    least = 2 * _EXPLAINS * base.difference  # what precision leaves is a larger part of the small differences
    return each.difference <= least and each.outside <= max(threshold, _EXPLAINS * base.outside)


def _measured(name: str, says: str, parts: Sequence[RowLogits], predicted: Sequence[Floats]) -> Hypothesis:
    engine = np.concatenate([part.logprobs for part in parts])
    difference = np.concatenate(predicted) - engine
    difference = difference[~np.isnan(difference)]
    ratio = np.exp(np.clip(difference, -700, 700))
    outside = float((np.abs(ratio - 1) > _OUTSIDE).mean()) if difference.size else 0.0
    size = float(np.minimum(np.abs(difference), 100).mean()) if difference.size else 0.0
    return Hypothesis(name=name, says=says, outside=outside, difference=size)


def _by_numbers(parts: Sequence[RowLogits]) -> Iterator[Hypothesis]:
    """Causes that the logits at hand can test."""
    yield _measured(
        "raw log-probs",
        "the engine's log-probs are those of the raw logits over the whole vocabulary: start it with "
        "--logprobs-mode processed_logprobs",
        parts,
        [part.raw_logprobs for part in parts],
    )
    yield _measured(
        "log-probs over the whole vocabulary",
        "the engine's log-probs are processed, but over the whole vocabulary: take those on the support (SGLang: "
        "output_token_sampling_logprobs)",
        parts,
        [part.full_logprobs for part in parts],
    )
    for name in (*NEUTRAL_PARAMS, "logit_bias"):
        neutral = NEUTRAL_PARAMS.get(name)
        if any((part.rollout.sampling_params.get(name) or neutral) != neutral for part in parts):
            says = f"{name} is recorded, but the engine's log-probs are without it: record what was asked of the engine"
            yield _measured(f"without {name}", says, parts, _predict(parts, {name: neutral}))
    for name, grid in _FITTED.items():
        value = _fit(parts, name, grid)
        recorded = sorted({part.rollout.sampling_params.get(name, NEUTRAL_PARAMS[name]) for part in parts})
        says = (
            f"the engine drew with {name} {value:.3g}, recorded is {', '.join(map(str, recorded))}: give replay the "
            "parameters of the request, with the server's defaults filled in"
        )
        yield _measured(f"{name} {value:.3g}", says, parts, _predict(parts, {name: value}))
    for profile in PROFILES:
        predicted = []
        for part in parts:
            values = np.full(part.logprobs.size, np.nan)
            values[part.checked] = part.rules[profile].logprobs
            predicted.append(values)
        says = (
            f"the log-probs are normalised over the rows that the rules of {profile} keep, and the masks are others: "
            "record the mask of the very draw"
        )
        yield _measured(f"rows of {profile}", says, parts, predicted)


def _predict(parts: Sequence[RowLogits], changes: Mapping[str, Any]) -> list[Floats]:
    return [part.predict({**part.rollout.sampling_params, **changes}) for part in parts]


def _fit(parts: Sequence[RowLogits], name: str, grid: Floats) -> float:
    """The value that leaves the least mean |difference|."""
    for _ in range(_REFINED):
        left = [_measured("", "", parts, _predict(parts, {name: value})).difference for value in grid.tolist()]
        best = int(np.argmin(left))
        value = float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 9)
    return value


def _by_version(parts: Sequence[RowLogits], base: Hypothesis) -> Iterator[Hypothesis]:
    """Whether the tokens of some weight versions fit and those of others do not."""
    versions = sorted({span.version for part in parts for span in part.rollout.weight_versions})
    if len(versions) < 2:
        return
    for version in versions:
        predicted = []
        for part in parts:
            values = part.predict(part.rollout.sampling_params)
            for span in part.rollout.weight_versions:
                if span.version != version:
                    values[span.start : span.end] = np.nan
            predicted.append(values)
        says = f"the model has the weights of version {version}; tokens that others drew are another policy's"
        yield _measured(f"version {version} alone", says, parts, predicted)


def _by_prompt(model: Any, rollouts: Sequence[Rollout], tokenizer: Any) -> Iterator[Hypothesis]:
    """Other tokens of the same prompts: with and without the beginning-of-sequence token, and encoded anew."""
    if tokenizer is None:
        return
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ways: dict[str, Callable[[Rollout], Any]] = {
        "prompt begins with one more special token": lambda r: [bos, *r.prompt_token_ids.tolist()],
        "prompt begins without its first token": lambda r: r.prompt_token_ids[1:].tolist() or None,
        "prompt tokenised from its text": lambda r: r.prompt and tokenizer.encode(r.prompt),
        "prompt tokenised without special tokens": lambda r: (
            r.prompt and tokenizer.encode(r.prompt, add_special_tokens=False)
        ),
    }
    for name, prompt_of in ways.items():
        changed = [(rollout, prompt_of(rollout)) for rollout in rollouts]
        if all(ids and ids != rollout.prompt_token_ids.tolist() for rollout, ids in changed):
            others = [dataclasses.replace(r, prompt_token_ids=np.asarray(ids, np.int32)) for r, ids in changed]
            parts = [row_logits(model, rollout, max_checked=0) for rollout in others]
            says = f"tokenisation differs: the engine's {name}; record the token ids that the engine read"
            yield _measured(name, says, parts, _predict(parts, {}))


def _by_weights(rollouts: Sequence[Rollout], others: Mapping[str, Callable[[], Any]]) -> Iterator[Hypothesis]:
    for name, load in others.items():
        model = load()
        parts = [row_logits(model, rollout, max_checked=0) for rollout in rollouts]
        yield _measured(f"weights of {name}", f"{name} has the weights that drew these", parts, _predict(parts, {}))


def _notes(parts: Sequence[RowLogits]) -> Iterator[str]:
    """What the rows themselves say: whose rules they follow, and how ties were cut."""
    checked = sum(part.checked.size for part in parts)
    if not checked:
        return
    own = {part.rollout.sampling_params.get("sampling_semantics") or PROFILES[0] for part in parts}
    equal = {name: sum(int(part.rules[name].equal.sum()) for part in parts) / checked for name in PROFILES}
    tied = {name: sum(int(part.rules[name].tied.sum()) for part in parts) / checked for name in PROFILES}
    best = max(PROFILES, key=lambda name: (equal[name] + tied[name], equal[name], name in own))
    shares = ", ".join(f"{name} {equal[name]:.1%}" for name in PROFILES)
    yield f"rows that the model's own logits give under each profile's rules: {shares} (of {checked})"
    if best not in own and equal[best] + tied[best] >= max(_SAME_RULES, *(equal[name] + tied[name] for name in own)):
        yield f"masks of other rules: they follow {best}, not {', '.join(sorted(own))}"
    if equal[best] + tied[best] >= _SAME_RULES and tied[best] > 1 - _SAME_RULES:
        yield f"ties cut differently: {tied[best]:.1%} of rows differ from {best}'s by tied ids alone"
