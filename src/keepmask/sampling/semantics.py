"""The filters of each profile, defined on sorted rows.

Every function takes rows sorted by (logit descending, id ascending) and returns which of their entries survive. Logits
are float32, sums are float64, in the order of the row. Banned and padded entries are -inf and never survive.

``vllm``
    min-p, then top-k (logits >= the k-th largest: ties stay), then top-p: an id stays while the mass before it, of
    the distribution over what is left, is < top_p.
``sglang``
    top-p on the whole distribution: an id stays while the mass before it is <= top_p, and so do ids tied with the last
    one; intersected with top-k (ties stay); then min-p.
``hf``
    The warpers of Hugging Face `generate`: top-k (ties stay); top-p, which drops ids from the low end while the mass
    dropped is <= 1 - top_p, of tied ids the lowest id first; then min-p.

min-p keeps logits >= max + ln(min_p) in all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepmask.sampling.batch_params import PROFILES, BatchParams

__all__ = ["survivors"]


def survivors(z: Tensor, params: BatchParams) -> Tensor:
    """z: [B, C] float32, each row sorted descending, ties by ascending id. Returns [B, C] bool."""
    keep = torch.zeros_like(z, dtype=torch.bool)
    for code, profile in enumerate((_vllm, _sglang, _hf)):
        rows = (params.semantics == code).nonzero().squeeze(1)
        if rows.numel():
            keep[rows] = profile(z[rows].double(), params.take(rows))
    keep[params.greedy, 1:] = False  # the first entry is the highest logit with the lowest id
    keep[params.greedy, :1] = z[params.greedy, :1] > -torch.inf
    return keep


assert PROFILES == ("vllm", "sglang", "hf")


def _vllm(z: Tensor, params: BatchParams) -> Tensor:
    keep = (z > -torch.inf) & _min_p(z, params) & _top_k(z, params)
    weights = _weights(z, keep)
    total = weights.cumsum(-1)[:, -1:]
    return keep & (~params.cuts_mass | (_before(weights) < params.top_p * total))


def _sglang(z: Tensor, params: BatchParams) -> Tensor:
    finite = z > -torch.inf
    weights = _weights(z, finite)
    total = weights.cumsum(-1)[:, -1:]
    last = (finite & (_before(weights) <= params.top_p * total)).sum(-1, keepdim=True) - 1
    tied = z >= z.gather(-1, last.clamp_min(0))
    return finite & (~params.cuts_mass | tied) & _top_k(z, params) & _min_p(z, params)


def _hf(z: Tensor, params: BatchParams) -> Tensor:
    keep = (z > -torch.inf) & _top_k(z, params)
    weights = _weights(z, keep)
    # From the low end up; within a tie the row's order is already ascending by id, so ties are turned around.
    order = torch.arange(z.shape[-1], device=z.device).expand_as(z)
    first_tied = torch.searchsorted(-z, -z)
    end_tied = torch.searchsorted(-z, -z, right=True)
    order = first_tied + end_tied - 1 - order
    rising = weights.gather(-1, order).flip(-1).cumsum(-1)
    low_mass = rising.flip(-1).gather(-1, order)
    stays = low_mass > (1 - params.top_p) * rising[:, -1:]
    stays |= order == 0  # the last to go always stays
    return keep & (~params.cuts_mass | stays) & _min_p(z, params)


def _min_p(z: Tensor, params: BatchParams) -> Tensor:
    return z >= z[:, :1] + params.log_min_p


def _top_k(z: Tensor, params: BatchParams) -> Tensor:
    return z >= z.gather(-1, params.top_k.clamp_max(z.shape[-1]) - 1)


def _weights(z: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, torch.exp(z - z[:, :1]), 0.0)


def _before(weights: Tensor) -> Tensor:
    """Sum of the weights before each entry, added up in the row's order."""
    before = weights.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    return before
