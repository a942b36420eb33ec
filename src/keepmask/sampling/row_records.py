"""`RowRecords`: the parameters of a batch as one array of records, which the compiled kernels of every device read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from keepmask.params import SamplingSemantics
from keepmask.sampling.processors import may_change_logits
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

__all__ = ["BAND", "MAX_CANDIDATES", "NEAR", "RECORD", "RELATIVELY_NEAR", "Ints", "Records", "RowRecords"]

Ints = NDArray[np.int64]
Records = NDArray[Any]
"""[M] of some record type, such as `RECORD`."""

RECORD = np.dtype(
    [
        ("source", np.int64),  # row of the logits
        ("greedy", np.int64),
        ("top_k", np.int64),  # OFF_K where off
        ("profile", np.int64),  # index into `PROFILES`
        ("position", np.int64),  # of the output
        ("completion", np.int64),
        ("seed", np.int64),  # 64 bits, in two's complement
        ("whole", np.int64),  # no filter is on: the draw looks at every id
        ("weighs", np.int64),  # the sum over all ids is needed
        ("select_k", np.int64),  # candidates hold the ids with the select_k highest logits; 0 where off
        ("by_rank", np.int64),  # select_k or select_log_min_p bounds the candidates
        ("returns_mask", np.int64),
        ("returns_mask_logprobs", np.int64),
        ("num_logprobs", np.int64),  # entries asked for beside the token's own; -1 for no entry at all
        ("temperature", np.float64),  # a float32 number; 1 where greedy
        ("top_p", np.float64),  # 1 where off
        ("log_min_p", np.float64),  # -inf where off
        ("select_log_min_p", np.float64),  # candidates hold the ids within this of the highest; -inf where off
        ("select_top_p", np.float64),  # candidates hold this share of the weight; 1 where off
    ]
)
"""One row of a batch. Every field has 8 bytes, so that a device reads the records as a matrix of words."""

PROFILES: tuple[SamplingSemantics, ...] = get_args(SamplingSemantics)
VLLM, VLLM_TORCH, SGLANG, SGLANG_TORCH, HF = range(len(PROFILES))
assert PROFILES == ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf")

OK, NOT_FINITE, EMPTY, TOO_MANY, UNCERTAIN, INSUFFICIENT, OUTSIDE = range(7)
"""Status of a row in the kernels: fine; holds NaN or +inf; holds nothing above -inf; has more candidates than there is
room for; a decision hangs on the last bits of a sum or a logarithm; candidates are missing; the drawn id is not in the
support."""

OFF_K = 2**31 - 1
"""A top-k above every vocabulary size."""
MAX_CANDIDATES = 4096
"""Rows with more are drawn from with all of V as their candidates."""
BAND = 1e-9
"""Sums of weights closer than this, relative to the whole, may compare either way. Adding 2**18 weights in any order is
off by 3e-11 at most."""
NEAR, RELATIVELY_NEAR = 1e-9, 1e-12
"""Scores closer than this, and than this share of the best, may order either way, by the last bits of logarithms."""


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
