"""`HeadLogits`: raw logits out of hidden states and the rows of a language-model head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keepmask.head import pairs, pairs_dense
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pair_rows import RowImpl, row_stats, row_sums
from keepmask.head.pair_scores import PairScores, score_pairs
from keepmask.head.pairs import wide
from keepmask.replay.source import BLOCK_FLOATS, Block
from keepmask.replay.support import Support

__all__ = ["HeadGradients", "HeadLogits", "Products", "WeightGrad"]

Products = Literal["gather", "numba", "triton", "dense"]
WeightGrad = Literal["dense", "accumulate", "sparse_rows", "none"]

_BLOCK_WEIGHTS = 2**23  # head entries converted at a time for whole rows: 32 MB of float32


@dataclass(eq=False, kw_only=True)
class HeadGradients:
    """Where the gradients of a head go; None where one is not wanted."""

    hidden: Tensor | None = None
    """[T, E] of the type of the hidden states, any values: set by the backward over pairs, to 0 in other rows."""
    full_hidden: Tensor | None = None
    """[T, E] zeros in the type of the arithmetic, or `hidden`: rows scored on the whole vocabulary are added up."""
    weight: Tensor | None = None
    """[V, E]: added to."""
    bias: Tensor | None = None
    """[V] zeros in the type of the arithmetic: added to."""
    wants_rows: bool = False
    """In place of `weight`, find `weight_rows`."""
    weight_rows: tuple[Tensor, Tensor] | None = None
    """[U] int64 head rows, ascending, and their gradients [U, E]; found by the backward over pairs."""


class HeadLogits:
    """The logits of T tokens, formed only where they are asked for."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        form: HeadForm,
        ids: range,
        products: Products,
        max_pairs: int,
        gradients: HeadGradients | None = None,
    ) -> None:
        """hidden: [T, E]. weight: [V, E], row i of token ids[i]. bias: [V]. max_pairs: as in `pairs`."""
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.form = form
        self.ids = ids
        self.products = products
        self.max_pairs = max_pairs
        self.gradients = gradients or HeadGradients()
        self.dtype = wide(hidden.dtype)
        self.row_impl: RowImpl = "numba" if products == "numba" else "gather"

    def score_pairs(
        self, rows: Tensor, support: Support, positions: Tensor, transforms: PairTransforms, *, jacobian: bool
    ) -> PairScores:
        """`LogitSource.score_pairs`. The derivative comes with "triton" only, where it costs no other pass."""
        ids = self._head_rows(support.ids)
        if self.products == "dense":
            order, index, _, _ = support.by_id
            products = torch.empty(ids.numel(), dtype=self.dtype, device=ids.device)
            products[order] = pairs_dense.pair_logits(self.hidden, rows, self.weight, ids[order].long(), index)
            logits = self.form.apply(products if self.bias is None else products + self.bias.to(self.dtype)[ids])
            z = transforms.apply(logits).to(self.dtype)
            stats = row_stats(z, support.row_index, support.offsets, positions, impl="gather")
            return PairScores(logits, z, stats, None)
        return score_pairs(
            self.hidden, rows, self.weight, self.bias, ids, support.offsets, support.row_index, positions, self.form,
            transforms, jacobian=jacobian and self.products == "triton", max_pairs=self.max_pairs, impl=self.products,
        )  # fmt: skip

    def backward_pairs(
        self, rows: Tensor, support: Support, logits: Tensor, grad: Tensor, by_row: tuple[Tensor, Tensor] | None
    ) -> None:
        """`LogitSource.backward_pairs`."""
        grad = self.form.backward(logits, grad)
        out = self.gradients
        if self.products == "dense":
            self._dense_backward(rows, support, grad)
        elif out.hidden is not None and by_row is not None:
            pairs.scale_rows(out.hidden, rows, *by_row)
        elif out.hidden is not None:
            pairs.hidden_gradient(
                out.hidden, rows, grad, self.weight, self._head_rows(support.ids), support.offsets,
                max_pairs=self.max_pairs, impl=self.products,
            )  # fmt: skip
        if out.bias is not None or out.weight is not None or out.wants_rows:
            self._head_backward(rows, support, grad)

    def blocks(self) -> Iterator[Block]:
        """`LogitSource.blocks`: slices of the head, each converted once."""
        width = max(1, min(_BLOCK_WEIGHTS // self.weight.shape[1], BLOCK_FLOATS))
        for start in range(0, self.weight.shape[0], width):
            block = HeadBlock(self, slice(start, min(start + width, self.weight.shape[0])))
            yield block
            block.flush()

    def _head_backward(self, rows: Tensor, support: Support, grad: Tensor) -> None:
        """The gradients of the weight and the bias: sums over the pairs of each id, in the order of the ids."""
        out, (order, index, distinct, offsets) = self.gradients, support.by_id
        ids = self._head_rows(distinct)
        if out.bias is not None:
            out.bias[ids] += row_sums(grad[order], offsets).to(out.bias.dtype)
        if out.wants_rows:
            sums = pairs.weight_gradient_rows(grad, order, self.hidden, rows, index, offsets)
            out.weight_rows = (ids, sums)
        elif out.weight is not None and self.products != "dense":
            impl = pairs.impl_for(self.products, out.weight)
            pairs.add_weight_gradient(out.weight, ids, grad, order, self.hidden, rows, index, offsets, impl=impl)

    def _dense_backward(self, rows: Tensor, support: Support, grad: Tensor) -> None:
        order, index, _, _ = support.by_id
        pairs_dense.pair_gradients(
            grad[order], self.hidden, rows, self.weight, self._head_rows(support.ids)[order].long(), index,
            out_hidden=self.gradients.hidden, out_weight=self.gradients.weight,
        )  # fmt: skip

    def _head_rows(self, ids: Tensor) -> Tensor:
        """The row of the head, or of this process's share of it, of each token id."""
        if self.ids.start == 0 and self.ids.step == 1:
            return ids
        return torch.div(ids - self.ids.start, self.ids.step, rounding_mode="floor")


class HeadBlock:
    """A slice of a head's rows; a `Block`."""

    def __init__(self, head: HeadLogits, rows: slice) -> None:
        self.ids = head.ids[rows]
        self._head = head
        self._rows = rows
        self._weight = head.weight[rows].to(head.dtype)
        self._weight_grad = torch.zeros_like(self._weight) if head.gradients.weight is not None else None

    def logits(self, rows: Tensor) -> Tensor:
        """`Block.logits`."""
        head = self._head
        products = pairs_dense.products(head.hidden[rows].to(head.dtype), self._weight)
        if head.bias is not None:
            products += head.bias[self._rows].to(head.dtype)
        return head.form.apply(products)

    def backward(self, rows: Tensor, logits: Tensor, grad: Tensor) -> None:
        """`Block.backward`."""
        head, out = self._head, self._head.gradients
        grad = head.form.backward(logits, grad)
        if out.full_hidden is not None:
            out.full_hidden[rows] += grad @ self._weight
        if out.bias is not None:
            out.bias[self._rows] += grad.sum(0)
        if self._weight_grad is not None:
            self._weight_grad.addmm_(grad.T, head.hidden[rows].to(head.dtype))

    def flush(self) -> None:
        """Add what `backward` summed to the weight's gradient, rounding once."""
        out = self._head.gradients.weight
        if self._weight_grad is not None and out is not None:
            out[self._rows] = (out[self._rows] + self._weight_grad).to(out.dtype)
