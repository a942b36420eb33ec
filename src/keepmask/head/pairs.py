"""Products of hidden states and head rows at (row, id) pairs: all the matrix work that scoring on supports needs.

Arithmetic is float32, or float64 where the inputs are, whatever the inputs' type. Nothing here is of size [T, V] or
[M, E].

impl: "gather" is the definition, in plain PyTorch, for any device: three forms of `embedding_bag`. "numba" reads each
row once in its own type and is several times faster on a CPU; "triton" does so on a GPU, where its logits come with
all else that is found in the same pass (`pairs_triton.score_rows`). Both are optional and load on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "IdOrder",
    "Impl",
    "Pairs",
    "add_weight_gradient",
    "hidden_gradient",
    "impl_for",
    "numba_can_read",
    "offsets_of",
    "pair_logits",
    "places_in",
    "scale_rows",
    "triton_can_read",
    "weight_gradient_rows",
    "wide",
]

Impl = Literal["gather", "numba", "triton"]

_SUM = 0  # embedding_bag's number for this mode
_BLOCK_FLOATS = 2**18  # floats in a block of gradient rows: 1 MB, which a core's cache holds


class IdOrder(NamedTuple):
    """Pairs ordered by id, then by row. U is the number of distinct ids."""

    order: Tensor
    """[M] int64: pair numbers in that order."""
    rows: Tensor
    """[M] int64: the row of each pair, in that order."""
    ids: Tensor
    """[U] int64: the distinct ids, ascending."""
    offsets: Tensor
    """[U+1] int64: pairs `offsets[u]:offsets[u + 1]` of the order have id `ids[u]`."""

    @classmethod
    def of(cls, ids: Tensor, index: Tensor) -> IdOrder:
        """The order of pairs of these ids and rows, [M] each; rows ascending."""
        order = _stable_order(ids)
        return cls._sorted(order, ids[order], index[order])

    def subset(self, numbers: Tensor, ids: Tensor, index: Tensor) -> IdOrder:
        """The order of the pairs `numbers` of all, whose own ids and rows these are, which costs less than sorting."""
        places = torch.full((self.order.numel(),), -1, dtype=torch.int64, device=ids.device)
        places[numbers] = torch.arange(numbers.numel(), device=ids.device)
        order = places[self.order]
        order = order[order >= 0]
        return self._sorted(order, ids[order], index[order])

    @classmethod
    def _sorted(cls, order: Tensor, ids: Tensor, index: Tensor) -> IdOrder:
        distinct, counts = torch.unique_consecutive(ids, return_counts=True)
        return cls(order, index, distinct.to(torch.int64), offsets_of(counts))


@dataclass(frozen=True, eq=False)
class Pairs:
    """M (row, id) pairs: row a of A is hidden state `rows[a]` of T, with head rows `ids[offsets[a]:offsets[a + 1]]`.

    Never modified after construction, so derived views are cached.
    """

    rows: Tensor
    """[A] int64, ascending."""
    ids: Tensor
    """[M] int32 or int64, rows of the head."""
    offsets: Tensor
    """[A+1] int64."""
    order: IdOrder | None = field(default=None, repr=False)
    """Where it is known."""

    @property
    def num_rows(self) -> int:
        """A."""
        return self.rows.numel()

    @property
    def num_pairs(self) -> int:
        """M."""
        return self.ids.numel()

    @cached_property
    def index(self) -> Tensor:
        """[M] int64: the row of each pair, in [0, A)."""
        rows = torch.arange(self.num_rows, device=self.ids.device)
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.num_pairs)

    @cached_property
    def by_id(self) -> IdOrder:
        """The pairs ordered by id, for sums over the rows that hold an id."""
        return IdOrder.of(self.ids, self.index) if self.order is None else self.order

    def positions(self, ids: Tensor) -> Tensor:
        """[A] int64: the number of the pair (a, ids[a]), -1 where row a does not hold that id. ids: [A]."""
        hit = self.ids == ids[self.index]
        # Pairs that do not match write to a slot past the end, so no number of matches is asked of the device.
        slots = torch.where(hit, self.index, self.num_rows)
        positions = torch.full((self.num_rows + 1,), -1, dtype=torch.int64, device=self.ids.device)
        return positions.scatter_(0, slots, torch.arange(self.num_pairs, device=self.ids.device))[:-1]

    def restrict(self, ids: range) -> tuple[Pairs, Tensor]:
        """The pairs whose id is in `ids`, by the place it has there, and their numbers [M']. Rows may become empty."""
        places, inside = places_in(self.ids, ids)
        numbers = inside.nonzero()[:, 0]
        return Pairs(self.rows, places[numbers], offsets_of(inside)[self.offsets]), numbers


def offsets_of(counts: Tensor) -> Tensor:
    """[A+1] int64: the offsets of rows of these lengths, [A]."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def places_in(values: Tensor, ids: range) -> tuple[Tensor, Tensor]:
    """The place of each value in `ids`, a block or shard of the vocabulary (0 where it has none), and whether it has
    one."""
    places = torch.div(values - ids.start, ids.step, rounding_mode="floor")
    inside = (places >= 0) & (places < len(ids)) & (values == ids.start + places * ids.step)
    return torch.where(inside, places, 0), inside


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


def _stable_order(ids: Tensor) -> Tensor:
    """[M] int64: the stable sorting permutation of `ids`."""
    if ids.device.type != "cpu":
        return torch.sort(ids, stable=True).indices
    # Sorting (id, position) packed in one integer is several times faster on a CPU than a sort that carries indices.
    packed = (ids.numpy().astype(np.int64) << 32) | np.arange(ids.numel())
    packed.sort()
    packed &= 0xFFFFFFFF
    return torch.from_numpy(packed)
