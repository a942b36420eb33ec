"""`Metrics`: the numbers and arrays a report shows, over all rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepmask.outputs import Rollout
from keepmask.replay.mismatch import Mismatch, measure_mismatch

__all__ = ["Metrics", "SequenceRatio", "TokenPlace", "measure"]

_MAX_POSITIONS = 160  # points of a curve
_MAX_LOG = 700.0  # exp of more overflows
_MIN_SEQUENCES = 5  # completions that must reach a position for quantiles there to mean something

Floats = NDArray[np.float64]


class TokenPlace(NamedTuple):
    """One generated token, and how far its scores are from the engine's."""

    rollout: int
    """Index of its rollout among all."""
    position: int
    support_size: int | None
    """Ids in its row; None where that is unknown or the whole vocabulary."""
    log_ratio_full: float | None
    """policy_full_logprob - rollout_logprob, nats; None where not scored."""
    log_ratio_replayed: float | None


class SequenceRatio(NamedTuple):
    """Quantiles, over the completions that reach a position, of the ratio of everything up to it."""

    positions: NDArray[np.int64]
    """[P], number of tokens multiplied."""
    low: Floats
    """[P], 10th percentile of exp(sum of log-ratios)."""
    median: Floats
    high: Floats
    """[P], 90th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What a report says about all of its rollouts together. T tokens, of which S have a row of known support."""

    num_rollouts: int
    num_prompts: int
    num_tokens: int
    support_sizes: NDArray[np.int64]
    """[S], ids in each row; 0 for the whole vocabulary."""
    places: NDArray[np.int64]
    """[S, 2], the index of the rollout and the position of each of these rows."""
    scored: tuple[int, ...]
    """Indices of the rollouts that carry the engine's and a policy's log-probabilities."""
    mismatch: Mismatch | None
    """Over the scored rollouts; None where there are none."""
    table: Mapping[str, float]
    """Numbers by name, as `Mismatch.table` has them."""
    sequence_full: SequenceRatio | None
    sequence_replayed: SequenceRatio | None

    def worst_full(self, num_tokens: int) -> list[TokenPlace]:
        """The tokens with the largest |log-ratio| over the whole vocabulary."""
        return [] if self.mismatch is None else self._worst(self.mismatch.log_ratio_full, num_tokens)

    def worst_replayed(self, num_tokens: int) -> list[TokenPlace]:
        """The tokens with the largest |log-ratio| left after replay."""
        return [] if self.mismatch is None else self._worst(self.mismatch.log_ratio_replayed, num_tokens)

    def widest(self, num_tokens: int) -> list[TokenPlace]:
        """The tokens with the most ids in their rows."""
        order = np.argsort(-self.support_sizes, kind="stable")[:num_tokens].tolist()
        sizes, places = self.support_sizes.tolist(), self.places.tolist()
        return [TokenPlace(places[t][0], places[t][1], sizes[t] or None, None, None) for t in order]

    def _worst(self, log_ratio: Floats | None, num_tokens: int) -> list[TokenPlace]:
        if log_ratio is None:
            return []
        order = np.argsort(-np.abs(log_ratio), kind="stable")[:num_tokens]
        return [self._place(t) for t in order.tolist()]

    def _place(self, t: int) -> TokenPlace:
        mismatch = self.mismatch
        assert mismatch is not None
        size = -1 if mismatch.support_sizes is None else int(mismatch.support_sizes[t])
        full = mismatch.log_ratio_full
        return TokenPlace(
            rollout=self.scored[int(mismatch.rollout[t])],
            position=int(mismatch.position[t]),
            support_size=size if size > 0 else None,
            log_ratio_full=None if full is None else float(full[t]),
            log_ratio_replayed=float(mismatch.log_ratio_replayed[t]),
        )


def measure(rollouts: Sequence[Rollout], *, table: Mapping[str, float] | None = None) -> Metrics:
    """The metrics of these rollouts. table: numbers by name; measured here by default, as far as rollouts are scored.

    Raises MaskError when a scored rollout's log-probabilities are not finite or not one a token.
    """
    scored = tuple(
        index
        for index, rollout in enumerate(rollouts)
        if rollout.logprobs is not None and rollout.policy_logprobs is not None
    )
    mismatch = measure_mismatch([rollouts[index] for index in scored]) if scored else None
    counts = [
        np.zeros(0, np.int64) if rollout.sampling_mask is None else rollout.sampling_mask.counts for rollout in rollouts
    ]
    sizes = np.concatenate([np.zeros(0, np.int64), *counts])
    rows = np.repeat(np.arange(len(counts)), [count.size for count in counts])
    positions = np.concatenate([np.zeros(0, np.int64), *(np.arange(count.size) for count in counts)])
    if table is None:
        table = _size_numbers(sizes) if mismatch is None else mismatch.table()
    return Metrics(
        num_rollouts=len(rollouts),
        num_prompts=len({rollout.request_id or rollout.prompt_token_ids.tobytes() for rollout in rollouts}),
        num_tokens=sum(rollout.token_ids.size for rollout in rollouts),
        support_sizes=sizes,
        places=np.stack([rows, positions], axis=1),
        scored=scored,
        mismatch=mismatch,
        table=table,
        sequence_full=None if mismatch is None else _sequence_ratio(mismatch, mismatch.log_ratio_full),
        sequence_replayed=None if mismatch is None else _sequence_ratio(mismatch, mismatch.log_ratio_replayed),
    )


def _size_numbers(sizes: NDArray[np.int64]) -> dict[str, float]:
    known = sizes[sizes > 0]
    if not known.size:
        return {}
    return {
        "support_size_mean": float(known.mean()),
        "support_size_median": float(np.median(known)),
        "support_size_p99": float(np.percentile(known, 99)),
        "support_singleton_share": float((known == 1).mean()),
    }


def _sequence_ratio(mismatch: Mismatch, log_ratio: Floats | None) -> SequenceRatio | None:
    if log_ratio is None or not log_ratio.size:
        return None
    starts = np.flatnonzero(np.diff(mismatch.rollout, prepend=-1))
    lengths = np.diff(starts, append=log_ratio.size)
    # Cumulative over each completion: subtract what had accumulated before its first token.
    total = np.concatenate([[0.0], np.cumsum(log_ratio)])
    longest = int(np.sort(lengths)[-min(_MIN_SEQUENCES, lengths.size)])
    positions = np.unique(np.linspace(1, longest, _MAX_POSITIONS).astype(np.int64))
    quantiles = np.array(
        [
            np.percentile(total[starts[lengths >= n] + n] - total[starts[lengths >= n]], [10, 50, 90])
            for n in positions.tolist()
        ]
    )
    low, median, high = np.exp(np.clip(quantiles, -_MAX_LOG, _MAX_LOG)).T
    return SequenceRatio(positions, low, median, high)
