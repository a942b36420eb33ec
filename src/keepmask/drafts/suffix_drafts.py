"""`SuffixDrafter`: guesses by what followed the same tokens before: in a completion, in its siblings, or in the past.

One index of suffixes serves three methods, which differ in what is in it:

ngram     the prompt and the completion itself
siblings  the prompt and all completions of it, of one request or several
history   the same, and what was rolled out for the same prompt earlier
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from keepmask.drafts.history_store import HistoryStore
from keepmask.drafts.suffix_index import Place, SuffixIndex
from keepmask.params import SamplingParams

__all__ = ["DraftRow", "Drafter", "SuffixDrafter", "SuffixMethod", "SuffixRow"]

SuffixMethod = Literal["ngram", "siblings", "history"]

Name = tuple[int, int]
"""Seed and completion index: all that a completion's draws depend on besides logits and parameters."""


class DraftRow(Protocol):
    """One completion in flight, as a drafter sees it."""

    def append(self, token_id: int) -> None:
        """Account for a token that was drawn."""

    def close(self) -> None:
        """The completion has ended."""


Row = TypeVar("Row", bound=DraftRow)


class Drafter(Protocol[Row]):
    """Opens a row for every completion, and guesses what comes next in several at a time."""

    step_s: float
    """Seconds that one more guess in each row takes; 0 where it takes next to nothing."""

    def expect(self, prompt_token_ids: Sequence[int]) -> None:
        """A request with this prompt is queued."""

    def release(self, prompt_token_ids: Sequence[int]) -> None:
        """A request with this prompt has ended; one call for one of `expect`."""

    def open(self, prompt_token_ids: Sequence[int], *, params: SamplingParams, seed: int, completion_index: int) -> Row:
        """The row of a completion without tokens so far."""

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """At most `most` guesses at the next tokens of each row; none where there is nothing to go by."""


class SuffixDrafter:
    """A `Drafter` by n-grams.

    shortest, longest: how many of the latest tokens must, and may, agree with a place of the index; a place where more
    agree is preferred, then a later one. history: for the method of that name; completions that end are put into it.
    """

    step_s = 0.0

    def __init__(
        self, method: SuffixMethod, *, shortest: int = 2, longest: int = 8, history: HistoryStore | None = None
    ) -> None:
        assert (history is not None) == (method == "history")
        self.method = method
        self._shortest, self._longest = shortest, longest
        self._history = history
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._expected: Counter[tuple[int, ...]] = Counter()

    def expect(self, prompt_token_ids: Sequence[int]) -> None:
        """A request with this prompt is queued."""
        if self.method != "ngram":
            self._expected[tuple(prompt_token_ids)] += 1

    def release(self, prompt_token_ids: Sequence[int]) -> None:
        """A request with this prompt has ended; the last one takes the index of its completions along."""
        if self.method == "ngram":
            return
        key = tuple(prompt_token_ids)
        self._expected[key] -= 1
        if not self._expected[key]:
            del self._expected[key]
            self._groups.pop(key, None)

    def open(
        self, prompt_token_ids: Sequence[int], *, params: SamplingParams, seed: int, completion_index: int
    ) -> SuffixRow:
        """The row of a completion without tokens so far. params: say nothing of what follows."""
        name, history = (seed, completion_index), self._history
        if self.method == "ngram":
            return SuffixRow(self._group(prompt_token_ids), name, lambda _: None)
        key = tuple(prompt_token_ids)
        assert key in self._expected
        group = self._groups.get(key) or self._groups.setdefault(key, self._group(prompt_token_ids))

        def end(token_ids: list[int]) -> None:
            if history is not None:
                history.put(prompt_token_ids, name, token_ids)

        return SuffixRow(group, name, end)

    def propose(self, rows: Sequence[SuffixRow], most: Sequence[int]) -> list[list[int]]:
        """What followed in the place that each row follows."""
        return [row.propose(count) if count else [] for row, count in zip(rows, most, strict=True)]

    def _group(self, prompt_token_ids: Sequence[int]) -> _Group:
        index = SuffixIndex(shortest=self._shortest, longest=self._longest)
        past = self._history.get(prompt_token_ids) if self._history is not None else {}
        return _Group(index, prompt_token_ids, past)


class _Group:
    """The index that completions of one prompt share. Each of its sequences begins with the end of the prompt."""

    def __init__(
        self, index: SuffixIndex, prompt_token_ids: Sequence[int], past: Mapping[Name, NDArray[np.int32]]
    ) -> None:
        self.index = index
        self._lead = list(prompt_token_ids[-index.longest :])
        index.add(prompt_token_ids)
        self._past = {name: self.add(token_ids.tolist()) for name, token_ids in past.items()}

    def add(self, token_ids: Sequence[int] = ()) -> int:
        """A new completion of the prompt."""
        return self.index.add([*self._lead, *token_ids])

    def begin(self, name: Name) -> Place | None:
        """Where the completion that was once drawn with this seed and index begins."""
        return (self._past[name], len(self._lead)) if name in self._past else None

    def output(self, number: int) -> list[int]:
        """The tokens of a completion."""
        return self.index[number][len(self._lead) :]


class SuffixRow:
    """Follows a place of the index as long as its tokens are the drawn ones, then looks for another."""

    __slots__ = ("_end", "_group", "_index", "_number", "_place")

    def __init__(self, group: _Group, name: Name, end: Callable[[list[int]], None]) -> None:
        self._group, self._index, self._end = group, group.index, end
        self._place = group.begin(name)
        self._number = group.add()

    def append(self, token_id: int) -> None:
        """Account for a token that was drawn."""
        if self._place is not None:
            number, at = self._place
            followed = self._index[number][at : at + 1] == [token_id]
            self._place = (number, at + 1) if followed else None
        self._index.append(self._number, token_id)

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that followed in its place."""
        if self._place is None or self._place[1] >= len(self._index[self._place[0]]):
            self._place = self._index.find(self._number)
            if self._place is None:
                return []
        number, at = self._place
        draft = self._index[number][at : at + most]
        if number == self._number:  # the completion repeats itself: so may what is guessed
            period = len(self._index[number]) - at
            while len(draft) < most:
                draft.append(draft[len(draft) - period])
        return draft

    def close(self) -> None:
        """The completion has ended."""
        self._end(self._group.output(self._number))
