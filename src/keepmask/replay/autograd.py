"""The two autograd functions behind `logprobs`: scores of logits that exist, and scores of a head's logits."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from keepmask.head.form import HeadForm
from keepmask.head.pair_products import numba_can_read
from keepmask.replay.head_logits import HeadLogits, HeadProduct, Products, WeightGrad
from keepmask.replay.policy_head import Head
from keepmask.replay.scoring import Job, Kept, ScoreGradients, ScoreTensors, score, send_back
from keepmask.replay.source import TableLogits

__all__ = ["HeadOptions", "head_scores", "table_scores"]

_HUGE_PAGE = 2**21
_HUGE_FAULT = 50
"""The time it takes to provide a huge page, in those of a small one; measured."""


def table_scores(logits: Tensor, job: Job) -> ScoreTensors:
    """The scores of `job` out of logits [T, V], differentiable in them."""
    return ScoreTensors(*_TableScores.apply(logits, job))  # type: ignore[no-untyped-call]


def head_scores(hidden: Tensor, head: Head, weight: Tensor, job: Job, options: HeadOptions) -> ScoreTensors:
    """The scores of `job` out of hidden states [T, E] and a head, differentiable in them and in all of the head.

    weight: [V, E], the part of the head's weight that this process holds.
    """
    states, table = head.adapted(hidden) or (None, None)
    inputs = (hidden, weight, states, table, head.bias)
    return ScoreTensors(*_HeadScores.apply(*inputs, job, options))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadOptions:
    """How to go about a head."""

    form: HeadForm
    ids: range
    """The token id of each row of the head."""
    products: Products
    max_pairs: int
    weight_grad: WeightGrad
    parameter: Tensor
    """The weight as the caller holds it, whose gradient buffer `weight_grad="accumulate"` adds to."""


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose gradients have no derivative of their own, which would otherwise be taken to be 0."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "scores on supports have first derivatives only, so create_graph=True cannot be served; differentiate "
                "twice through logits of your own, head.logits(hidden)"
            )
        return backward(ctx, *gradients)

    return checked


class _TableScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: Job) -> tuple[Tensor | None, ...]:
        tensors, kept = score(TableLogits(logits), job)
        _keep(ctx, job, tensors, kept, logits)
        return tensors

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (logits,), kept = _kept(ctx)
        grad = torch.zeros_like(logits)
        send_back(TableLogits(logits, grad), ctx.job, kept, ScoreGradients(*gradients[:4]))
        return grad, None


class _HeadScores(torch.autograd.Function):
    """Of two products, the hidden states with the weight and maybe an adapter's states with its table, and a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        states: Tensor | None,
        table: Tensor | None,
        bias: Tensor | None,
        job: Job,
        options: HeadOptions,
    ) -> tuple[Tensor | None, ...]:
        inputs = (hidden, weight, states, table, bias)
        with _float32(hidden.device):
            tensors, kept = score(_head(inputs, options), job)
        ctx.options = options
        _keep(ctx, job, tensors, kept, *inputs)
        return tensors

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, kept = _kept(ctx)
        job, options = ctx.job, ctx.options
        with _float32(inputs[0].device):
            source = _head(inputs, options)
            _make_buffers(source, ctx.needs_input_grad, job, options)
            send_back(source, job, kept, ScoreGradients(*gradients[:4]))
        main, *others = source.products
        grads = [_finished_hidden(main, job), _finished_weight(main, options), None, None]
        if others:
            grads[2:] = [_finished_hidden(others[0], job), others[0].weight_grad]
        bias = source.bias_grad
        return *grads, None if bias is None else bias.to(inputs[4].dtype), None, None


@contextmanager
def _float32(device: torch.device) -> Iterator[None]:
    """Products of float32 tensors in float32, whatever autocast and the caller's precision of matrix products say."""
    # Each setting by itself: reading them as one fails where a caller has set them apart.
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    lower = [(setting, setting.fp32_precision) for setting in settings if setting.fp32_precision != "ieee"]
    try:
        for setting, _ in lower:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, before in lower:
            setting.fp32_precision = before


def _head(inputs: Sequence[Any], options: HeadOptions) -> HeadLogits:
    hidden, weight, states, table, bias = inputs
    products = [HeadProduct(hidden, weight, options.products, options.max_pairs)]
    if states is not None:
        impl = "gather" if options.products == "numba" and not numba_can_read(states, table) else options.products
        products.append(HeadProduct(states, table, impl, options.max_pairs))
    return HeadLogits(products, bias, form=options.form, ids=options.ids)


