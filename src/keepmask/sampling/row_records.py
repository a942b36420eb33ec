"""`RowRecords`: the parameters of a batch as one array of records, which the compiled kernels of every device read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import get_args

import numpy as np

from keepmask.params import SamplingSemantics
from keepmask.sampling.processors import may_change_logits
from keepmask.sampling.records import HF, OFF_K, RECORD, VLLM_TORCH, Records
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

__all__ = ["PROFILES", "RowRecords"]

PROFILES: tuple[SamplingSemantics, ...] = get_args(SamplingSemantics)
"""By number, as in `records`."""
assert PROFILES == ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf")


class RowRecords:
    """The records of the latest batch of rows, kept while the same rows come in the same order."""

    __slots__ = ("_known", "_rows", "_spec", "changing")

    def __init__(self, spec: SamplerSpec) -> None:
        self._spec = spec
        self._rows: list[weakref.ref[SamplingRow]] = []
        self._known: Records = np.zeros(0, RECORD)
        self.changing: tuple[int, ...] = ()
        """Rows of the latest batch that some step before the filters may change at some position."""

    def of(self, rows: Sequence[SamplingRow]) -> Records:
        """[B] records; row b reads row b of the logits. They stand until the next call."""
        same = len(rows) == len(self._rows) and all(ref() is row for ref, row in zip(self._rows, rows, strict=True))
        if not same:
            self._rows = [weakref.ref(row) for row in rows]
            self._known = _records(rows, self._spec)
            self.changing = tuple(b for b, row in enumerate(rows) if may_change_logits(row, self._spec))
        self._known["position"] = np.fromiter((row.num_output_tokens for row in rows), np.int64, len(rows))
        return self._known


def _records(rows: Sequence[SamplingRow], spec: SamplerSpec) -> Records:
    """[B] records at position 0."""
    table = np.zeros(len(rows), RECORD)
    params = [row.params for row in rows]
    table["source"] = np.arange(len(rows))
    table["greedy"] = [p.greedy for p in params]
    table["top_k"] = [p.top_k if 0 < p.top_k < spec.vocab_size else OFF_K for p in params]
    table["profile"] = [PROFILES.index(row.semantics) for row in rows]
    table["completion"] = [row.completion_index for row in rows]
    table["seed"] = [row.signed_seed for row in rows]
    table["returns_mask"] = [row.returns_mask for row in rows]
    table["returns_mask_logprobs"] = [row.returns_mask_logprobs for row in rows]
    table["num_logprobs"] = [-1 if p.logprobs is None else p.logprobs for p in params]
    table["temperature"] = np.asarray([1 if p.greedy else p.temperature for p in params], np.float32)
    table["top_p"] = [p.top_p for p in params]
    table["log_min_p"] = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    _bound_candidates(table)
    return table


def _bound_candidates(table: Records) -> None:
    """Set what the filters mean for the selection of candidates."""
    greedy, profile = table["greedy"] != 0, table["profile"]
    ranks, cuts, floors = table["top_k"] < OFF_K, table["top_p"] < 1, table["log_min_p"] > -np.inf
    # The mass is that of all ids, unless an earlier filter has left few: in vllm min-p or top-k, in hf top-k.
    needs_all = np.select([profile <= VLLM_TORCH, profile == HF], [~ranks & ~floors, ~ranks], True)
    # In hf min-p comes after the mass cut, which must see all that top-k left.
    floors = floors & ~greedy & ~((profile == HF) & cuts & ranks)
    table["weighs"] = cuts & ~greedy & needs_all
    table["select_k"] = np.where(greedy, 1, np.where(ranks, table["top_k"], 0))
    table["by_rank"] = (table["select_k"] > 0) | floors
    table["whole"] = ~((table["by_rank"] != 0) | cuts)
    table["select_log_min_p"] = np.where(floors, table["log_min_p"], -np.inf)
    table["select_top_p"] = np.where(table["by_rank"] != 0, 1.0, table["top_p"])
