"""`logprobs_from_hidden`, `logprobs_from_logits`: exact scores of drawn tokens on the supports they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

import torch
from torch import Tensor

from keepmask.head.pair_products import numba_can_read, triton_can_read, wide
from keepmask.mask import SamplingMask
from keepmask.replay.autograd import HeadOptions, head_scores, table_scores
from keepmask.replay.head_logits import Products, WeightGrad
from keepmask.replay.parallel import VocabParallel, local_tensors
from keepmask.replay.plan import OnEmpty, OnOutside, as_support, plan_rows
from keepmask.replay.policy_head import Head
from keepmask.replay.scores import SupportScores
from keepmask.replay.scoring import Entropy, Job, ScoreTensors
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms

__all__ = ["Impl", "ScoreOptions", "logprobs_from_hidden", "logprobs_from_logits"]

P = ParamSpec("P")
R = TypeVar("R")

Impl = Literal["auto", "gather", "numba", "triton", "dense", "reference"]

_CONVERTED_FLOATS = 2**22  # head entries converted at a time: 16 MB of float32
# The part of the vocabulary in the mean support above which three dense products are faster, measured on a CPU. Rows of
# two bytes a number are converted before "gather" can use them, which its share pays for.
_DENSE_SHARE: dict[Products, float] = {"numba": 1 / 8, "gather": 1 / 16}
_DENSE_SHARE_CONVERTED = 1 / 300


def _not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as it is, also for callers that torch.compile traces: it breaks their graph once, not inside."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return cast(R, torch.compiler.disable(function)(*args, **kwargs))  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return call


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How to score, and what to do with rows that cannot be."""

    on_empty: OnEmpty = "full"
    """What to do with an empty row (the whole vocabulary) inside the loss mask: score it on the whole vocabulary, leave
    it out ("ignore"), or raise ("error")."""
    on_outside: OnOutside = "error"
    """"error" raises when a target is not in its row; "ignore" leaves such tokens out and says so in `row_status`."""
    members: bool = True
    """Whether to return `member_logprobs`; with a vocab-parallel head they cost an exchange of N floats."""
    weight_grad: WeightGrad = "dense"
    """"dense" gives autograd a [V, E] gradient; "accumulate" adds the rows that have one to `weight.main_grad` if there
    is such a buffer, else to `weight.grad`, in place, and gives autograd nothing (hooks on the weight do not run);
    "sparse_rows" gives a sparse COO gradient; "none" gives none."""
    impl: Impl = "auto"
    """"auto" chooses; "gather" is plain PyTorch on any device, "numba" compiled for the CPU, "triton" for GPUs, "dense"
    three matrix products for supports of a good part of the vocabulary, "reference" the definition in float64 with all
    logits."""
    max_pairs: int | None = None
    """How many head rows to convert to float32 at a time where they must be; None takes 16 MB worth."""

    def __post_init__(self) -> None:
        for name, legal in _LEGAL.items():
            if (value := getattr(self, name)) not in legal:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(legal)}")
        if self.max_pairs is not None and self.max_pairs < 1:
            raise ValueError(f"max_pairs={self.max_pairs}: must be at least 1; None takes what fits in 16 MB")


_LEGAL: dict[str, tuple[str, ...]] = {
    "on_empty": get_args(OnEmpty),
    "on_outside": get_args(OnOutside),
    "weight_grad": get_args(WeightGrad),
    "impl": get_args(Impl),
}
_DEFAULTS = ScoreOptions()