def _keep(ctx: Any, job: Job, tensors: ScoreTensors, kept: Kept, *inputs: Tensor | None) -> None:
    """Note what the backward pass needs, and which outputs have none."""
    ctx.job = job
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(*inputs, *kept)
    ctx.set_materialize_grads(False)
    constants = [tensors.log_normalizer, tensors.full_log_normalizer]
    constants += [tensors.entropy] if job.entropy == "value" else []
    ctx.mark_non_differentiable(*(tensor for tensor in constants if tensor is not None))


def _kept(ctx: Any) -> tuple[tuple[Any, ...], Kept]:
    saved = ctx.saved_tensors
    return saved[: ctx.num_inputs], Kept(*saved[ctx.num_inputs :])


def _make_buffers(source: HeadLogits, needed: tuple[bool, ...], job: Job, options: HeadOptions) -> None:
    """Give the source what the gradients that are `needed`, of the five inputs, are written to."""
    dtype = source.dtype
    for product, hidden_needed, weight_needed in zip(source.products, needed[:4:2], needed[1:4:2], strict=False):
        if hidden_needed:
            # Parts of several processes are added up before they are rounded to the type of the hidden states.
            apart = job.vocab_parallel is not None
            product.hidden_grad = torch.empty_like(product.hidden, dtype=dtype if apart else None)
            same = product.hidden_grad.dtype == dtype or not job.plan.full_rows.numel()
            product.full_hidden_grad = product.hidden_grad if same else torch.zeros_like(product.hidden, dtype=dtype)
        if weight_needed and (options.weight_grad == "dense" or product is not source.products[0]):
            touched = product.weight.shape[0] if job.plan.full_rows.numel() else job.share()[0].pairs.by_id.ids.numel()
            product.weight_grad = _zeros_like(product.weight, touched)
        elif weight_needed and options.weight_grad == "accumulate":
            product.weight_grad = _accumulated(options.parameter, product.weight)
        product.wants_rows = weight_needed and product.weight_grad is None
    if source.bias is not None and needed[4]:
        source.bias_grad = torch.zeros_like(source.bias, dtype=dtype)


def _zeros_like(weight: Tensor, num_touched: int) -> Tensor:
    """Zeros for a gradient of which so many rows will be touched."""
    if weight.device.type != "cpu" or sys.platform != "linux" or not weight.numel():
        return torch.zeros_like(weight)
    # Pages that the system provides, as zeros, when they are first touched: PyTorch's own zeros are written one by one.
    memory = mmap.mmap(-1, weight.numel() * weight.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if _wants_huge_pages(weight, num_touched) else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)


def _wants_huge_pages(weight: Tensor, num_touched: int) -> bool:
    """Whether few huge pages are provided sooner than the small ones that so many rows, spread evenly, are in."""
    size, row = weight.numel() * weight.itemsize, weight.shape[1] * weight.itemsize
    small, huge = (min(num_touched * (1 + row / page), size / page) for page in (mmap.PAGESIZE, _HUGE_PAGE))
    return huge * _HUGE_FAULT < small


def _finished_hidden(product: HeadProduct, job: Job) -> Tensor | None:
    out, full = product.hidden_grad, product.full_hidden_grad
    if out is None or full is None:
        return None
    if full is not out:
        out[job.plan.full_rows] = full[job.plan.full_rows].to(out.dtype)
    if job.vocab_parallel is not None and job.vocab_parallel.reduce_hidden:
        job.vocab_parallel.sum(out)
    return out.to(product.hidden.dtype)


def _finished_weight(product: HeadProduct, options: HeadOptions) -> Tensor | None:
    if options.weight_grad == "dense":
        return product.weight_grad
    if product.weight_rows is None:
        return None
    rows, values = product.weight_rows
    weight = product.weight
    return torch.sparse_coo_tensor(
        rows[None], values.to(weight.dtype), weight.shape, is_coalesced=True, check_invariants=False
    )


def _accumulated(parameter: Tensor, weight: Tensor) -> Tensor:
    """The buffer that gradients of `parameter` are added up in: `main_grad`, or `grad`, made if there is none.

    weight: the part of it that this process holds, whose shape the buffer must have.
    """
    buffer: Tensor | None = getattr(parameter, "main_grad", None)
    if buffer is None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        buffer = parameter.grad
    local: Tensor = buffer.to_local() if hasattr(buffer, "to_local") else buffer
    if local.shape != weight.shape or local.device != weight.device or not local.is_floating_point():
        raise ValueError(
            f'weight_grad="accumulate": the gradient buffer is {local.dtype} {list(local.shape)} on {local.device}, '
            f"the weight {list(weight.shape)} on {weight.device}; both must have one shape and device"
        )
    return local
