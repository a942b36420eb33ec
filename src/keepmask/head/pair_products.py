"""Products of hidden states and head rows at (row, id) pairs: all the matrix work that scoring on supports needs.

Arithmetic is float32, or float64 where the inputs are, whatever the inputs' type. Nothing here is of size [T, V] or
[M, E].

impl: "gather" is the definition, in plain PyTorch, for any device: three forms of `embedding_bag`. "numba" reads each
row once in its own type and is several times faster on a CPU; "triton" does so on a GPU, where its logits come with
all else that is found in the same pass (`pairs_triton.score_rows`). Both are optional and load on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from keepmask.head.pairs import Pairs

__all__ = [
    "Impl",
    "add_weight_gradient",
    "hidden_gradient",
    "impl_for",
    "numba_can_read",
    "pair_logits",
    "scale_rows",
    "triton_can_read",
    "weight_gradient_rows",
    "wide",
]

Impl = Literal["gather", "numba", "triton"]

_SUM = 0  # embedding_bag's number for this mode
_BLOCK_FLOATS = 2**18  # floats in a block of gradient rows: 1 MB, which a core's cache holds


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of the arithmetic on inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def numba_can_read(*tensors: Tensor) -> bool:
    """Whether impl="numba" takes these tensors: it is installed; they are contiguous float32 or bfloat16 on the CPU."""
    return _has_numba() and all(
        t.device.type == "cpu" and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors
    )


def triton_can_read(*tensors: Tensor) -> bool:
    """Whether impl="triton" takes these tensors: it is installed; they are float32, bfloat16 or float16 in whole rows,
    on a GPU or, under Triton's interpreter, on the CPU."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return _has_triton() and all(
        t.dtype in dtypes and t.stride(-1) == 1 and (t.is_cuda or _interprets_triton()) for t in tensors
    )


def impl_for(impl: str, *tensors: Tensor) -> Impl:
    """`impl` where it takes these tensors, a caller's gradient buffer for one, else "gather"."""
    if impl == "numba" and numba_can_read(*tensors):
        return "numba"
    return "triton" if impl == "triton" and triton_can_read(*tensors) else "gather"


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _interprets_triton() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs, *, max_pairs: int, impl: Impl) -> Tensor:
    """Equals `(hidden[pairs.rows[pairs.index]] * weight[pairs.ids]).sum(-1)`; [M].

    hidden: [T, E]. weight: [V, E]. max_pairs: how many head rows may be converted at a time.
    """
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.pair_logits(hidden, weight, pairs)
    states = hidden[pairs.rows].to(wide(weight.dtype))
    if weight.dtype == states.dtype:
        return _sampled_product(states, weight, pairs.ids, pairs.index, pairs.offsets)
    result = states.new_empty(pairs.num_pairs)
    for chunk, some, starts in _chunks(pairs.offsets, max_pairs):
        head_rows, places = _converted_rows(weight, pairs.ids[some])
        result[some] = _sampled_product(states[chunk], head_rows, places, pairs.index[some] - chunk.start, starts)
    return result


def hidden_gradient(out: Tensor, grad: Tensor, weight: Tensor, pairs: Pairs, *, max_pairs: int, impl: Impl) -> None:
    """Equals `out.zero_(); out.index_add_(0, pairs.rows[pairs.index], grad[:, None] * weight[pairs.ids])`.

    out: [T, E], each sum rounded to its type once. grad: [M]. weight: [V, E].
    """
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.hidden_gradient(out, grad, weight, pairs)
    if impl == "triton":
        from keepmask.head import pairs_triton

        return pairs_triton.hidden_gradient(out, grad, weight, pairs)
    out.zero_()
    if weight.dtype == grad.dtype:
        out[pairs.rows] = _weighted_sums(weight, pairs.ids, pairs.offsets, grad).to(out.dtype)
        return None
    unfinished, part = -1, grad.new_zeros(out.shape[1])
    for chunk, some, starts in _chunks(pairs.offsets, max_pairs):
        head_rows, places = _converted_rows(weight, pairs.ids[some])
        sums = _weighted_sums(head_rows, places, starts, grad[some])
        if chunk.start == unfinished:
            sums[0] += part
        out[pairs.rows[chunk]] = sums.to(out.dtype)
        unfinished, part = chunk.stop - 1, sums[-1]  # the next chunk may go on with this row
    return None


