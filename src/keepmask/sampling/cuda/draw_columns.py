"""From the parameters of a batch to the columns of a `DrawTable`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.sampling.cpu.host_params import HostParams
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.spec import SamplerSpec

__all__ = ["draw_columns"]

Ints = NDArray[np.int64]


def draw_columns(
    host: HostParams, rows: Sequence[SamplingRow], spec: SamplerSpec, items: Ints, source: Ints
) -> dict[str, NDArray[Any]]:
    """[M] arrays by column, for rows `items` [M] of the batch, which read rows `source` [M] of the logits."""
    chosen = [rows[b] for b in items]
    masks = np.asarray([row.returns_mask for row in chosen], np.bool_)
    mask_logprobs = np.asarray([row.returns_mask_logprobs for row in chosen], np.bool_)
    num_logprobs, whole = host.num_logprobs[items], host.whole[items]
    entries = (num_logprobs >= 0) & spec.logprobs_mode.startswith("processed")
    return {
        "source": source,
        "greedy": host.greedy[items],
        "top_k": host.top_k[items],
        "profile": host.profile[items],
        "position": np.asarray([row.num_output_tokens for row in chosen], np.int64),
        "completion": host.completions[items],
        "seed": host.seeds[items],
        "whole": whole,
        # Without filters the support is all there is, and so is the normaliser of its log-probs.
        "weighs": host.weighs[items] | (whole & (entries | mask_logprobs)),
        "select_k": host.select_k[items],
        "by_rank": host.by_rank[items],
        "mask_slot": _numbered(masks),
        "logprobs_slot": _numbered(mask_logprobs),
        "num_top": num_logprobs,
        "temperature": host.temperature[items],
        "top_p": host.top_p[items],
        "log_min_p": host.log_min_p[items],
        "select_log_min_p": host.select_log_min_p[items],
        "select_top_p": host.select_top_p[items],
    }


def _numbered(chosen: NDArray[np.bool_]) -> Ints:
    """0, 1, 2 ... where chosen, -1 elsewhere."""
    return np.where(chosen, chosen.cumsum() - 1, -1)
