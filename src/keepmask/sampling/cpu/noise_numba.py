"""The CPU form of `keepmask.sampling.noise`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.compiled.jit import jit

__all__ = ["first_words", "gumbel", "round_keys"]

ROUNDS = 10
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
WORD, HALF, SIX, TWENTY_SIX = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(6), np.uint64(26)


@jit
def uniform_of_words(x0: np.uint64, x1: np.uint64) -> float:
    """u = (k + 1/2) 2**-52, with k the high 26 bits of x0 and of x1, side by side."""
    return (np.float64(((x0 >> SIX) << TWENTY_SIX) | (x1 >> SIX)) + 0.5) * 2.0**-52


@jit
def gumbel(token_id: int, params: Any) -> float:
    """`noise.gumbel` of one token id. params: a record of `RECORD`."""
    c0, c1, c2, c3 = np.uint64(token_id), np.uint64(params.position), np.uint64(params.completion), np.uint64(0)
    k0, k1 = np.uint64(params.seed) & WORD, np.uint64(params.seed) >> HALF
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & WORD, (p0 >> HALF) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return -math.log(-math.log(uniform_of_words(c0, c1)))


@jit
def first_words(
    first_id: int,
    params: Any,
    keys: NDArray[np.uint32],  # [10, 2], the key words of each round
    x0: NDArray[np.uint32],  # [N], out
) -> None:
    """The output word x0 for N consecutive ids."""
    # Words in 64 bits whose upper half is visibly zero multiply in one instruction.
    position_word, completion_word = np.uint64(params.position) & WORD, np.uint64(params.completion) & WORD
    for i in range(x0.size):
        c0, c1, c2, c3 = np.uint64(np.uint32(first_id + i)), position_word, completion_word, np.uint64(0)
        for r in range(ROUNDS):
            p0, p1 = c0 * M0, c2 * M1
            k0, k1 = np.uint64(keys[r, 0]), np.uint64(keys[r, 1])
            c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & WORD, (p0 >> HALF) ^ c3 ^ k1, p0 & WORD
        x0[i] = np.uint32(c0)


@jit
def round_keys(seed: int, keys: NDArray[np.uint32]) -> None:
    """The key words of each round. keys: [10, 2], out."""
    k0, k1 = np.uint64(seed) & WORD, np.uint64(seed) >> HALF
    for r in range(ROUNDS):
        keys[r, 0], keys[r, 1] = np.uint32(k0), np.uint32(k1)
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
