"""`ForwardBatch`: one step's tokens as one flat row of tensors, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keepmask.engine.scheduler import ScheduledChunk

__all__ = ["ChunkSpan", "ForwardBatch"]


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A chunk of several tokens: rows [start, stop) of the flat batch, the last `stop - start` of its context."""

    start: int
    stop: int
    context_len: int
    """Tokens whose keys and values the chunk's last token sees, itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S chunks, those of a single token first, on the model's device.

    Keys and values of token t go to slot `slot_offsets[t]` of block `slot_blocks[t]`.
    """

    chunks: list[ScheduledChunk]
    """The S chunks, in the order of the rows below."""
    input_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slot_blocks: Tensor
    """[T] int64"""
    slot_offsets: Tensor
    """[T] int64"""
    num_single: int
    """The first rows: chunks of one token, most of them decoding."""
    block_tables: Tensor
    """[S, max blocks] int32, padded with 0"""
    context_lens: Tensor
    """[S] int32: tokens that the chunk's last token sees"""
    spans: list[ChunkSpan]
    """Chunks of several tokens, which follow the single ones: span i is row num_single + i of block_tables."""
    draw_rows: Tensor
    """[B] int64: the flat rows whose logits are drawn from."""
    drawing: list[int]
    """[B] the chunk of each draw row."""

    @classmethod
    def build(cls, chunks: Sequence[ScheduledChunk], *, block_size: int, device: torch.device) -> ForwardBatch:
        """Lay the chunks out."""
        ordered = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
        counts = np.array([chunk.num_tokens for chunk in ordered], np.int64)
        starts = np.array([chunk.completion.num_computed for chunk in ordered], np.int64)
        ends = np.cumsum(counts)
        begins = ends - counts
        num_single = int((counts == 1).sum())

        input_ids = [
            token_id
            for chunk in ordered
            for token_id in chunk.completion.tokens(
                chunk.completion.num_computed, chunk.completion.num_computed + chunk.num_tokens
            )
        ]
        positions = np.arange(ends[-1]) + np.repeat(starts - begins, counts)  # [T]
        tables = np.zeros((len(ordered), max(len(chunk.completion.blocks) for chunk in ordered)), np.int32)
        for row, chunk in zip(tables, ordered, strict=True):
            row[: len(chunk.completion.blocks)] = chunk.completion.blocks
        slot_blocks = tables[np.repeat(np.arange(len(ordered)), counts), positions // block_size]
        drawing = [at for at, chunk in enumerate(ordered) if chunk.draws]
        spans = [
            ChunkSpan(int(begins[at]), int(ends[at]), int(starts[at] + counts[at]))
            for at in range(num_single, len(ordered))
        ]

        def put(values: object, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device, non_blocking=True)

        return cls(
            chunks=ordered,
            input_ids=put(input_ids, torch.int64),
            positions=put(positions, torch.int64),
            slot_blocks=put(slot_blocks, torch.int64),
            slot_offsets=put(positions % block_size, torch.int64),
            num_single=num_single,
            block_tables=put(tables, torch.int32),
            context_lens=put(starts + counts, torch.int32),
            spans=spans,
            draw_rows=put(ends[drawing] - 1, torch.int64),
            drawing=drawing,
        )