def scale_rows(out: Tensor, rows: Tensor, factors: Tensor, derivative: Tensor) -> None:
    """Equals `out.zero_(); out[rows] = factors[:, None] * derivative`.

    out: [T, E]. rows: [A] int64. factors: [A] float32. derivative: [A, E].
    """
    if out.device.type == "cuda":
        from keepmask.head import pairs_triton

        return pairs_triton.scale_rows(out, rows, factors, derivative)
    out.zero_()
    out[rows] = (factors[:, None] * derivative).to(out.dtype)
    return None


def add_weight_gradient(out: Tensor, grad: Tensor, hidden: Tensor, pairs: Pairs, *, impl: Impl) -> None:
    """Equals `out.index_add_(0, pairs.ids, grad[:, None] * hidden[pairs.rows[pairs.index]])`, each sum rounded once.

    out: [V, E], of any floating-point type. grad: [M]. hidden: [T, E].
    """
    if impl == "numba":
        from keepmask.head import pairs_numba

        return pairs_numba.add_weight_gradient(out, grad, hidden, pairs)
    if impl == "triton":
        from keepmask.head import pairs_triton

        return pairs_triton.add_weight_gradient(out, grad, hidden, pairs)
    order, index, ids, offsets = pairs.by_id
    step = max(1, _BLOCK_FLOATS // hidden.shape[1]) if out.device.type == "cpu" else max(1, ids.numel())
    states, hidden, grad = pairs.rows[index], hidden.to(grad.dtype), grad[order]
    for start in range(0, ids.numel(), step):
        block = slice(start, min(start + step, ids.numel()))
        bounds = offsets[block.start : block.stop + 1]
        some = slice(None) if step == ids.numel() else slice(int(bounds[0]), int(bounds[-1]))
        sums = _weighted_sums(hidden, states[some], bounds - bounds[0], grad[some])
        out[ids[block]] = (out[ids[block]] + sums).to(out.dtype)
    return None


def weight_gradient_rows(grad: Tensor, hidden: Tensor, pairs: Pairs) -> Tensor:
    """[U, E]: the gradients of the rows `pairs.by_id.ids`, sums of grad * hidden state over their pairs. grad: [M]."""
    order, index, _, offsets = pairs.by_id
    return _weighted_sums(hidden.to(grad.dtype), pairs.rows[index], offsets, grad[order])


def _sampled_product(hidden: Tensor, weight: Tensor, ids: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    # The gradient of embedding_bag by its per-sample weights is this very product, and gathers no rows.
    product: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        hidden, weight, ids, offsets[:-1].to(ids.dtype), index.to(ids.dtype), _SUM, -1
    )
    return product


def _weighted_sums(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(
        ids, table, offsets.to(ids.dtype), per_sample_weights=weights, mode="sum", include_last_offset=True
    )


def _converted_rows(weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The head rows that occur among `ids`, each converted once, and where each id now stands."""
    distinct, places = torch.unique(ids, return_inverse=True)
    return weight[distinct].to(wide(weight.dtype)), places


def _chunks(offsets: Tensor, max_pairs: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Runs of at most `max_pairs` pairs: the rows they are of, the pairs, and the offsets of these rows among them.

    A row of more pairs than that is in several runs, the last row of one and the first of the next.
    """
    bounds = offsets.cpu()
    num_pairs = int(bounds[-1])
    for start in range(0, num_pairs, max_pairs):
        stop = min(start + max_pairs, num_pairs)
        first = int(torch.searchsorted(bounds, start, right=True)) - 1
        last = int(torch.searchsorted(bounds, stop))
        yield slice(first, last), slice(start, stop), offsets[first : last + 1].clamp(start, stop) - start
