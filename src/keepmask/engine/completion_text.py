"""`CompletionText`: the text of one completion as its tokens come, and the stop string it may run into."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

__all__ = ["CompletionText", "TextOffsets"]

_INCOMPLETE = "\ufffd"  # what decoding makes of bytes that are no whole character, or not yet


class CompletionText:
    """Text that grows by whole characters as tokens are pushed.

    What `released` has once returned never changes. The text of all tokens is what the tokenizer makes of them
    together; where a tokenizer rewrites earlier text in the light of later tokens, the earlier text stands.

    tokenizer: the backend, which decodes. byte_ids: those of `byte_values`. stop: strings that end the text; one counts
    only if its last character comes with a token after the first `min_tokens`.
    """

    __slots__ = (
        "_backend",
        "_byte_ids",
        "_ended",
        "_given",
        "_held_back",
        "_ids",
        "_in_bytes",
        "_include_stop",
        "_min_tokens",
        "_next_start",
        "_skip_special_tokens",
        "_start",
        "_stop",
        "cut",
        "text",
    )

    def __init__(
        self,
        tokenizer: Any,
        *,
        byte_ids: Container[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._backend = tokenizer
        self._byte_ids = byte_ids
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # All but the last character of a stop string may be out before it is known to be one.
        self._held_back = 0 if include_stop else max((len(each) for each in stop), default=1) - 1
        self._ids: list[int] = []
        self._in_bytes = False
        self._ended = False
        # Text is decoded in a window of the latest tokens. It begins with tokens whose text `_given` is out already:
        # how a token reads depends on the one before it.
        self._start = 0
        self._next_start = 0
        self._given = ""
        self.text = ""
        self.cut = False
        """Whether a stop string ended it."""

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return len(self._ids)

    def push(self, token_ids: Iterable[int]) -> str | None:
        """Append tokens; returns the stop string that now ends the text, which is cut there, or None."""
        for token_id in token_ids:
            assert not self._ended
            piece = self._decoded(token_id)
            searched = len(self.text)
            self.text += piece
            if piece and len(self._ids) > self._min_tokens and (found := self._cut(searched)) is not None:
                return found
        return None

    def end(self, token_ids: Iterable[int] = ()) -> None:
        """Append the last tokens, which bring no stop string. What was held back belongs to the text now."""
        if self._ended:
            return
        self._ended = True
        self._ids.extend(token_ids)
        whole = self._decode(self._ids)
        if whole.startswith(self.text):
            self.text = whole
        else:
            self.text += self._decode(self._ids[self._start :])[len(self._given) :]

    def released(self) -> str:
        """The part of the text that no later token can change."""
        if self._ended or not self._held_back:
            return self.text
        return self.text[: max(0, len(self.text) - self._held_back)]

    def _decoded(self, token_id: int) -> str:
        """Append a token; returns the text that is certain now and was not before."""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            self._in_bytes = True
            return ""
        if self._in_bytes and not self._decode([token_id]):
            return ""  # a special token that is left out does not part the bytes around it
        self._in_bytes = False
        window = self._decode(self._ids[self._start :])
        piece = window[len(self._given) :]
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._start, self._next_start = self._next_start, len(self._ids)
        self._given = self._decode(self._ids[self._start :])
        return piece

    def _cut(self, searched: int) -> str | None:
        """Cut the text at the stop string that ends first, of those that end after the first `searched` characters."""
        hits = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := self.text.find(stop, max(0, searched + 1 - len(stop)))) >= 0
        ]
        if not hits:
            return None
        end, at, stop = min(hits)
        self.text = self.text[: end if self._include_stop else at]
        self._ended = self.cut = True
        return stop

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


class TextOffsets:
    """Where the text of each token begins in the text of a completion, counted in characters.

    A token without a text of its own, a special one that is left out or the beginning of a character, begins where the
    next text will.
    """

    def __init__(self, text: CompletionText) -> None:
        self._text = text

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(len(self._text.text))
            self._text.push([token_id])
        return offsets
