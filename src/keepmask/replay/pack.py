"""`pack_rollouts`: trajectories as flat NumPy arrays, tokens on one side and scored rows on the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.replay.replay_processors import ReplayProcessor, additive_changes, check_processors
from keepmask.replay.turns import GREEDY_TEMPERATURE, NEUTRAL_PARAMS, LogprobsMode, Turn, check_turns, integers

__all__ = ["MissingMask", "PackedRollouts", "RolloutLike", "pack_rollouts"]

MissingMask = Literal["error", "full"]
Ints = NDArray[np.int64]


class RolloutLike(Protocol):
    """What is read of a rollout; `keepmask.outputs.Rollout` has it."""

    @property
    def prompt_token_ids(self) -> NDArray[Any]: ...  # noqa: D102
    @property
    def token_ids(self) -> NDArray[Any]: ...  # noqa: D102
    @property
    def sampling_mask(self) -> SamplingMask | None: ...  # noqa: D102
    @property
    def logprobs(self) -> NDArray[Any] | None: ...  # noqa: D102
    @property
    def sampling_params(self) -> Mapping[str, Any]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRollouts:
    """S sequences of T tokens in all, and R rows: one for each token that the policy drew, in order.

    Row r scores targets[r] with the logits at token logit_positions[r], the one before it.
    """

    input_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T], from 0 in each sequence."""
    lengths: tuple[int, ...]
    """S numbers of tokens, padding included."""
    row_lengths: tuple[int, ...]
    """S numbers of rows."""
    logit_positions: Ints
    """[R]"""
    targets: Ints
    """[R]"""
    loss_mask: NDArray[np.bool_]
    """[R]"""
    mask: SamplingMask
    """R rows; with logprobs where every rollout has them."""
    rollout_logprobs: NDArray[np.float32] | None
    """[R], nats, on the support."""
    params: dict[str, NDArray[np.float32]]
    """Names of `NEUTRAL_PARAMS` to [R], only those that are not neutral everywhere."""
    generation_starts: Ints
    """[R]: where in its sequence the output of the row's request begins."""
    bias: tuple[Ints, NDArray[np.float32], Ints, Ints] | None
    """ids, values, offsets and the entry of each row, as `LogitBias` has them."""
    versions: tuple[str, ...]
    row_versions: Ints
    """[R]: index into `versions` of the weights that drew the token, -1 where unknown."""


def pack_rollouts(
    rollouts: Iterable[Any],
    *,
    vocab_size: int,
    appended_token_ids: Sequence[ArrayLike] | None,
    loss_masks: Sequence[ArrayLike] | None,
    logprobs_mode: LogprobsMode | None,
    missing_mask: MissingMask,
    processors: Sequence[ReplayProcessor],
    pad_to_multiple_of: int,
    pad_token_id: int,
) -> PackedRollouts:
    """See `ReplayBatch.pack`."""
    _check_options(vocab_size, missing_mask, logprobs_mode, pad_to_multiple_of, pad_token_id)
    trajectories = _trajectories(rollouts, missing_mask)
    appended = _appended(appended_token_ids, len(trajectories), vocab_size)
    turns = [turn for trajectory in trajectories for turn in trajectory]
    turns = _with_loss_masks(turns, trajectories, loss_masks)
    check_processors(processors, turns)
    turns = check_turns(turns, vocab_size, logprobs_mode)
    sequences, lengths = _sequences(trajectories, appended, pad_to_multiple_of, pad_token_id)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
    places = [starts[turn.rollout] + turn.start + np.arange(turn.num_tokens) for turn in turns]
    versions = sorted({str(span.version) for turn in turns for span in turn.weight_versions})
    row_lengths = [sum(turn.num_tokens for turn in trajectory) for trajectory in trajectories]
    return PackedRollouts(
        input_ids=_joined(sequences, np.int64),
        position_ids=_joined([np.arange(length) for length in lengths], np.int64),
        lengths=tuple(lengths),
        row_lengths=tuple(row_lengths),
        logit_positions=_joined(places, np.int64) - 1,
        targets=_joined([turn.token_ids for turn in turns], np.int64),
        loss_mask=_joined([turn.loss_mask for turn in turns], np.bool_),
        mask=_joined_mask(turns),
        rollout_logprobs=_joined_logprobs(turns),
        params=_params(turns),
        generation_starts=_joined([np.full(turn.num_tokens, turn.start) for turn in turns], np.int64),
        bias=_bias(turns, processors, vocab_size),
        versions=tuple(versions),
        row_versions=_joined([_row_versions(turn, versions) for turn in turns], np.int64),
    )


