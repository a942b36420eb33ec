"""The products of `pairs` by dense matrix products, for supports that hold a good part of the vocabulary.

Three products over the whole vocabulary, in slices of it: only the logits of the pairs are kept from the first, and
the other two start from a slice of logit gradients that is zero outside the pairs. The memory is that of one slice,
A x `slice_floats` / A logits and the head rows of it, converted.

Pairs come ordered by id: pair m joins hidden state `rows[index[m]]` and head row `ids[m]`, ids ascending.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from keepmask.head.pairs import wide

__all__ = ["pair_gradients", "pair_logits", "products"]

_SLICE_FLOATS = 2**22  # logits of a slice of the vocabulary: 16 MB of float32
_SUM = 128  # terms of a product summed at a time
_MIN_SLICE = 256  # narrower products would not be worth their name


def products(states: Tensor, head_rows: Tensor) -> Tensor:
    """`states @ head_rows.T`, summed a part of E at a time: a single sum would be the largest error of a score.

    states: [A, E]. head_rows: [W, E].
    """
    result = states[:, :_SUM] @ head_rows[:, :_SUM].T
    for e in range(_SUM, states.shape[1], _SUM):
        result.addmm_(states[:, e : e + _SUM], head_rows[:, e : e + _SUM].T)
    return result


def pair_logits(hidden: Tensor, rows: Tensor, weight: Tensor, ids: Tensor, index: Tensor) -> Tensor:
    """Equals `(hidden[rows[index]] * weight[ids]).sum(-1)`; [M], in the order given.

    hidden: [T, E]. rows: [A] int64. weight: [V, E]. ids, index: [M] int64.
    """
    states = hidden[rows].to(wide(hidden.dtype))
    result = states.new_empty(ids.numel())
    for start, stop, pairs in _slices(weight.shape[0], ids, rows.numel()):
        logits = products(states, weight[start:stop].to(states.dtype))
        result[pairs] = logits[index[pairs], ids[pairs] - start]
    return result


def pair_gradients(
    grad: Tensor,
    hidden: Tensor,
    rows: Tensor,
    weight: Tensor,
    ids: Tensor,
    index: Tensor,
    *,
    out_hidden: Tensor | None,
    out_weight: Tensor | None,
) -> None:
    """Equals, for logit gradients G [A, V] that are `grad` at the pairs and zero elsewhere,
    `out_hidden.zero_(); out_hidden[rows] = G @ weight; out_weight += G.T @ hidden[rows]`.

    grad: [M]. out_hidden: [T, E]. out_weight: [V, E]. The rest as in `pair_logits`.
    """
    states = hidden[rows].to(grad.dtype)
    for_hidden = None if out_hidden is None else torch.zeros_like(states)
    for start, stop, pairs in _slices(weight.shape[0], ids, rows.numel()):
        logits_grad = states.new_zeros(rows.numel(), stop - start)
        logits_grad[index[pairs], ids[pairs] - start] = grad[pairs]
        if for_hidden is not None:
            for_hidden.addmm_(logits_grad, _used_rows(weight[start:stop].to(grad.dtype), ids[pairs] - start))
        if out_weight is not None:
            rows_grad = logits_grad.T @ states
            out_weight[start:stop] = (out_weight[start:stop] + rows_grad).to(out_weight.dtype)  # rounded once
    if out_hidden is not None and for_hidden is not None:
        out_hidden.zero_()
        out_hidden[rows] = for_hidden.to(out_hidden.dtype)


def _used_rows(head_rows: Tensor, used: Tensor) -> Tensor:
    """`head_rows`; where some are not finite, padding for one, those no pair uses are 0: 0 * inf is no gradient."""
    if head_rows.sum().isfinite():
        return head_rows
    clean = torch.zeros_like(head_rows)
    clean[used] = head_rows[used]
    return clean


def _slices(vocab_size: int, ids: Tensor, num_rows: int) -> Iterator[tuple[int, int, slice]]:
    """Slices of the vocabulary and the pairs of each."""
    width = max(_MIN_SLICE, _SLICE_FLOATS // max(1, num_rows))
    starts = torch.arange(0, vocab_size, width)
    bounds = [*torch.searchsorted(ids, starts.to(ids)).tolist(), ids.numel()]
    for number, start in enumerate(starts.tolist()):
        yield start, min(start + width, vocab_size), slice(bounds[number], bounds[number + 1])
