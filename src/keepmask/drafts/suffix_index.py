"""`SuffixIndex`: sequences of tokens, and where the end of one of them stood before."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Place", "SuffixIndex"]

Place = tuple[int, int]
"""A sequence's number, and a position in it."""

_MAX_PLACES = 16  # the latest of an n-gram's places; a common one has too many to compare


class SuffixIndex:
    """Growing sequences, found by the n-grams of `shortest` tokens in them.

    shortest, longest: how many tokens before a place must, and may, agree with the end that is looked up.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self.shortest = shortest
        self.longest = longest
        self._sequences: list[list[int]] = []
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def __getitem__(self, number: int) -> list[int]:
        return self._sequences[number]

    def add(self, token_ids: Sequence[int]) -> int:
        """A new sequence; returns its number."""
        number = len(self._sequences)
        self._sequences.append([])
        for token_id in token_ids:
            self.append(number, token_id)
        return number

    def append(self, number: int, token_id: int) -> None:
        """The sequence's next token."""
        sequence = self._sequences[number]
        if len(sequence) >= self.shortest:  # what stands before the token is now followed by something
            places = self._places.setdefault(tuple(sequence[-self.shortest :]), [])
            places.append((number, len(sequence)))
            if len(places) > _MAX_PLACES:
                del places[0]
        sequence.append(token_id)

    def find(self, number: int) -> Place | None:
        """The latest place of those before which most tokens, up to `longest`, are those that end this sequence."""
        end = self._sequences[number]
        if len(end) < self.shortest:
            return None
        best, most = None, 0
        for place in reversed(self._places.get(tuple(end[-self.shortest :]), ())):
            size = self._agreeing(end, place)
            if size > most:
                best, most = place, size
        return best

    def _agreeing(self, end: list[int], place: Place) -> int:
        sequence, stop = self._sequences[place[0]], place[1]
        size, most = self.shortest, min(self.longest, len(end), stop)
        while size < most and end[-size - 1] == sequence[stop - size - 1]:
            size += 1
        return size
