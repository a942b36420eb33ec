"""`MaskStore`: rollouts found again by their tokens, wherever a trainer's batching has put them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError
from keepmask.outputs import Rollout
from keepmask.replay.pack import MissingMask
from keepmask.replay.replay_batch import ReplayBatch
from keepmask.replay.replay_processors import ReplayProcessor

__all__ = ["FoundRows", "MaskStore"]

_NO_ROLLOUT = (
    "no rollout in the store has its tokens. Add the rollouts before the model is called; give what a framework "
    "appends as appended_token_ids; and decide with unrecorded={'temperature': 1.0} that others count as drawn from "
    "the whole vocabulary"
)


class FoundRows(NamedTuple):
    """The drawn tokens of some sequences, and where their logits are."""

    batch: ReplayBatch
    """The sequences' rows, on the CPU."""
    places: torch.Tensor
    """[R] int64: of each row, its token's place among the numbers in `sequences` laid end to end."""


class MaskStore:
    """Rollouts by their tokens: prompt, completion and what was appended, of all turns.

    A trainer may shuffle, split, repeat and pack sequences as it likes; the tokens alone say which rollout one is.
    Sequences of the same tokens share the rollout that was added first: a draw from the same weights and parameters has
    the same supports.

    vocab_size: V, the width of the LM head. unrecorded: sampling parameters of sequences that no rollout was added of,
    whose scored tokens then count as drawn from the whole vocabulary; None refuses such sequences. missing_mask and
    processors: as in `ReplayBatch.pack`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        unrecorded: Mapping[str, Any] | None = None,
        missing_mask: MissingMask = "error",
        processors: Sequence[ReplayProcessor] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self._unrecorded = unrecorded
        self._missing_mask: MissingMask = missing_mask
        self._processors = processors
        self._batches: list[ReplayBatch] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._drawn: dict[bytes, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        """Sequences of different tokens."""
        return len(self._places)

    def add(self, rollouts: Iterable[Any], *, appended_token_ids: Sequence[ArrayLike] | None = None) -> None:
        """Keep these rollouts; `ReplayBatch.pack` says what one may be and what is refused.

        Raises MaskError, and keeps none, where one has the tokens of another but was drawn with other parameters: its
        tokens cannot tell them apart.
        """
        items = [item for given in rollouts for item in (given.rollouts() if hasattr(given, "rollouts") else [given])]
        batch = ReplayBatch.pack(
            items,
            vocab_size=self.vocab_size,
            appended_token_ids=appended_token_ids,
            missing_mask=self._missing_mask,
            processors=self._processors,
        )
        ends = np.cumsum(batch.lengths)
        keys = [_key(tokens) for tokens in np.split(batch.input_ids.numpy(), ends[:-1])] if items else []
        drawn = {**self._drawn}
        for index, (key, item) in enumerate(zip(keys, items, strict=True)):
            how = _how_drawn(item)
            if drawn.setdefault(key, how) != how:
                raise MaskError(
                    f"rollout {index}: has the tokens of another rollout in the store, but prompt lengths and sampling "
                    f"parameters {how} instead of {drawn[key]}; clear the store, or keep a store for each"
                )
        self._drawn = drawn
        for sequence, key in enumerate(keys):
            self._places.setdefault(key, (len(self._batches), sequence))
        self._batches.append(batch)

    def clear(self) -> None:
        """Forget all rollouts."""
        self._batches.clear()
        self._places.clear()
        self._drawn.clear()

    def find(self, sequences: Sequence[NDArray[np.int64]]) -> list[FoundRows]:
        """The rows of these sequences, in one part for each `add` that they come from.

        sequences: token ids each. Raises MaskError naming those without a rollout.
        """
        starts = np.cumsum([0, *(tokens.size for tokens in sequences)])
        groups: dict[int, list[int]] = {}
        lost: list[int] = []
        for index, tokens in enumerate(sequences):
            place = self._places.get(_key(tokens))
            if place is None:
                lost.append(index)
            else:
                groups.setdefault(place[0], []).append(index)
        if lost and self._unrecorded is None:
            named = ", ".join(f"{index} ({sequences[index].size} tokens)" for index in lost[:4])
            raise MaskError(f"sequence {named}{' and others' if len(lost) > 4 else ''}: {_NO_ROLLOUT}")
        parts = []
        for number, indices in groups.items():
            chosen = [self._places[_key(sequences[index])][1] for index in indices]
            parts.append(_found(self._batches[number].select_sequences(chosen), starts[indices]))
        if lost:
            parts.append(_found(self._whole_vocabulary([sequences[index] for index in lost]), starts[lost]))
        return parts

    def _whole_vocabulary(self, sequences: Sequence[NDArray[np.int64]]) -> ReplayBatch:
        """Every token but the first of each sequence as drawn from all ids."""
        rollouts = [
            Rollout(
                prompt_token_ids=tokens[:1].astype(np.int32),
                token_ids=tokens[1:].astype(np.int32),
                sampling_params=dict(self._unrecorded or {}),
            )
            for tokens in sequences
        ]
        return ReplayBatch.pack(rollouts, vocab_size=self.vocab_size, missing_mask="full")


def _found(batch: ReplayBatch, starts: NDArray[np.int64]) -> FoundRows:
    """starts: where each sequence of the batch begins among the tokens that were asked for."""
    shifts = torch.from_numpy(starts).long() - batch.cu_seqlens[:-1].long()
    return FoundRows(batch, batch.logit_positions + batch.expand(shifts))


def _key(tokens: NDArray[np.int64]) -> bytes:
    return tokens.astype(np.int32).tobytes()


def _how_drawn(item: Any) -> tuple[Any, ...]:
    """What beside the tokens decides the rows: each turn's prompt length and parameters."""
    turns = item if isinstance(item, Sequence) else [item]
    return tuple((len(turn.prompt_token_ids), sorted(dict(turn.sampling_params).items())) for turn in turns)
