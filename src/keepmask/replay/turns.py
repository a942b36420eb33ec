"""`Turn`, one request of a trajectory, and the checks that refuse, by rollout and position, what cannot be replayed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.outputs import WeightVersionSpan

__all__ = ["GREEDY_TEMPERATURE", "NEUTRAL_PARAMS", "LogprobsMode", "Turn", "check_turns", "integers"]

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

GREEDY_TEMPERATURE = 1e-5
"""Below it a draw is greedy, as in vLLM: its row is a singleton, where no temperature matters."""

NEUTRAL_PARAMS = {"temperature": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Parameters that change the survivors' weights, and the value of each that does not."""

_MAX_LISTED = 8
_FIELDS = ("prompt_token_ids", "token_ids", "sampling_mask", "logprobs", "sampling_params")
_FILTERS = ("top_k", "top_p", "min_p", "allowed_token_ids", "bad_words", "min_tokens")
# Log-probs of the support that come from different kernels agree far closer than this; raw ones do not.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a trajectory: its prompt, which holds all earlier turns, and the T tokens the policy drew."""

    rollout: int
    """Index of its trajectory."""
    turn: int | None
    """Index within the trajectory; None where that is a single rollout."""
    prompt_token_ids: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    """[T]"""
    mask: SamplingMask
    has_mask: bool
    """False where the rollout had none, and its rows stand for the whole vocabulary."""
    logprobs: NDArray[np.float32] | None
    params: Mapping[str, Any]
    weight_versions: tuple[WeightVersionSpan, ...]
    loss_mask: NDArray[np.bool_]
    """[T]"""

    @classmethod
    def of(cls, rollout: Any, index: int, turn: int | None, missing_mask: Literal["error", "full"]) -> Turn:
        """The turn of a `Rollout`. Raises MaskError for one without a mask, unless missing masks are "full"."""
        name = _name(index, turn)
        absent = [field for field in _FIELDS if not hasattr(rollout, field)]
        if absent:
            raise MaskError(
                f"{name}: a {type(rollout).__name__} without {', '.join(absent)} is no rollout; "
                "keepmask.wire.peers reads those of other programs"
            )
        tokens, prompt = (
            integers(f"{name}: {field}", getattr(rollout, field)) for field in ("token_ids", "prompt_token_ids")
        )
        mask = rollout.sampling_mask
        if not isinstance(mask, SamplingMask | None):
            raise MaskError(
                f"{name}: sampling_mask must be a SamplingMask, got {type(mask).__name__}; SamplingMask.from_lists or "
                "keepmask.wire.peers makes one"
            )
        if mask is None and missing_mask == "error":
            raise MaskError(
                f"{name}: no sampling_mask; ask the engine for one, or say missing_mask='full' when it drew from the "
                "whole vocabulary, with no filter and no ban"
            )
        params = _params(name, rollout.sampling_params)
        if mask is None and (filters := [key for key in _FILTERS if _filters(key, params.get(key))]):
            raise MaskError(f"{name}: {filters[0]}={params[filters[0]]} dropped ids, but there is no sampling_mask")
        logprobs = rollout.logprobs
        return cls(
            rollout=index,
            turn=turn,
            prompt_token_ids=prompt,
            token_ids=tokens,
            mask=SamplingMask([], np.zeros(tokens.size + 1, np.int64)) if mask is None else mask,
            has_mask=mask is not None,
            logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
            params=params,
            weight_versions=tuple(getattr(rollout, "weight_versions", ())),
            loss_mask=np.ones(tokens.size, np.bool_),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.size

    @property
    def start(self) -> int:
        """The position in the trajectory where its output begins."""
        return self.prompt_token_ids.size

    @property
    def name(self) -> str:
        """How errors call it."""
        return _name(self.rollout, self.turn)


def check_turns(turns: list[Turn], vocab_size: int, logprobs_mode: LogprobsMode | None) -> list[Turn]:
    """The turns, with log-probabilities on their supports. Raises MaskError naming what cannot be replayed."""
    for check in (_lengths, _token_range, _support_range, _members, _whole_rows, _greedy_rows, _version_spans):
        check(turns, vocab_size)
    return [_with_support_logprobs(turn, logprobs_mode) for turn in turns]


def _lengths(turns: list[Turn], _: int) -> None:
    unpreceded = [turn.name for turn in turns if not turn.start]
    _refuse("prompt_token_ids: a drawn token needs the logits of the token before it; empty in", unpreceded)
    rows = [
        f"{turn.name} ({len(turn.mask)} rows for {turn.num_tokens} tokens)"
        for turn in turns
        if len(turn.mask) != turn.num_tokens
    ]
    _refuse(
        "sampling_mask: needs one row a drawn token; pass tokens a framework appended, an EOS for one, as "
        "appended_token_ids. Other counts in",
        rows,
    )
    values = [
        f"{turn.name} ({turn.logprobs.size} for {turn.num_tokens} tokens)"
        for turn in turns
        if turn.logprobs is not None and turn.logprobs.shape != turn.token_ids.shape
    ]
    _refuse("logprobs: needs one value a drawn token; other counts in", values)


def _token_range(turns: list[Turn], vocab_size: int) -> None:
    for field in ("token_ids", "prompt_token_ids"):
        _refuse_positions(
            f"{field}: ids must be in [0, {vocab_size}); not so at",
            turns,
            lambda turn, field=field: (getattr(turn, field) < 0) | (getattr(turn, field) >= vocab_size),  # type: ignore[misc]
        )


def _support_range(turns: list[Turn], vocab_size: int) -> None:
    _refuse_positions(
        f"sampling_mask: ids must be in [0, {vocab_size}); not so at",
        turns,
        lambda turn: _rows_of(turn.mask, turn.mask.ids >= vocab_size),
    )


def _members(turns: list[Turn], _: int) -> None:
    _refuse_positions(
        "sampling_mask: the drawn token is not in its row, so rows and tokens are misaligned or the mask was cut; at",
        turns,
        lambda turn: ~turn.mask.contains(turn.token_ids) & turn.loss_mask,
    )


def _whole_rows(turns: list[Turn], _: int) -> None:
    bounded = [turn.name for turn in turns if turn.params.get("sampling_mask_mode") == "bounded"]
    _refuse("sampling_mask: taken in bounded mode, which cuts rows; use exact mode. Bounded in", bounded)
    _refuse_positions(
        "sampling_mask: the recorded probabilities of a row do not add up to 1, so ids are missing (a cut mask) or the "
        "probabilities are not those of the support; at",
        turns,
        _mass_missing,
    )


def _mass_missing(turn: Turn) -> NDArray[np.bool_]:
    if turn.mask.logprobs is None:
        return np.zeros(turn.num_tokens, np.bool_)
    rows = np.repeat(np.arange(turn.num_tokens), turn.mask.counts)
    mass = np.bincount(rows, np.exp(turn.mask.logprobs.astype(np.float64)), minlength=turn.num_tokens)
    missing: NDArray[np.bool_] = (turn.mask.counts > 0) & ~(np.abs(mass - 1) <= _TOLERANCE)
    return missing


def _greedy_rows(turns: list[Turn], _: int) -> None:
    _refuse_positions(
        "temperature: below 1e-5 a draw is greedy and its row holds the drawn token alone; it does not at",
        turns,
        lambda turn: (turn.mask.counts != 1) & turn.loss_mask & _is_greedy(turn),
    )


def _version_spans(turns: list[Turn], _: int) -> None:
    bad = []
    for turn in turns:
        bounds = [0, *(edge for span in turn.weight_versions for edge in (span.start, span.end)), turn.num_tokens]
        gaps = [start for end, start in zip(bounds[::2], bounds[1::2], strict=True) if end != start]
        if turn.weight_versions and (gaps or bounds != sorted(bounds)):
            bad.append(f"{turn.name} ({[tuple(span) for span in turn.weight_versions]} for {turn.num_tokens} tokens)")
    _refuse("weight_versions: spans must cover the drawn tokens in order, without gap or overlap; not so in", bad)


def _with_support_logprobs(turn: Turn, mode: LogprobsMode | None) -> Turn:
    """The turn with log-probabilities over the supports. Raises MaskError where they are over something else."""
    drawn = _drawn_member_logprobs(turn)
    if turn.logprobs is None:
        return turn if drawn is None else replace(turn, logprobs=drawn)
    if mode == "raw_logprobs":
        if drawn is not None:
            return replace(turn, logprobs=drawn)
        if bool((turn.loss_mask & (turn.mask.counts > 0)).any()) or _changes_logits(turn):
            raise MaskError(
                f"{turn.name}: raw log-probabilities are over the whole vocabulary at temperature 1 and have no ratio "
                "to replayed ones; roll out with logprobs_mode='processed_logprobs', ask for "
                "return_sampling_mask_logprobs, or leave logprobs out and take the trainer's own as old_logprobs"
            )
    elif mode is None and not turn.has_mask and _changes_logits(turn):
        raise MaskError(
            f"{turn.name}: its parameters change the logits and it has no mask, so its log-probabilities may be raw or "
            "processed; say which with logprobs_mode"
        )
    values = turn.logprobs
    bad = turn.loss_mask & ~(values <= _TOLERANCE)
    bad |= turn.loss_mask & ~np.isfinite(values)
    _refuse_at("logprobs: must be finite and at most 0; not so at", turn, bad)
    alone = turn.loss_mask & (turn.mask.counts == 1) & ~(np.abs(values) <= _TOLERANCE)
    _refuse_at(
        "logprobs: a token alone in its row has log-probability 0 on the support, so these are raw ones; roll out with "
        "logprobs_mode='processed_logprobs'. Other values at",
        turn,
        alone,
    )
    if drawn is not None:
        apart = turn.loss_mask & (turn.mask.counts > 0) & ~(np.abs(values - drawn) <= _TOLERANCE)
        _refuse_at(
            "logprobs: differ from the mask's own log-probabilities of the drawn tokens, so these are raw ones; say "
            "logprobs_mode='raw_logprobs' to take the mask's. They differ at",
            turn,
            apart,
        )
    return turn


def _drawn_member_logprobs(turn: Turn) -> NDArray[np.float32] | None:
    """[T]: the mask's own log-probability of each drawn token; None unless every trained row has one."""
    mask = turn.mask
    if mask.logprobs is None or bool(((mask.counts == 0) & turn.loss_mask).any()):
        return None
    values = np.zeros(turn.num_tokens, np.float32)
    rows = np.repeat(np.arange(turn.num_tokens), mask.counts)
    hit = mask.ids == turn.token_ids[rows]
    values[rows[hit]] = mask.logprobs[hit]
    return values


def _changes_logits(turn: Turn) -> bool:
    changed = any(turn.params.get(name) not in (None, value) for name, value in NEUTRAL_PARAMS.items())
    return changed or bool(turn.params.get("logit_bias"))


def _is_greedy(turn: Turn) -> bool:
    temperature = turn.params.get("temperature")
    return temperature is not None and temperature < GREEDY_TEMPERATURE


def _filters(key: str, value: Any) -> bool:
    if key == "top_p":
        return value is not None and value < 1
    return bool(value) and value != -1  # top_k = -1 keeps all, as 0 does


def _params(name: str, given: Any) -> Mapping[str, Any]:
    """The sampling parameters of a request as a mapping, those that are replayed being numbers."""
    params = given.model_dump() if hasattr(given, "model_dump") else given
    if not isinstance(params, Mapping):
        raise MaskError(
            f"{name}: sampling_params must be a mapping of names to values, got {type(given).__name__}; an empty one "
            "says that nothing changed the logits"
        )
    for field in NEUTRAL_PARAMS:
        value = params.get(field)
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise MaskError(f"{name}: {field}={value!r} must be a finite number")
    if params.get("repetition_penalty") is not None and not params["repetition_penalty"] > 0:
        raise MaskError(f"{name}: repetition_penalty={params['repetition_penalty']} must be positive")
    return params


def integers(name: str, values: Any) -> NDArray[np.int64]:
    """`values` as a flat array of integers. Raises MaskError for anything else."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MaskError(f"{name} must be a flat integer array, got {array.dtype} {list(array.shape)}")
    return array.astype(np.int64)


def _rows_of(mask: SamplingMask, pairs: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[T]: the rows that hold one of these pairs."""
    rows = np.repeat(np.arange(len(mask)), mask.counts)
    flags = np.zeros(len(mask), np.bool_)
    flags[rows[pairs]] = True
    return flags


def _refuse_positions(problem: str, turns: list[Turn], bad: Callable[[Turn], NDArray[np.bool_]]) -> None:
    _refuse(problem, [f"{turn.name} position {t}" for turn in turns for t in np.flatnonzero(bad(turn)).tolist()])


def _refuse_at(problem: str, turn: Turn, bad: NDArray[np.bool_]) -> None:
    _refuse(problem, [f"{turn.name} position {t}" for t in np.flatnonzero(bad).tolist()])


def _refuse(problem: str, offenders: list[str]) -> None:
    if offenders:
        more = f" and {len(offenders) - _MAX_LISTED} more" if len(offenders) > _MAX_LISTED else ""
        raise MaskError(f"{problem} {', '.join(offenders[:_MAX_LISTED])}{more}")


def _name(rollout: int, turn: int | None) -> str:
    return f"rollout {rollout}" if turn is None else f"rollout {rollout} turn {turn}"
