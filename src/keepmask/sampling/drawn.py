"""`Drawn`: what an implementation of the sampler hands back for a batch, before checks and capture."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import RequestError
from keepmask.sampling.logprobs import TokenLogprobs

__all__ = ["Drawn", "WideSupport"]


@dataclass(frozen=True, slots=True)
class WideSupport:
    """A support too wide for the compact arrays. ids: [K] int32, ascending. logprobs: [K] float32."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(slots=True)
class Drawn:
    """One draw a row of a batch of B."""

    token_ids: NDArray[np.int64]
    """[B]; -1 where there is none."""
    counts: NDArray[np.int64]
    """[B] ids in the support; 0 for the whole vocabulary."""
    ids: NDArray[np.int32]
    """[B, K], ascending, padded with -1; -1 throughout for whole and wide rows."""
    logprobs: NDArray[np.float32]
    """[B, K], of `ids`, over the support."""
    wide: dict[int, WideSupport] = field(default_factory=dict)
    """By row."""
    errors: dict[int, RequestError] = field(default_factory=dict)
    """By row."""
    entries: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, of rows that asked for logprobs."""
