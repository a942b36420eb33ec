"""`Thinking`: where a completion stands between its thinking start and end tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Thinking"]


class Thinking:
    """Counts the tokens of a thinking span and says which token to force once the budget is spent.

    A span opens when the start tokens have appeared, in the prompt or the output, and closes with the end tokens.
    Every token between them counts. When `budget` of them are out, the end tokens are forced one by one, going on from
    as many of them as the span ends with. A later span has the whole budget again.
    """

    __slots__ = ("_budget", "_count", "_end", "_inside", "_start", "_tail")

    def __init__(self, budget: int, start: Sequence[int], end: Sequence[int], tokens: Sequence[int]) -> None:
        self._budget = budget
        self._start = tuple(start)
        self._end = tuple(end)
        self._inside = False
        self._count = 0
        self._tail: tuple[int, ...] = ()  # as much of the open span, or of the text after the last, as can match
        for token_id in tokens:
            self.append(token_id)

    @property
    def forced_token_id(self) -> int | None:
        """The only token the next position may take, or None."""
        if not self._inside or self._count < self._budget:
            return None
        return self._end[max(n for n in range(len(self._end)) if self._ends_with(self._end[:n]))]

    def append(self, token_id: int) -> None:
        """Account for one more token."""
        pattern = self._end if self._inside else self._start
        self._tail = (*self._tail, token_id)[-len(pattern) :]
        self._count += self._inside
        if self._tail == pattern:
            self._inside, self._count, self._tail = not self._inside, 0, ()

    def _ends_with(self, token_ids: tuple[int, ...]) -> bool:
        n = len(token_ids)
        return n <= len(self._tail) and self._tail[len(self._tail) - n :] == token_ids
