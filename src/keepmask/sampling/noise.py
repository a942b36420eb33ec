"""Counter-based random numbers: Philox 4x32-10 and the Gumbel noise the draw adds to the logits.

Philox maps a 128-bit counter and a 64-bit key to 128 random bits by ten rounds of multiply and xor (Salmon, Moraes,
Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants and known answers as in Random123).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gumbel", "philox", "uniform"]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words each round
WORD = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 of int64 tensors (or ints) that hold one 32-bit word each and broadcast together.

    Returns the four output words x0..x3, int64 in [0, 2**32).
    """
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    k0, k1 = (torch.as_tensor(word, dtype=torch.int64) for word in key)
    for _ in range(ROUNDS):
        low0, high0 = _multiply(c0, MULTIPLIERS[0])
        low1, high1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform(token_ids: Tensor, positions: Tensor, completions: Tensor, seeds: Tensor) -> Tensor:
    """u = (k + 1/2) 2**-52 in (0, 1), float64, with k the high 26 bits of x0 and of x1, side by side.

    The counter is (token id, output position, completion index, 0), the key the two words of the seed.
    All arguments are int64 and broadcast together; `seeds` holds the seed's 64 bits in two's complement.
    """
    key = (seeds & WORD, (seeds >> 32) & WORD)
    x0, x1, _, _ = philox((token_ids, positions, completions, torch.zeros_like(positions)), key)
    bits = ((x0 >> 6) << 26) | (x1 >> 6)
    return (bits.double() + 0.5) * 2.0**-52


def gumbel(token_ids: Tensor, positions: Tensor, completions: Tensor, seeds: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log(u)), float64, of `uniform` with the same arguments."""
    return -torch.log(-torch.log(uniform(token_ids, positions, completions, seeds)))


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The low and high words of a 32 x 32 bit product."""
    # The product may pass 2**63; int64 wraps, and the masked shifts read the right bits of it all the same.
    product = word * factor
    return product & WORD, (product >> 32) & WORD
