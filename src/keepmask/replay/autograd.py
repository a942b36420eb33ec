"""The two autograd functions behind `logprobs`: scores of logits that exist, and scores of a head's logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepmask.head.form import HeadForm
from keepmask.head.pairs import wide
from keepmask.replay.head_logits import HeadGradients, HeadLogits, Products, WeightGrad
from keepmask.replay.scoring import Job, Kept, ScoreGradients, ScoreTensors, score, send_back
from keepmask.replay.source import TableLogits

__all__ = ["HeadOptions", "head_scores", "table_scores"]


def table_scores(logits: Tensor, job: Job) -> ScoreTensors:
    """The scores of `job` out of logits [T, V], differentiable in them."""
    return ScoreTensors(*_TableScores.apply(logits, job))  # type: ignore[no-untyped-call]


def head_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, options: HeadOptions) -> ScoreTensors:
    """The scores of `job` out of hidden states [T, E] and a head [V, E], differentiable in them and in the bias [V]."""
    return ScoreTensors(*_HeadScores.apply(hidden, weight, bias, job, options))  # type: ignore[no-untyped-call]


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


class _TableScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, job: Job) -> tuple[Tensor | None, ...]:
        tensors, kept = score(TableLogits(logits), job)
        _keep(ctx, job, tensors, kept, logits)
        return tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (logits,), kept = _kept(ctx)
        grad = torch.zeros_like(logits)
        send_back(TableLogits(logits, grad), ctx.job, kept, ScoreGradients(*gradients[:4]))
        return grad, None


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, options: HeadOptions
    ) -> tuple[Tensor | None, ...]:
        with _float32(hidden.device):
            tensors, kept = score(_head(hidden, weight, bias, options), job)
        ctx.options = options
        _keep(ctx, job, tensors, kept, hidden, weight, bias)
        return tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden, weight, bias), kept = _kept(ctx)
        job, options = ctx.job, ctx.options
        out = _gradient_buffers(hidden, weight, bias, ctx.needs_input_grad, job, options)
        with _float32(hidden.device):
            source = _head(hidden, weight, bias, options)
            source.gradients = out
            send_back(source, job, kept, ScoreGradients(*gradients[:4]))
        return (
            _finished_hidden(out, hidden, job),
            _finished_weight(out, weight, options),
            None if out.bias is None or bias is None else out.bias.to(bias.dtype),
            None,
            None,
        )


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


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> HeadLogits:
    return HeadLogits(
        hidden,
        weight,
        bias,
        form=options.form,
        ids=options.ids,
        products=options.products,
        max_pairs=options.max_pairs,
    )


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


def _gradient_buffers(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: tuple[bool, ...],
    job: Job,
    options: HeadOptions,
) -> HeadGradients:
    out = HeadGradients()
    dtype = wide(hidden.dtype)
    if needed[0]:
        # Parts of several processes are added up before they are rounded to the type of the hidden states.
        out.hidden = torch.empty_like(hidden, dtype=dtype if job.vocab_parallel is not None else None)
        same = out.hidden.dtype == dtype or not job.plan.full_rows.numel()
        out.full_hidden = out.hidden if same else torch.zeros_like(hidden, dtype=dtype)
    if needed[1] and options.weight_grad == "accumulate":
        out.weight = _accumulated(options.parameter, weight)
    elif needed[1] and options.weight_grad == "dense":
        out.weight = _zeros_like(weight)
    out.wants_rows = needed[1] and options.weight_grad == "sparse_rows"
    if bias is not None and needed[2]:
        out.bias = torch.zeros_like(bias, dtype=dtype)
    return out


def _zeros_like(weight: Tensor) -> Tensor:
    """Zeros for a gradient of which few rows will be touched."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return torch.zeros_like(weight)
    # NumPy's zeros are pages that the system provides when they are first touched; PyTorch's are written one by one.
    narrow = weight.dtype == torch.bfloat16
    zeros = torch.from_numpy(np.zeros(weight.shape, np.int16 if narrow else np.float32))
    return zeros.view(torch.bfloat16) if narrow else zeros


def _finished_hidden(out: HeadGradients, hidden: Tensor, job: Job) -> Tensor | None:
    if out.hidden is None or out.full_hidden is None:
        return None
    if out.full_hidden is not out.hidden:
        out.hidden[job.plan.full_rows] = out.full_hidden[job.plan.full_rows].to(out.hidden.dtype)
    if job.vocab_parallel is not None and job.vocab_parallel.reduce_hidden:
        job.vocab_parallel.sum(out.hidden)
    return out.hidden.to(hidden.dtype)


def _finished_weight(out: HeadGradients, weight: Tensor, options: HeadOptions) -> Tensor | None:
    if options.weight_grad == "dense":
        return out.weight
    if out.weight_rows is None:
        return None
    rows, values = out.weight_rows
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
