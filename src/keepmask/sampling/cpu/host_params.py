"""`HostParams`: the parameters of a batch as the CPU kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from keepmask.sampling.batch_params import PROFILES, BatchParams
from keepmask.sampling.processors import may_change_logits
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

__all__ = ["HostParams"]

VLLM, SGLANG, HF = (PROFILES.index(name) for name in ("vllm", "sglang", "hf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParams:
    """[B] arrays: the fields of `BatchParams`, and what they mean for the selection of candidates."""

    params: BatchParams
    temperature: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    log_min_p: NDArray[np.float64]
    profile: NDArray[np.int64]
    completions: NDArray[np.int64]
    seeds: NDArray[np.int64]
    whole: NDArray[np.bool_]
    """No filter is on: the draw looks at every id."""
    select_k: NDArray[np.int64]
    """Candidates must hold the ids with the select_k highest logits; 0 for no such bound."""
    select_log_min_p: NDArray[np.float64]
    """Candidates must hold the ids within this of the highest logit; -inf for no such bound."""
    select_top_p: NDArray[np.float64]
    """Candidates must hold this share of the mass; 1 for no such bound."""
    weighs: NDArray[np.bool_]
    """The mass cut needs the sum over all ids."""
    by_rank: NDArray[np.bool_]
    """select_k or select_log_min_p bounds the candidates."""
    num_logprobs: NDArray[np.int64]
    """Entries asked for; -1 for none at all."""
    changing: tuple[int, ...]
    """Rows that some step before the filters may change at some position."""

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], spec: SamplerSpec) -> HostParams:
        """The parameters of these rows."""
        params = BatchParams.of(rows, torch.device("cpu"))
        top_k, top_p, log_min_p = (x.view(-1).numpy() for x in (params.top_k, params.top_p, params.log_min_p))
        greedy, profile = params.greedy.numpy(), params.semantics.numpy()
        ranks, cuts, floors = top_k < spec.vocab_size, top_p < 1, log_min_p > -np.inf
        # The mass is that of all ids, unless an earlier filter has left few: in vllm min-p or top-k, in hf top-k.
        weighs = cuts & ~greedy & np.select([profile == VLLM, profile == HF], [~ranks & ~floors, ~ranks], True)
        # In hf min-p comes after the mass cut, which must see all that top-k left.
        floors = floors & ~greedy & ~((profile == HF) & cuts & ranks)
        select_k = np.where(greedy, 1, np.where(ranks, top_k, 0))
        by_rank = (select_k > 0) | floors
        return cls(
            params=params,
            temperature=params.temperature.view(-1).numpy(),
            greedy=greedy,
            top_k=top_k,
            top_p=top_p,
            log_min_p=log_min_p,
            profile=profile,
            completions=params.completions.view(-1).numpy(),
            seeds=params.seeds.view(-1).numpy(),
            whole=~(by_rank | cuts),
            select_k=select_k,
            select_log_min_p=np.where(floors, log_min_p, -np.inf),
            select_top_p=np.where(by_rank, 1.0, top_p),
            weighs=weighs,
            by_rank=by_rank,
            num_logprobs=np.asarray([-1 if r.params.logprobs is None else r.params.logprobs for r in rows]),
            changing=tuple(b for b, row in enumerate(rows) if may_change_logits(row, spec)),
        )
