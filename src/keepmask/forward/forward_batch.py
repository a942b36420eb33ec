"""`ForwardBatch`: one step's tokens as one flat row of tensors, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Chunk", "ChunkSpan", "ChunkT", "ForwardBatch", "Sequenced"]


class Sequenced(Protocol):
    """A sequence of tokens whose keys and values lie in blocks of the cache."""

    @property
    def blocks(self) -> list[int]:
        """Its blocks, in order of position."""

    @property
    def num_computed(self) -> int:
        """How many of its tokens have keys and values in the blocks."""

    def tokens(self, start: int, stop: int) -> list[int]:
        """Its tokens at positions [start, stop)."""


class Chunk(Protocol):
    """The next `num_tokens` tokens to compute of a sequence."""

    @property
    def completion(self) -> Sequenced:
        """The sequence."""

    @property
    def num_tokens(self) -> int:
        """At least 1."""

    @property
    def draft(self) -> Sequence[int]:
        """Tokens that may follow, computed along; a token is drawn after each of them too."""

    @property
    def num_rows(self) -> int:
        """Tokens to compute, those of the draft among them."""

    @property
    def draws(self) -> bool:
        """Whether the next token is drawn from the logits of the last one."""


ChunkT = TypeVar("ChunkT", bound=Chunk)
"""What a batch is made of."""


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A long chunk: rows [start, stop) of the flat batch, the last `stop - start` of its context."""

    chunk: int
    start: int
    stop: int
    context_len: int
    """Tokens whose keys and values the chunk's last token sees, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(Generic[ChunkT]):
    """T tokens of S chunks, on the model's device: those first whose tokens attend one by one, then whole long chunks.

    Keys and values of token t go to slot `slot_offsets[t]` of block `slot_blocks[t]`.
    """

    chunks: list[ChunkT]
    """The S chunks, in the order of the rows below."""
    input_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slot_blocks: Tensor
    """[T] int64"""
    slot_offsets: Tensor
    """[T] int64"""
    block_tables: Tensor
    """[S, max blocks] int32, padded with 0: the blocks of each chunk's sequence"""
    token_chunks: Tensor
    """[T] int32"""
    context_lens: Tensor
    """[T] int32: tokens that the token sees, itself included"""
    num_paged: int
    """Tokens that attend one by one, straight to the blocks of the cache."""
    spans: list[ChunkSpan]
    """The other chunks, which follow."""
    draw_rows: Tensor
    """[B] int64: the flat rows whose logits are drawn from, round by round."""
    rounds: list[list[int]]
    """The chunks of the draw rows: of each chunk's first draw, then of those that a token of its draft may precede."""

    @classmethod
    def build(
        cls, chunks: Sequence[ChunkT], *, block_size: int, device: torch.device, pages_chunks: bool = False
    ) -> ForwardBatch[ChunkT]:
        """Lay the chunks out.

        pages_chunks: whether tokens of chunks of several attend one by one too, as single ones always do.
        """

        def is_span(chunk: ChunkT) -> bool:
            return chunk.num_rows > 1 and not pages_chunks

        ordered = sorted(chunks, key=is_span)
        counts = np.array([chunk.num_rows for chunk in ordered], np.int64)
        starts = np.array([chunk.completion.num_computed for chunk in ordered], np.int64)
        ends = np.cumsum(counts)
        begins = ends - counts
        num_paged_chunks = sum(not is_span(chunk) for chunk in ordered)

        input_ids = [
            token_id
            for chunk in ordered
            for token_id in [
                *chunk.completion.tokens(
                    chunk.completion.num_computed, chunk.completion.num_computed + chunk.num_tokens
                ),
                *chunk.draft,
            ]
        ]
        positions = np.arange(ends[-1]) + np.repeat(starts - begins, counts)  # [T]
        tables = np.zeros((len(ordered), max(len(chunk.completion.blocks) for chunk in ordered)), np.int32)
        for row, chunk in zip(tables, ordered, strict=True):
            row[: len(chunk.completion.blocks)] = chunk.completion.blocks
        token_chunks = np.repeat(np.arange(len(ordered)), counts)
        slot_blocks = tables[token_chunks, positions // block_size]
        rounds, draw_rows = _draws(ordered, ends)
        spans = [
            ChunkSpan(at, int(begins[at]), int(ends[at]), int(starts[at] + counts[at]))
            for at in range(num_paged_chunks, len(ordered))
        ]

        def put(values: object, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device, non_blocking=True)

        return cls(
            chunks=ordered,
            input_ids=put(input_ids, torch.int64),
            positions=put(positions, torch.int64),
            slot_blocks=put(slot_blocks, torch.int64),
            slot_offsets=put(positions % block_size, torch.int64),
            block_tables=put(tables, torch.int32),
            token_chunks=put(token_chunks, torch.int32),
            context_lens=put(positions + 1, torch.int32),
            num_paged=int(ends[num_paged_chunks - 1]) if num_paged_chunks else 0,
            spans=spans,
            draw_rows=put(draw_rows, torch.int64),
            rounds=rounds,
        )


def _draws(chunks: Sequence[Chunk], ends: NDArray[np.int64]) -> tuple[list[list[int]], list[int]]:
    """The chunks that draw in each round, and their rows. ends: of the chunks' rows."""
    most = max((len(chunk.draft) for chunk in chunks if chunk.draws), default=-1)
    rounds = [
        [at for at, chunk in enumerate(chunks) if chunk.draws and len(chunk.draft) >= number]
        for number in range(most + 1)
    ]
    rows = [int(ends[at]) - 1 - len(chunks[at].draft) + number for number, some in enumerate(rounds) for at in some]
    return rounds, rows
