"""What scores cost in accuracy and memory at the sizes of real heads, against float64."""

import pytest
import torch
from replay_cases import gradient_error, logit_error, score_error, score_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepmask.head import pair_products
from keepmask.head.pairs import Pairs
from keepmask.replay.support import Support

IMPLS = ["gather", "numba", "dense"]


class Sharp:
    """T rows of K ids out of V, whose largest logit of all is 45."""

    def __init__(self, T, E, V, K, dtype):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(T, E, generator=generator), torch.randn(V, E, generator=generator)
        self.hidden = (hidden * 45 / (hidden @ weight.T).abs().max()).to(dtype)
        self.weight = weight.to(dtype)
        ids = torch.stack([torch.randperm(V, generator=generator)[:K].sort().values for _ in range(T)])
        drawn = torch.randint(0, K, (T,), generator=generator)
        self.targets = ids.gather(1, drawn[:, None])[:, 0]
        self.support = Support(ids.flatten(), torch.arange(T + 1) * K)
        self.factors, self.counts = torch.randn(2, T, generator=generator), K
        double = [t.double().requires_grad_() for t in (self.hidden, self.weight)]
        rows = (double[0] @ double[1].T).gather(1, ids).log_softmax(1)
        self.logprobs, self.entropy = rows.gather(1, drawn[:, None])[:, 0], -(rows.exp() * rows).sum(1)
        self.gradients = torch.autograd.grad(self.loss(self.logprobs, self.entropy), double)

    def check(self, got):
        limit = score_error(self.hidden.shape[1], 45)
        assert (got.logprobs - self.logprobs).abs().max() <= limit
        assert (got.entropy - self.entropy).abs().max() <= limit

    def loss(self, logprobs, entropy):
        return (logprobs * self.factors[0] + entropy * self.factors[1]).sum()


