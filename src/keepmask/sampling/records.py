"""`RECORD`: the parameters of one row as the compiled kernels of every device read them; and what they answer with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BAND", "MAX_CANDIDATES", "NEAR", "OFF_K", "RECORD", "RELATIVELY_NEAR", "Ints", "Records"]

Ints = NDArray[np.int64]
Records = NDArray[Any]
"""[M] of some record type, such as `RECORD`."""

RECORD = np.dtype(
    [
        ("source", np.int64),  # row of the logits
        ("greedy", np.int64),
        ("top_k", np.int64),  # OFF_K where off
        ("profile", np.int64),  # one of the numbers below
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

VLLM, VLLM_TORCH, SGLANG, SGLANG_TORCH, HF = range(5)
"""The profiles of `keepmask.sampling.semantics`."""

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