def _check_options(
    vocab_size: int, missing_mask: str, logprobs_mode: str | None, pad_to_multiple_of: int, pad_token_id: int
) -> None:
    for name, value, legal in (
        ("missing_mask", missing_mask, ("error", "full")),
        ("logprobs_mode", logprobs_mode, (None, "processed_logprobs", "raw_logprobs")),
    ):
        if value not in legal:
            raise MaskError(f"{name}={value!r}: must be one of {', '.join(map(str, legal))}")
    if vocab_size < 1:
        raise MaskError(f"vocab_size={vocab_size}: must be the width of the LM head, at least 1")
    if pad_to_multiple_of < 1:
        raise MaskError(f"pad_to_multiple_of={pad_to_multiple_of}: must be >= 1")
    if not 0 <= pad_token_id < vocab_size:
        raise MaskError(f"pad_token_id={pad_token_id}: must be in [0, {vocab_size})")


def _trajectories(rollouts: Iterable[Any], missing_mask: MissingMask) -> list[list[Turn]]:
    """Each item's turns: a rollout is one, a sequence of rollouts are several, a RequestOutput is its rollouts."""
    items: list[Sequence[RolloutLike]] = []
    for item in rollouts:
        if hasattr(item, "rollouts"):
            items += [[rollout] for rollout in item.rollouts()]
        else:
            items.append(item if isinstance(item, Sequence) else [item])
    return [
        [Turn.of(rollout, index, t if len(item) > 1 else None, missing_mask) for t, rollout in enumerate(item)]
        for index, item in enumerate(items)
    ]


def _appended(token_ids: Sequence[ArrayLike] | None, num_trajectories: int, vocab_size: int) -> list[Ints]:
    if token_ids is None:
        return [np.zeros(0, np.int64)] * num_trajectories
    if len(token_ids) != num_trajectories:
        raise MaskError(f"appended_token_ids: {len(token_ids)} lists for {num_trajectories} trajectories")
    lists = [integers(f"appended_token_ids: those of rollout {index}", ids) for index, ids in enumerate(token_ids)]
    bad = [index for index, ids in enumerate(lists) if ids.size and (ids.min() < 0 or ids.max() >= vocab_size)]
    if bad:
        raise MaskError(f"appended_token_ids: ids must be in [0, {vocab_size}); not so for rollout {bad[0]}")
    return lists


def _with_loss_masks(
    turns: list[Turn], trajectories: list[list[Turn]], loss_masks: Sequence[ArrayLike] | None
) -> list[Turn]:
    if loss_masks is None:
        return turns
    if len(loss_masks) != len(trajectories):
        raise MaskError(f"loss_masks: {len(loss_masks)} masks for {len(trajectories)} trajectories")
    masked = []
    for index, (values, trajectory) in enumerate(zip(loss_masks, trajectories, strict=True)):
        flags = np.asarray(values)
        total = sum(turn.num_tokens for turn in trajectory)
        if flags.shape != (total,):
            raise MaskError(
                f"loss_masks: shape {list(flags.shape)} for rollout {index}, which has {total} drawn tokens; "
                "give one value a drawn token, the turns one after the other"
            )
        if flags.dtype.kind not in "biuf" or not np.isin(flags, (0, 1)).all():
            raise MaskError(f"loss_masks: those of rollout {index} must be 0 or 1; weights go into the objective")
        ends = np.cumsum([turn.num_tokens for turn in trajectory])
        for turn, part in zip(trajectory, np.split(flags.astype(np.bool_), ends[:-1]), strict=True):
            masked.append(replace(turn, loss_mask=part))
    return masked


def _sequences(
    trajectories: list[list[Turn]], appended: list[Ints], multiple: int, pad_token_id: int
) -> tuple[list[Ints], list[int]]:
    """The tokens of each trajectory: the last turn's prompt and output, what was appended, and padding."""
    sequences = []
    for index, (trajectory, extra) in enumerate(zip(trajectories, appended, strict=True)):
        if not trajectory:
            raise MaskError(f"rollout {index}: a trajectory needs at least one turn")
        last = trajectory[-1]
        tokens = np.concatenate([last.prompt_token_ids, last.token_ids, extra]).astype(np.int64)
        for turn in trajectory[:-1]:
            _check_continues(turn, tokens[: last.start])
        padding = -tokens.size % multiple
        sequences.append(np.concatenate([tokens, np.full(padding, pad_token_id, np.int64)]))
    return sequences, [sequence.size for sequence in sequences]


