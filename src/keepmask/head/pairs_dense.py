"""The products of `pairs` by dense matrix products, for supports that hold a good part of the vocabulary.

Three products over the whole vocabulary, in slices of it: only the logits of the pairs are kept from the first, and
the other two start from a slice of logit gradients that is zero outside the pairs. The memory is that of one slice,
its logits and the head rows of it, converted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from keepmask.head.pair_products import wide
from keepmask.head.pairs import Pairs

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


def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """Equals `(hidden[pairs.rows[pairs.index]] * weight[pairs.ids]).sum(-1)`; [M]. hidden: [T, E]. weight: [V, E]."""
    states = hidden[pairs.rows].to(wide(hidden.dtype))
    result = states.new_empty(pairs.num_pairs)
    for block, numbers, index, columns in _slices(weight.shape[0], pairs):
        logits = products(states, weight[block].to(states.dtype))
        result[numbers] = logits[index, columns]
    return result


def pair_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, pairs: Pairs, *, out_hidden: Tensor | None, out_weight: Tensor | None
) -> None:
    """Equals, for logit gradients G [A, V] that are `grad` at the pairs and zero elsewhere,
    `out_hidden.zero_(); out_hidden[rows] = G @ weight; out_weight += G.T @ hidden[rows]`.

    grad: [M]. out_hidden: [T, E]. out_weight: [V, E]. The rest as in `pair_logits`.
    """
    states = hidden[pairs.rows].to(grad.dtype)
    for_hidden = None if out_hidden is None else torch.zeros_like(states)
    for block, numbers, index, columns in _slices(weight.shape[0], pairs):
        logits_grad = states.new_zeros(pairs.num_rows, block.stop - block.start)
        logits_grad[index, columns] = grad[numbers]
        if for_hidden is not None:
            for_hidden.addmm_(logits_grad, _used_rows(weight[block].to(grad.dtype), columns))
        if out_weight is not None:
            rows_grad = logits_grad.T @ states
            out_weight[block] = (out_weight[block] + rows_grad).to(out_weight.dtype)  # rounded once
    if out_hidden is not None and for_hidden is not None:
        out_hidden.zero_()
        out_hidden[pairs.rows] = for_hidden.to(out_hidden.dtype)


def _used_rows(head_rows: Tensor, used: Tensor) -> Tensor:
    """`head_rows`; where some are not finite, padding for one, those no pair uses are 0: 0 * inf is no gradient."""
    if head_rows.sum().isfinite():
        return head_rows
    clean = torch.zeros_like(head_rows)
    clean[used] = head_rows[used]
    return clean


def _slices(vocab_size: int, pairs: Pairs) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Slices of the vocabulary, and of the pairs in each: their numbers, rows and columns within the slice."""
    order, index, _, _ = pairs.by_id
    ids = pairs.ids[order].long()
    width = max(_MIN_SLICE, _SLICE_FLOATS // max(1, pairs.num_rows))
    starts = torch.arange(0, vocab_size, width)
    bounds = [*torch.searchsorted(ids, starts.to(ids)).tolist(), ids.numel()]
    for number, start in enumerate(starts.tolist()):
        some = slice(bounds[number], bounds[number + 1])
        yield slice(start, min(start + width, vocab_size)), order[some], index[some], ids[some] - start
