"""How many tokens to guess: as many as are likely to be worth the rows of the forward that they take.

A step over R rows takes `StepCost(R)` seconds. Without drafts it yields a token a completion; a draft's token j is kept
with the chance that tokens 1 to j all are, so drafts are worth their rows as long as tokens a second grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Acceptance", "StepCost", "draft_lengths", "worthwhile"]

_KEPT = 0.95  # of what is known about a completion, after a step: texts change
_KEPT_OF_ALL = 0.995
_PRIOR = 0.6
_PRIOR_WEIGHT = 2.0


class StepCost:
    """Seconds of a step by its rows, between the measured ones by straight lines, beyond the last by its slope."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert len(seconds) >= 2
        self._rows = np.array(sorted(seconds), float)
        # More rows never take less time: a dip is noise.
        self._seconds = np.maximum.accumulate([seconds[int(rows)] for rows in self._rows])

    def __call__(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a step over `rows` rows; of each, where there are several."""
        wanted = np.asarray(rows, float)
        beyond = np.maximum(wanted - self._rows[-1], 0.0)
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        found: NDArray[np.float64] = np.interp(wanted, self._rows, self._seconds) + slope * beyond
        return found


class Acceptance:
    """The share of a drafter's tokens that were drawn, of one completion or, as `parent`, of all of them.

    What is known fades from step to step, towards what holds for all completions, and there towards a hopeful guess:
    a drafter that failed is tried again in a while.
    """

    __slots__ = ("_hits", "_kept", "_parent", "_tries")

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._kept = _KEPT_OF_ALL if parent is None else _KEPT
        self._hits = self._tries = 0.0

    @property
    def rate(self) -> float:
        """The chance that the next guessed token is the drawn one."""
        prior = _PRIOR if self._parent is None else self._parent.rate
        return (self._hits + _PRIOR_WEIGHT * prior) / (self._tries + _PRIOR_WEIGHT)

    def record(self, num_tried: int, num_drawn: int) -> None:
        """Of a draft, `num_drawn` leading tokens were drawn; of the others only the first was put to the test."""
        tries = min(num_drawn + 1, num_tried)
        self._hits = self._hits * self._kept + num_drawn
        self._tries = self._tries * self._kept + tries
        if self._parent is not None:
            self._parent.record(num_tried, num_drawn)

    def fade(self) -> None:
        """A step went by without a draft."""
        self._hits *= self._kept
        self._tries *= self._kept


def draft_lengths(
    rates: Sequence[float],
    most: Sequence[int],
    num_rows: int,
    cost: StepCost,
    *,
    per_guess_s: float = 0.0,
    per_round_s: float = 0.0,
) -> list[int]:
    """How many of each completion's proposed tokens to verify, so that a step's tokens a second are the most.

    rates: the chance of one proposed token, by completion. most: tokens proposed. num_rows: rows of the step without
    drafts, of which len(rates) draw. per_guess_s: seconds that a guess takes beside its row. per_round_s: that each
    further token of the longest draft takes, since tokens are drawn one after the other.
    """
    owners = np.repeat(np.arange(len(most)), most)
    if not owners.size:
        return [0] * len(most)
    lengths = np.concatenate([np.arange(1, count + 1) for count in most])
    chances = np.asarray(rates, float)[owners] ** lengths
    order = np.argsort(-chances, kind="stable")  # a completion's tokens stay in their order
    counts = np.arange(1, order.size + 1)
    tokens = len(rates) + np.cumsum(chances[order])
    deepest = np.maximum.accumulate(lengths[order])
    speeds = tokens / (cost(num_rows + counts) + counts * per_guess_s + deepest * per_round_s)
    best = int(speeds.argmax())
    kept = best + 1 if speeds[best] > len(rates) / cost(num_rows) else 0
    found: list[int] = np.bincount(owners[order[:kept]], minlength=len(most)).tolist()
    return found


def worthwhile(rate: float, floor: float, most: int) -> int:
    """The longest draft, of at most `most` tokens, whose last token has a chance of more than `floor`."""
    if floor >= 1 or rate <= floor:
        return 0
    if rate >= 1 or floor <= 0:
        return most
    return min(most, int(np.log(floor) / np.log(rate)))
