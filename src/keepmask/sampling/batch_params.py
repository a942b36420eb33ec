"""`BatchParams`: the parameters of a batch of rows as tensors, one entry a row."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

from keepmask.sampling.row import SamplingRow

__all__ = ["PROFILES", "BatchParams", "RowsCache"]

T = TypeVar("T")

PROFILES = ("vllm", "sglang", "hf")

OFF_K = 2**31 - 1  # top-k off: above every vocabulary size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParams:
    """[B] or [B, 1] tensors. Only `positions` changes while the rows stay the same."""

    temperature: Tensor
    """[B, 1] float32; 1 where greedy."""
    greedy: Tensor
    """[B] bool."""
    top_k: Tensor
    """[B, 1] int64; `OFF_K` where off."""
    top_p: Tensor
    """[B, 1] float64."""
    cuts_mass: Tensor
    """[B, 1] bool: top_p < 1."""
    log_min_p: Tensor
    """[B, 1] float64; -inf where off."""
    semantics: Tensor
    """[B] int64, index into `PROFILES`."""
    seeds: Tensor
    """[B, 1] int64, the seed's 64 bits."""
    completions: Tensor
    """[B, 1] int64."""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], device: torch.device) -> BatchParams:
        """The parameters of these rows."""
        params = [row.params for row in rows]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).view(-1, 1)

        return cls(
            temperature=column([1.0 if p.greedy else p.temperature for p in params], torch.float32),
            greedy=torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device),
            top_k=column([p.top_k if 0 < p.top_k < OFF_K else OFF_K for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            cuts_mass=column([p.top_p < 1 for p in params], torch.bool),
            log_min_p=column([math.log(p.min_p) if p.min_p else -math.inf for p in params], torch.float64),
            semantics=torch.tensor([PROFILES.index(row.semantics) for row in rows], dtype=torch.int64, device=device),
            seeds=column([_signed(row.seed) for row in rows], torch.int64),
            completions=column([row.completion_index for row in rows], torch.int64),
        )

    def take(self, rows: Tensor) -> BatchParams:
        """The parameters of some of the rows. rows: [M] int64."""
        return BatchParams(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


class RowsCache(Generic[T]):
    """What was built for the latest batch of rows, kept while the same rows come in the same order."""

    __slots__ = ("_build", "_device", "_known", "_rows")

    def __init__(self, build: Callable[[Sequence[SamplingRow], torch.device], T]) -> None:
        self._build = build
        self._rows: list[weakref.ref[SamplingRow]] = []
        self._device: torch.device | None = None
        self._known: T | None = None

    def get(self, rows: Sequence[SamplingRow], device: torch.device) -> T:
        """`build(rows, device)`."""
        if self._known is None or self._device != device or not self._same(rows):
            self._rows, self._device = [weakref.ref(row) for row in rows], device
            self._known = self._build(rows, device)
        return self._known

    def _same(self, rows: Sequence[SamplingRow]) -> bool:
        return len(rows) == len(self._rows) and all(ref() is row for ref, row in zip(self._rows, rows, strict=True))


def _signed(seed: int) -> int:
    """The seed modulo 2**64 in two's complement."""
    return (seed + 2**63) % 2**64 - 2**63
