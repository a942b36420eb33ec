"""The filters of each profile, defined on one sorted row.

Every function takes a row sorted by (logit descending, id ascending) and returns which of its entries survive. Logits
are float32 values, sums are float64, in the order of the row. Banned entries are -inf and never survive.

``vllm``
    vLLM's Triton sampler. min-p, then top-k (exactly k: of ties with the k-th the lowest ids stay), then top-p: an id
    stays while the mass before it, of the distribution over what is left, is < top_p.
``vllm-torch``
    vLLM's PyTorch path: the same, but top-k keeps logits >= the k-th largest, so all ties with it.
``sglang``
    SGLang's FlashInfer backend. top-p on the whole distribution: an id stays while the mass before it is <= top_p, and
    so do ids tied with the last one; intersected with top-k (ties stay); then min-p.
``sglang-torch``
    SGLang's "pytorch" backend: the same, but both cuts keep an exact number of ids. Which of the tied ids stay is left
    open there; here the lowest do.
``hf``
    The warpers of Hugging Face `generate`: top-k (ties stay); top-p, which drops ids from the low end while the mass
    dropped is <= 1 - top_p, of tied ids the lowest id first; then min-p.

min-p keeps logits >= max + ln(min_p) in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from keepmask.params import SamplingParams, SamplingSemantics

__all__ = ["survivors"]


def survivors(z: Tensor, params: SamplingParams, semantics: SamplingSemantics) -> Tensor:
    """z: [V] float32, sorted descending, ties by ascending id. Returns [V] bool."""
    possible = z > -torch.inf
    if params.greedy:  # the first entry is the highest logit with the lowest id
        return possible & (torch.arange(z.numel(), device=z.device) == 0)
    return possible & _FILTERS[semantics](z.double(), params)


def _vllm(z: Tensor, params: SamplingParams) -> Tensor:
    return _top_p_of(z, _min_p(z, params) & _first_k(z, params), params)


def _vllm_torch(z: Tensor, params: SamplingParams) -> Tensor:
    return _top_p_of(z, _min_p(z, params) & _top_k(z, params), params)


def _top_p_of(z: Tensor, keep: Tensor, params: SamplingParams) -> Tensor:
    """Of the entries kept so far, those with less than top_p of their mass before them."""
    weights = _weights(z, keep)
    return keep & (_before(weights) < params.top_p * weights.cumsum(0)[-1]) if params.top_p < 1 else keep


def _sglang(z: Tensor, params: SamplingParams) -> Tensor:
    last = z[_nucleus(z, params)][-1:]  # none where nothing is possible
    tied = z >= last if last.numel() else torch.zeros_like(z, dtype=torch.bool)
    return tied & _top_k(z, params) & _min_p(z, params)


def _sglang_torch(z: Tensor, params: SamplingParams) -> Tensor:
    return _nucleus(z, params) & _first_k(z, params) & _min_p(z, params)


def _nucleus(z: Tensor, params: SamplingParams) -> Tensor:
    """Possible entries with no more than top_p of the whole mass before them."""
    possible = z > -torch.inf
    weights = _weights(z, possible)
    return possible & (_before(weights) <= params.top_p * weights.cumsum(0)[-1]) if params.top_p < 1 else possible


def _hf(z: Tensor, params: SamplingParams) -> Tensor:
    keep = _top_k(z, params) & _min_p(z, params)
    if params.top_p == 1:
        return keep
    weights = _weights(z, _top_k(z, params))
    # From the low end up; within a tie the row's order is already ascending by id, so ties are turned around.
    place = torch.arange(z.numel(), device=z.device)
    order = torch.searchsorted(-z, -z) + torch.searchsorted(-z, -z, right=True) - 1 - place
    rising = weights[order].flip(0).cumsum(0)
    stays = rising.flip(0)[order] > (1 - params.top_p) * rising[-1]
    return keep & (stays | (order == 0))  # the last to go always stays


_FILTERS: Mapping[SamplingSemantics, Callable[[Tensor, SamplingParams], Tensor]] = {
    "vllm": _vllm,
    "vllm-torch": _vllm_torch,
    "sglang": _sglang,
    "sglang-torch": _sglang_torch,
    "hf": _hf,
}


def _min_p(z: Tensor, params: SamplingParams) -> Tensor:
    return z >= z[0] + math.log(params.min_p) if params.min_p else torch.ones_like(z, dtype=torch.bool)


def _first_k(z: Tensor, params: SamplingParams) -> Tensor:
    """Exactly k entries."""
    return torch.arange(z.numel(), device=z.device) < (params.top_k if params.top_k > 0 else z.numel())


def _top_k(z: Tensor, params: SamplingParams) -> Tensor:
    """Entries that reach the k-th."""
    return z >= z[params.top_k - 1] if 0 < params.top_k < z.numel() else torch.ones_like(z, dtype=torch.bool)


def _weights(z: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, torch.exp(z - z[0]), 0.0)


def _before(weights: Tensor) -> Tensor:
    """Sum of the weights before each entry, added up in the row's order."""
    before = weights.cumsum(0).roll(1)
    before[0] = 0
    return before
