"""`Thinking`: where a completion stands between its thinking start and end tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Thinking"]


class Thinking:
    """Counts the tokens of a thinking span and says which token to force once the budget is spent.

    A span opens when the start tokens have appeared, in the prompt or the output, and closes with the end tokens.
    Every token between them counts. When `budget` of them are out, the end tokens are forced one by one, from the
    first. A later span has the whole budget again.
    """

    __slots__ = ("_budget", "_count", "_end", "_forcing", "_inside", "_start", "_tail")

    def __init__(self, budget: int, start: Sequence[int], end: Sequence[int], tokens: Sequence[int]) -> None:
        self._budget = budget
        self._start = tuple(start)
        self._end = tuple(end)
        self._inside = False
        self._count = 0
        self._forcing = 0  # end tokens forced so far
        self._tail: tuple[int, ...] = ()
        for token_id in tokens:
            self._observe(token_id)

    @property
    def forced_token_id(self) -> int | None:
        """The only token the next position may take, or None."""
        if self._inside and self._count >= self._budget:
            return self._end[self._forcing]
        return None

    def append(self, token_id: int) -> None:
        """Account for one more output token."""
        if self.forced_token_id is None:
            self._observe(token_id)
            return
        self._forcing += 1
        if self._forcing == len(self._end):
            self._inside, self._forcing, self._tail = False, 0, ()

    def _observe(self, token_id: int) -> None:
        pattern = self._end if self._inside else self._start
        self._tail = (*self._tail, token_id)[-len(pattern) :]
        if self._inside:
            self._count += 1
        if self._tail == pattern:
            self._inside, self._count, self._tail = not self._inside, 0, ()