@_not_traced
def logprobs_from_logits(
    logits: Tensor,
    targets: Tensor,
    mask: SamplingMask | Support,
    *,
    transforms: TokenTransforms | None = None,
    loss_mask: Tensor | None = None,
    entropy: Entropy = "none",
    ref_member_logprobs: Tensor | None = None,
    full_log_normalizer: bool = False,
    options: ScoreOptions = _DEFAULTS,
) -> SupportScores:
    """The same as `logprobs_from_hidden`, from raw logits that exist already.

    Equals `transformed.masked_fill(~keep, -inf).log_softmax(-1).gather(-1, targets)`, with `keep` [T, V] true at each
    row's ids and `transformed` the logits after `transforms`, in float32 (float64 for float64 logits).

    logits: [T, V] float, row t being the distribution that token t was drawn from.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits: must be float [T, V], got {logits.dtype} {list(logits.shape)}")
    _check_length("logits", logits, targets)
    _check_device("logits", logits, targets=targets)
    job = _job(
        targets, mask, logits.shape[1], options, loss_mask, transforms=transforms, entropy=entropy,
        ref_member_logprobs=_as_reference(ref_member_logprobs, logits), full_log_normalizer=full_log_normalizer,
    )  # fmt: skip
    return _named(table_scores(logits, job), job)


@_not_traced
def logprobs_from_hidden(
    hidden: Tensor,
    head: Head | Tensor,
    targets: Tensor,
    mask: SamplingMask | Support,
    *,
    transforms: TokenTransforms | None = None,
    loss_mask: Tensor | None = None,
    entropy: Entropy = "none",
    ref_member_logprobs: Tensor | None = None,
    full_log_normalizer: bool = False,
    options: ScoreOptions = _DEFAULTS,
) -> SupportScores:
    """Log-probabilities of drawn tokens, renormalised on their supports, without full-vocabulary logits.

    Equals `logprobs_from_logits(head.logits(hidden), targets, mask, ...)`: but only the logits of the N (token, id)
    pairs in the mask are ever formed. Rows of one id, and tokens outside the loss mask, cost nothing. Time and memory
    are linear in N and do not depend on V, but for empty rows and for a fresh dense weight gradient.

    hidden: [T, E] float32, bfloat16, float16 or float64: the state that token t was drawn from.
    head: a `Head`; or its weight [V, E], for a head that is nothing but this product. Arithmetic is float32
        throughout, float64 for float64 inputs.
    targets: [T] int. mask: T rows; build a `Support` of it once when a batch is scored more than once.
    transforms: what the sampler did to the logits (temperature, logit bias, penalties), replayed at the pairs.
    loss_mask: [T] bool, the tokens to score; None scores all. Tokens that were not drawn belong outside.
    entropy: "value" for the entropy on the support, "grad" to differentiate it too.
    ref_member_logprobs: [N], the `member_logprobs` of a reference policy on the same mask with the same transforms;
        asks for `kl`, exact on the support. It is taken as a constant.
    full_log_normalizer: also compute the log-normaliser over the whole vocabulary, which costs a dense product.

    Raises MaskError, naming the rows, for a mask that is none of these targets or has rows the options refuse, and
    ValueError for tensors that do not fit together.
    """
    head = head if isinstance(head, Head) else Head(head)
    parameter = head.weight
    hidden, weight, bias, parallel = local_tensors(hidden, head.weight, head.bias, head.vocab_parallel)
    head = replace(head, bias=bias, vocab_parallel=parallel)
    vocab_size = weight.shape[0] if parallel is None else parallel.vocab_size
    ids = range(vocab_size) if parallel is None else parallel.ids
    _check_tensors(hidden, weight, head, targets, len(ids))
    _check_length("hidden", hidden, targets)
    job = _job(
        targets, mask, vocab_size, options, loss_mask, transforms=transforms, entropy=entropy,
        ref_member_logprobs=_as_reference(ref_member_logprobs, hidden), full_log_normalizer=full_log_normalizer,
        vocab_parallel=parallel, jacobian=_wants_jacobian(hidden, entropy, ref_member_logprobs, parallel),
    )  # fmt: skip
    _check_weight_grad(parameter, job, options)
    weight = weight.detach() if options.weight_grad == "none" else weight
    if options.impl == "reference":
        return _reference(hidden, replace(head, weight=weight), job)
    how = HeadOptions(
        form=head.form,
        ids=ids,
        products=_products(options.impl, hidden, head, weight, job),
        max_pairs=options.max_pairs or max(1, _CONVERTED_FLOATS // weight.shape[1]),
        weight_grad=options.weight_grad,
        parameter=parameter,
    )
    return _named(head_scores(hidden, head, weight, job, how), job)


def _job(
    targets: Tensor,
    mask: SamplingMask | Support,
    vocab_size: int,
    options: ScoreOptions,
    loss_mask: Tensor | None,
    *,
    entropy: Entropy,
    ref_member_logprobs: Tensor | None,
    transforms: TokenTransforms | None,
    **others: Any,
) -> Job:
    if entropy not in get_args(Entropy):
        raise ValueError(f"entropy={entropy!r}: must be none, value or grad")
    support = as_support(mask, targets, vocab_size)
    if transforms is not None and transforms.num_tokens != support.num_rows:
        raise ValueError(f"transforms are of {transforms.num_tokens} tokens, the mask of {support.num_rows}")
    plan = plan_rows(
        support, targets, vocab_size, loss_mask=loss_mask, on_empty=options.on_empty, on_outside=options.on_outside
    )
    if ref_member_logprobs is not None:
        if ref_member_logprobs.shape != (support.num_pairs,):
            raise ValueError(
                f"ref_member_logprobs: must have one value for each of the {support.num_pairs} ids of the mask, got "
                f"{list(ref_member_logprobs.shape)}"
            )
        if plan.full_rows.numel():
            raise ValueError(
                f"ref_member_logprobs: {plan.full_rows.numel()} rows are empty and have no members, so no exact KL; "
                'leave them out with loss_mask or on_empty="ignore"'
            )
    return Job(
        support=support,
        targets=targets.long(),
        plan=plan,
        transforms=transforms,
        entropy=entropy,
        ref_member_logprobs=ref_member_logprobs,
        members=options.members,
        **others,
    )


def _as_reference(member_logprobs: Tensor | None, like: Tensor) -> Tensor | None:
    return None if member_logprobs is None else member_logprobs.detach().to(wide(like.dtype))


def _check_weight_grad(parameter: Tensor, job: Job, options: ScoreOptions) -> None:
    kind = options.weight_grad
    if options.impl == "reference" and (job.vocab_parallel is not None or kind not in ("dense", "none")):
        raise ValueError('impl="reference": takes a whole head, and weight_grad "dense" or "none"')
    if kind == "accumulate" and not parameter.is_leaf and getattr(parameter, "main_grad", None) is None:
        raise ValueError(
            'weight_grad="accumulate": the weight is the result of another operation, so no one reads a gradient added '
            'to it; pass the parameter itself, or use "dense"'
        )
    if kind == "sparse_rows" and job.plan.full_rows.numel():
        raise ValueError(
            'weight_grad="sparse_rows": empty rows are scored on the whole vocabulary, so every row of the head gets a '
            'gradient; use "dense" or "accumulate", or on_empty="ignore"'
        )


def _wants_jacobian(
    hidden: Tensor, entropy: Entropy, reference: Tensor | None, vocab_parallel: VocabParallel | None
) -> bool:
    """Whether the log-probabilities will be differentiated by the hidden states, and probably nothing else."""
    if vocab_parallel is not None or reference is not None or entropy == "grad":
        return False
    return torch.is_grad_enabled() and hidden.requires_grad


def _named(tensors: ScoreTensors, job: Job) -> SupportScores:
    return SupportScores(row_status=job.plan.status, **tensors._asdict())


def _reference(hidden: Tensor, head: Head, job: Job) -> SupportScores:
    """The definition: all logits, in float64."""
    scores: dict[str, Tensor | None] = table_scores(head.logits(hidden.double()), job)._asdict()
    dtype = wide(hidden.dtype)
    narrowed: dict[str, Any] = {name: value if value is None else value.to(dtype) for name, value in scores.items()}
    return SupportScores(row_status=job.plan.status, **narrowed)


def _products(impl: Impl, hidden: Tensor, head: Head, weight: Tensor, job: Job) -> Products:
    if impl == "numba" and not numba_can_read(hidden, weight):
        raise ValueError(
            'impl="numba": needs numba, and contiguous float32 or bfloat16 tensors on the CPU; use impl="auto"'
        )
    if impl == "triton" and (head.adapters or not triton_can_read(hidden, weight)):
        raise ValueError(
            'impl="triton": needs Triton, a GPU (or TRITON_INTERPRET=1), and float32, bfloat16 or float16 tensors with '
            'contiguous rows, and no adapters on the head; use impl="auto"'
        )
    if impl != "auto":
        return cast(Products, impl)
    if weight.is_cuda and not head.adapters and triton_can_read(hidden, weight):
        return "triton"
    best: Products = "numba" if numba_can_read(hidden, weight) else "gather"
    active = job.plan.active.pairs
    converted = best == "gather" and weight.dtype != wide(weight.dtype)
    share = _DENSE_SHARE_CONVERTED if converted else _DENSE_SHARE[best]
    wide_rows = active.num_pairs > share * active.num_rows * head.vocab_size
    return "dense" if wide_rows and not weight.is_cuda else best


def _check_tensors(hidden: Tensor, weight: Tensor, head: Head, targets: Tensor, num_head_rows: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, E] and weight [V, E], got {list(hidden.shape)} and {list(weight.shape)}; "
            "flatten batches of sequences first"
        )
    if not hidden.shape[1]:
        raise ValueError("hidden and weight are of size E = 0; a head needs at least one number a row")
    if weight.shape[0] != num_head_rows:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, but this process's share of the vocabulary is {num_head_rows} ids"
        )
    if head.bias is not None and head.bias.shape != (num_head_rows,):
        raise ValueError(f"bias: must be [{num_head_rows}], got {list(head.bias.shape)}")
    if head.adapters and head.vocab_parallel is not None:
        raise ValueError("adapters on a head that is spread over processes are not replayed; merge them, or gather it")
    _check_device("hidden", hidden, weight=weight, bias=head.bias, targets=targets)
    if not hidden.is_floating_point() or not weight.is_floating_point() or wide(hidden.dtype) != wide(weight.dtype):
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}: both must be floating point, and both or neither float64"
        )


def _check_device(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    apart = [f"{one} on {it.device}" for one, it in others.items() if it is not None and it.device != tensor.device]
    if apart:
        raise ValueError(f"{name} is on {tensor.device}, {', '.join(apart)}; put all of them on one device")


def _check_length(name: str, tensor: Tensor, targets: Tensor) -> None:
    if tensor.shape[0] != targets.numel():
        raise ValueError(f"{name} has {tensor.shape[0]} rows for {targets.numel()} targets; each token needs its own")
