"""JSON with masks in it, written a block of rows at a time: a wide mask never exists as Python's lists as a whole."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import pydantic_core

from keepmask.mask import SamplingMask
from keepmask.wire.nested import logprob_lists

__all__ = ["MaskRows", "json_pieces"]

_BLOCK_IDS = 8192  # which take about half a millisecond to write
_BLOCK_ROWS = 1024


class MaskRows:
    """Stands in a document for the rows of a mask as nested lists, of ids or of their log-probabilities.

    whole_row: what a row that is the whole vocabulary is written as.
    """

    def __init__(self, mask: SamplingMask, *, of_logprobs: bool = False, whole_row: bytes = b"[]") -> None:
        self.mask, self.of_logprobs, self.whole_row = mask, of_logprobs, whole_row

    def pieces(self) -> Iterator[bytes]:
        """The JSON text."""
        offsets, at, mark = self.mask.offsets, 0, b"["
        while at < len(self.mask):
            end = int(np.searchsorted(offsets, offsets[at] + _BLOCK_IDS, side="right")) - 1
            end = min(max(end, at + 1), at + _BLOCK_ROWS, len(self.mask))
            block = self.mask[at:end]
            rows = logprob_lists(block) if self.of_logprobs else block.token_ids
            if self.whole_row == b"[]" or block.counts.all():
                yield mark + pydantic_core.to_json(rows)[1:-1]
            else:
                texts = (pydantic_core.to_json(row) if row else self.whole_row for row in rows or ())
                for text in texts:
                    yield mark + text
                    mark = b","
            at, mark = end, b","
        yield b"]" if len(self.mask) else b"[]"


def json_pieces(data: Any) -> Iterator[bytes]:
    """The JSON text of a document that may hold `MaskRows`."""
    place = secrets.token_hex(16)  # which no text in the document can hold but by guessing
    found: list[MaskRows] = []

    def note(value: object) -> str:
        assert isinstance(value, MaskRows), type(value)
        found.append(value)
        return place

    text = pydantic_core.to_json(data, fallback=note)
    if not found:
        yield text
        return
    for part, rows in zip_longest(text.split(b'"' + place.encode() + b'"'), found):
        yield part
        if rows is not None:
            yield from rows.pieces()
