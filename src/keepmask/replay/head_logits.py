"""`HeadLogits`: raw logits out of hidden states and the rows of a language-model head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from keepmask.head import pairs_dense
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pair_products import (
    add_weight_gradient,
    hidden_gradient,
    impl_for,
    pair_logits,
    scale_rows,
    weight_gradient_rows,
    wide,
)
from keepmask.head.pair_rows import RowImpl, row_stats, row_sums
from keepmask.head.pairs import Pairs
from keepmask.replay.source import BLOCK_FLOATS, Block, PairScores

__all__ = ["HeadLogits", "HeadProduct", "Products", "WeightGrad"]

Products = Literal["gather", "numba", "triton", "dense"]
WeightGrad = Literal["dense", "accumulate", "sparse_rows", "none"]

_BLOCK_WEIGHTS = 2**23  # head entries converted at a time for whole rows: 32 MB of float32


@dataclass(eq=False)
class HeadProduct:
    """The products of T hidden states and V rows, formed only where they are asked for, and where gradients go.

    Gradients that are None are not wanted.
    """

    hidden: Tensor
    """[T, E]."""
    weight: Tensor
    """[V, E]."""
    impl: Products
    max_pairs: int
    """As in `pairs`."""
    hidden_grad: Tensor | None = None
    """[T, E] of the type of the hidden states, any values: set by the backward over pairs, to 0 in other rows."""
    full_hidden_grad: Tensor | None = None
    """[T, E] zeros in the type of the arithmetic, or `hidden_grad`: rows of the whole vocabulary are added up."""
    weight_grad: Tensor | None = None
    """[V, E]: added to."""
    wants_rows: bool = False
    """In place of `weight_grad`, find `weight_rows`."""
    weight_rows: tuple[Tensor, Tensor] | None = None
    """[U] int64 rows, ascending, and their gradients [U, E]; found by the backward over pairs."""

    def at(self, pairs: Pairs) -> Tensor:
        """[M]: those of these pairs."""
        if self.impl == "dense":
            return pairs_dense.pair_logits(self.hidden, self.weight, pairs)
        return pair_logits(self.hidden, self.weight, pairs, max_pairs=self.max_pairs, impl=self.impl)

    def backward(self, pairs: Pairs, grad: Tensor, by_row: tuple[Tensor, Tensor] | None) -> None:
        """Take in the gradient [M] of what `at` gave. by_row: as in `LogitSource.backward_pairs`."""
        if self.impl == "dense":
            pairs_dense.pair_gradients(
                grad, self.hidden, self.weight, pairs, out_hidden=self.hidden_grad, out_weight=self.weight_grad
            )
        elif self.hidden_grad is not None and by_row is not None:
            scale_rows(self.hidden_grad, pairs.rows, *by_row)
        elif self.hidden_grad is not None:
            hidden_gradient(self.hidden_grad, grad, self.weight, pairs, max_pairs=self.max_pairs, impl=self.impl)
        if self.wants_rows:
            self.weight_rows = (pairs.by_id.ids, weight_gradient_rows(grad, self.hidden, pairs))
        elif self.weight_grad is not None and self.impl != "dense":
            impl = impl_for(self.impl, self.weight_grad)
            add_weight_gradient(self.weight_grad, grad, self.hidden, pairs, impl=impl)


class HeadLogits:
    """The logits of T tokens, formed only where they are asked for: `form` of the sum of some products and a bias."""

    def __init__(
        self,
        products: Sequence[HeadProduct],
        bias: Tensor | None,
        *,
        form: HeadForm,
        ids: range,
        bias_grad: Tensor | None = None,
    ) -> None:
        """bias: [V]. ids: the token of each of the V rows. bias_grad: [V] zeros that the gradient is added to."""
        self.products = products
        self.bias = bias
        self.bias_grad = bias_grad
        self.form = form
        self.ids = ids
        self.dtype = wide(products[0].hidden.dtype)
        self.impl = products[0].impl
        self.row_impl: RowImpl = "numba" if self.impl == "numba" else "gather"

    def score_pairs(self, pairs: Pairs, positions: Tensor, transforms: PairTransforms, *, jacobian: bool) -> PairScores:
        """`LogitSource.score_pairs`. The derivative comes with "triton" only, where it costs no other pass."""
        if self.impl == "triton":
            from keepmask.head import pairs_triton

            hidden, weight = self.products[0].hidden, self.products[0].weight
            logits, stats, derivative = pairs_triton.score_rows(
                hidden, weight, self.bias, pairs, positions, self.form, transforms, jacobian=jacobian
            )
            return PairScores(logits, transforms.apply(logits), stats, derivative)
        products = sum_of([product.at(pairs) for product in self.products])
        logits = self.form.apply(products if self.bias is None else products + self.bias.to(self.dtype)[pairs.ids])
        z = transforms.apply(logits).to(self.dtype)
        return PairScores(logits, z, row_stats(z, pairs.index, pairs.offsets, positions, impl=self.row_impl), None)

    def backward_pairs(self, pairs: Pairs, logits: Tensor, grad: Tensor, by_row: tuple[Tensor, Tensor] | None) -> None:
        """`LogitSource.backward_pairs`."""
        grad = self.form.backward(logits, grad)
        for product in self.products:
            product.backward(pairs, grad, by_row)
        if self.bias_grad is not None:
            order, _, ids, offsets = pairs.by_id
            self.bias_grad[ids] += row_sums(grad[order], offsets).to(self.bias_grad.dtype)

    def blocks(self) -> Iterator[Block]:
        """`LogitSource.blocks`: slices of the head, each converted once."""
        size = sum(product.weight.shape[1] for product in self.products)
        width = max(1, min(_BLOCK_WEIGHTS // size, BLOCK_FLOATS))
        for start in range(0, len(self.ids), width):
            block = HeadBlock(self, slice(start, min(start + width, len(self.ids))))
            yield block
            block.flush()


class HeadBlock:
    """A slice of a head's rows; a `Block`."""

    def __init__(self, head: HeadLogits, rows: slice) -> None:
        self.ids = head.ids[rows]
        self._head = head
        self._rows = rows
        self._weights = [product.weight[rows].to(head.dtype) for product in head.products]
        self._grads = [
            None if product.weight_grad is None else torch.zeros_like(weight)
            for product, weight in zip(head.products, self._weights, strict=True)
        ]

    def logits(self, rows: Tensor) -> Tensor:
        """`Block.logits`."""
        head = self._head
        products = sum_of(
            [
                pairs_dense.products(product.hidden[rows].to(head.dtype), weight)
                for product, weight in zip(head.products, self._weights, strict=True)
            ]
        )
        if head.bias is not None:
            products += head.bias[self._rows].to(head.dtype)
        return head.form.apply(products)

    def backward(self, rows: Tensor, logits: Tensor, grad: Tensor) -> None:
        """`Block.backward`."""
        head = self._head
        grad = head.form.backward(logits, grad)
        for product, weight, weight_grad in zip(head.products, self._weights, self._grads, strict=True):
            if product.full_hidden_grad is not None:
                product.full_hidden_grad[rows] += grad @ weight
            if weight_grad is not None:
                weight_grad.addmm_(grad.T, product.hidden[rows].to(head.dtype))
        if head.bias_grad is not None:
            head.bias_grad[self._rows] += grad.sum(0)

    def flush(self) -> None:
        """Add what `backward` summed to the weights' gradients, rounding once."""
        for product, weight_grad in zip(self._head.products, self._grads, strict=True):
            if weight_grad is not None and product.weight_grad is not None:
                out = product.weight_grad
                out[self._rows] = (out[self._rows] + weight_grad).to(out.dtype)


def sum_of(parts: list[Tensor]) -> Tensor:
    """Of one tensor or several, in place of the first."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