def _check_continues(turn: Turn, tokens: Ints) -> None:
    """Refuse a turn whose tokens are not the beginning of the last turn's prompt."""
    own = np.concatenate([turn.prompt_token_ids, turn.token_ids])
    common = min(own.size, tokens.size)
    differs = np.flatnonzero(own[:common] != tokens[:common])
    if differs.size or own.size > tokens.size:
        position = differs[0] if differs.size else common
        raise MaskError(
            f"{turn.name}: the last turn's prompt does not continue its tokens; they part at position {position}. "
            "Send the tokens of earlier turns back as they are, or pack these turns as rollouts of their own"
        )


def _joined_mask(turns: list[Turn]) -> SamplingMask:
    masks = [turn.mask for turn in turns]
    if any(mask.logprobs is None for mask in masks):
        masks = [SamplingMask(mask.ids, mask.offsets) for mask in masks]
    return SamplingMask.concat(masks)


def _joined_logprobs(turns: list[Turn]) -> NDArray[np.float32] | None:
    parts = [turn.logprobs for turn in turns]
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) != len(parts):
        absent = [turn.name for turn in turns if turn.logprobs is None]
        raise MaskError(f"logprobs: given for some rollouts and absent in {absent[0]} ({len(absent)} such); give all")
    return _joined(present, np.float32)


def _params(turns: list[Turn]) -> dict[str, NDArray[np.float32]]:
    params = {}
    for name, neutral in NEUTRAL_PARAMS.items():
        values = [float(neutral if (value := turn.params.get(name)) is None else value) for turn in turns]
        if name == "temperature":
            values = [neutral if value < GREEDY_TEMPERATURE else value for value in values]
        if any(value != neutral for value in values):
            params[name] = np.repeat(np.array(values, np.float32), [turn.num_tokens for turn in turns])
    return params


def _bias(
    turns: list[Turn], processors: Sequence[ReplayProcessor], vocab_size: int
) -> tuple[Ints, NDArray[np.float32], Ints, Ints] | None:
    """One entry a request; one a row where a custom processor changes the survivors' weights."""
    changing = [processor for processor in processors if not processor.preserves_relative_weights]
    biases = [_request_bias(turn, vocab_size) for turn in turns]
    if not changing:
        if not any(biases):
            return None
        entries = np.repeat(np.arange(len(turns)), [turn.num_tokens for turn in turns])
        ids = _joined([np.fromiter(bias, np.int64, len(bias)) for bias in biases], np.int64)
        values = _joined([np.fromiter(bias.values(), np.float32, len(bias)) for bias in biases], np.float32)
        return ids, values, np.cumsum([0] + [len(bias) for bias in biases]), entries
    mask = _joined_mask(turns)
    values = _joined([additive_changes(changing, turn, bias) for turn, bias in zip(turns, biases, strict=True)], float)
    return mask.ids.astype(np.int64), values.astype(np.float32), mask.offsets, np.arange(len(mask))


def _request_bias(turn: Turn, vocab_size: int) -> dict[int, float]:
    given = turn.params.get("logit_bias") or {}
    try:
        bias = {int(token_id): float(value) for token_id, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise MaskError(f"{turn.name}: logit_bias must map token ids to numbers, got {given!r:.80}") from None
    bad = [token_id for token_id in bias if not 0 <= token_id < vocab_size]
    if bad:
        raise MaskError(f"{turn.name}: logit_bias of id {bad[0]}, which is not in [0, {vocab_size})")
    undefined = [token_id for token_id, value in bias.items() if not value < math.inf]
    if undefined:
        raise MaskError(f"{turn.name}: logit_bias of id {undefined[0]} is {bias[undefined[0]]}, not a number below inf")
    return bias


def _row_versions(turn: Turn, versions: list[str]) -> Ints:
    rows = np.full(turn.num_tokens, -1, np.int64)
    for span in turn.weight_versions:
        rows[span.start : span.end] = versions.index(str(span.version))
    return rows


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