@pytest.fixture(scope="module", params=[(48, 1024, 400, 100), (12, 4096, 200, 20)], ids=str)
def sharp(request):
    return {dtype: Sharp(*request.param, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_keep_float32_accuracy_at_logits_of_45(sharp, impl, dtype):
    check_gradients(sharp[dtype], impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_form_keeps_it_too(dtype):
    check_gradients(Sharp(4, 700, 60, 20, dtype), "triton")


@pytest.fixture(params=["high", "medium"])
def precision(request):
    """What trainers set for speed: products in TF32 or bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_a_lower_precision_of_matrix_products_lowers_nothing_here(precision, sharp):
    problem = sharp[torch.float32]
    check_gradients(problem, "dense")
    empty = Support(torch.zeros(0, dtype=torch.int32), torch.zeros(len(problem.targets) + 1, dtype=torch.int64))
    full = score_rows(problem.hidden, problem.weight, problem.targets, empty)
    want = (problem.hidden.double() @ problem.weight.double().T).log_softmax(1)
    assert (full.logprobs - want.gather(1, problem.targets[:, None])[:, 0]).abs().max() <= score_error(
        problem.hidden.shape[1], 45
    )
    assert torch.get_float32_matmul_precision() == precision


def check_gradients(problem, impl):
    hidden, weight = (t.clone().requires_grad_() for t in (problem.hidden, problem.weight))
    weight.main_grad = torch.zeros(weight.shape)
    got = score_rows(
        hidden, weight, problem.targets, problem.support, entropy="grad", weight_grad="accumulate", impl=impl
    )
    problem.loss(got.logprobs, got.entropy).backward()
    problem.check(got)
    for mine, want, num_terms in (
        (hidden.grad, problem.gradients[0], problem.counts),
        (weight.main_grad, problem.gradients[1], len(problem.targets)),
    ):
        limit = gradient_error(hidden.shape[1], 45, num_terms, mine.dtype)
        assert ((mine.double() - want).norm() / want.norm()).item() <= limit


def test_wide_supports_keep_it_too():
    problem = Sharp(8, 256, 3000, 2500, torch.float32)
    for impl in ("gather", "numba", "dense"):
        got = score_rows(problem.hidden, problem.weight, problem.targets, problem.support, entropy="value", impl=impl)
        problem.check(got)


def test_whole_vocabulary_rows_keep_it_too():
    problem = Sharp(16, 1024, 600, 600, torch.float32)
    empty = Support(torch.zeros(0, dtype=torch.int32), torch.zeros(17, dtype=torch.int64))
    got = score_rows(problem.hidden, problem.weight, problem.targets, empty, entropy="value")
    problem.check(got)


class Watch(TorchDispatchMode):
    """Notes the size of the largest tensor made, and what is called."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.numel())
        self.calls.append(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_temporary_is_of_the_size_of_the_vocabulary_or_of_a_head_row_for_each_pair(dtype):
    T, E, V, distinct, max_pairs = 64, 48, 9000, 120, 100
    generator = torch.Generator().manual_seed(0)
    counts = torch.full((T,), 20)
    counts[5] = distinct  # wider than what is converted at a time
    ids = torch.cat([torch.randperm(distinct, generator=generator)[:n] for n in counts.tolist()])
    support = Support(ids, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    hidden = torch.randn(T, E, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=generator).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(V, E)
    watch = Watch()
    for _ in range(2):
        calls, watch.calls = watch.calls, []
        with watch:
            got = score_rows(
                hidden, weight, ids[support.offsets[:-1]], support, entropy="grad", weight_grad="accumulate",
                max_pairs=max_pairs, impl="gather",
            )  # fmt: skip
            (got.logprobs + got.entropy).sum().backward()
    assert len(calls) > 20
    # Not T * V = 576,000; not T * K * E = 368,640; not N * E = 66,240.
    assert watch.largest <= max(T * E, distinct * E, max_pairs * E, ids.numel())


def test_a_row_wider_than_what_is_converted_at_a_time_is_converted_in_parts():
    E, K, max_pairs = 32, 5000, 64
    weight, hidden = torch.randn(K, E).bfloat16(), torch.randn(3, E).bfloat16()
    ids, offsets = torch.arange(K).repeat(2), torch.tensor([0, K, K, 2 * K])
    some, grad = Pairs(torch.arange(3), ids, offsets), torch.randn(2 * K)
    out = torch.zeros(3, E)
    with Watch() as watch:
        logits = pair_products.pair_logits(hidden, weight, some, max_pairs=max_pairs, impl="gather")
        pair_products.hidden_gradient(out, grad, weight, some, max_pairs=max_pairs, impl="gather")
    assert watch.largest <= 2 * K  # one number a pair, not E
    want = hidden.double()[[0, 2]] @ weight.double().T
    torch.testing.assert_close(logits.double(), want.flatten(), rtol=0, atol=logit_error(E, want.abs().max().item()))
    sums = torch.stack([part.double() @ weight.double() for part in grad.split(K)])
    limit = logit_error(K, sums.abs().max().item())
    torch.testing.assert_close(out.double()[[0, 2]], sums, rtol=0, atol=limit)
    assert not out[1].any()


def test_a_second_pass_over_a_support_asks_the_device_for_nothing():
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(50, generator=generator)[:6] for _ in range(20)])
    support, loss_mask = Support(ids.flatten(), torch.arange(21) * 6), torch.arange(20) % 4 > 0
    hidden = torch.randn(20, 8, generator=generator, requires_grad=True)
    weight, targets = torch.randn(50, 8, generator=generator), ids[:, 2]
    seen = []
    for _ in range(2):
        with Watch() as watch:
            got = score_rows(hidden, weight, targets, support, loss_mask=loss_mask, impl="gather")
            got.logprobs.sum().backward()
        seen.append({"_local_scalar_dense", "item", "nonzero", "is_nonzero"} & set(watch.calls))
    assert seen[0]  # the first pass makes the plan
    assert not seen[1]
