"""Replay kernels in Triton against the PyTorch definitions, in the interpreter or compiled where there is a GPU."""

import pytest
import torch
from test_pairs import Pairs, T, V

from keepmask.head import pair_scores, pairs
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pairs import triton_can_read

pytestmark = pytest.mark.skipif(
    not triton_can_read(torch.zeros(1, 1, device="cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1 before it is imported",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = (HeadForm(), PairTransforms())


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def everything(num_pairs):
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(3, num_pairs, generator=generator) + 0.5
    transforms = PairTransforms(
        bias=uniform[0] - 1, repetition=uniform[1], subtract=uniform[2] - 1, temperature=uniform[0]
    )
    return HeadForm(softcap=4.0, scale=0.7, rounding="bf16"), transforms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 16, 33, 96])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transformed"])
def test_scores_and_derivative_are_those_of_the_definition(dtype, size, plain):
    p = Pairs(size, dtype)
    counts = p.offsets.diff()
    positions = torch.where(counts > 0, p.offsets[:-1] + counts // 2, -1)
    form, transforms = PLAIN if plain else everything(p.ids.numel())
    bias = None if plain else torch.linspace(-1, 1, V).to(dtype)
    transforms = PairTransforms(**{name: on_device(value) for name, value in vars(transforms).items()})
    arguments = (p.hidden, p.rows, p.weight, bias, p.ids, p.offsets, p.index, positions)
    arguments = tuple(map(on_device, arguments))
    got, want = (
        pair_scores.score_pairs(*arguments, form, transforms, jacobian=True, max_pairs=9, impl=impl)
        for impl in ("triton", "gather")
    )
    # A logit that falls on the border of two bfloat16 may be rounded to either.
    tolerance = 1e-5 if plain else 0.1
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=tolerance)
    torch.testing.assert_close(got.z, want.z, rtol=0, atol=4 * tolerance)
    if plain:
        for one, other in zip(got.stats, want.stats, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
        torch.testing.assert_close(got.jacobian, want.jacobian, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformed_scores_without_rounding(dtype):
    p = Pairs(16, dtype)
    form, transforms = everything(p.ids.numel())
    form = HeadForm(softcap=form.softcap, scale=form.scale)
    counts = p.offsets.diff()
    positions = torch.where(counts > 0, p.offsets[1:] - 1, -1)
    transforms = PairTransforms(**{name: on_device(value) for name, value in vars(transforms).items()})
    arguments = (p.hidden, p.rows, p.weight, torch.linspace(-1, 1, V).to(dtype), p.ids, p.offsets, p.index, positions)
    arguments = tuple(map(on_device, arguments))
    got, want = (
        pair_scores.score_pairs(*arguments, form, transforms, jacobian=True, max_pairs=9, impl=impl)
        for impl in ("triton", "gather")
    )
    for one, other in zip((got.logits, got.z, *got.stats), (want.logits, want.z, *want.stats), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
    torch.testing.assert_close(got.jacobian, want.jacobian, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 33, 300])
def test_gradients_are_those_of_the_definition(dtype, size):
    p = Pairs(size, dtype)
    results = []
    for impl in ("triton", "gather"):
        out = torch.full((T, size), torch.nan, dtype=dtype, device=DEVICE)
        arguments = map(on_device, (p.rows, p.grad, p.weight, p.ids, p.offsets))
        pairs.hidden_gradient(out, *arguments, max_pairs=9, impl=impl)
        total = torch.ones(V, size, device=DEVICE)
        arguments = (p.distinct, p.grad, p.order, p.hidden, p.rows, p.index[p.order], p.bounds)
        pairs.add_weight_gradient(total, *map(on_device, arguments), impl=impl)
        results.append((out, total))
    (hidden, weight), (want_hidden, want_weight) = results
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
    torch.testing.assert_close(hidden, want_hidden, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(weight, want_weight, rtol=1e-5, atol=1e-5)


def test_scaled_rows():
    from keepmask.head import pairs_triton

    out = torch.full((4, 5), torch.nan, device=DEVICE)
    rows, factors = torch.tensor([1, 3], device=DEVICE), torch.tensor([2.0, -1.0], device=DEVICE)
    derivative = torch.arange(10.0, device=DEVICE).view(2, 5)
    pairs_triton.scale_rows(out, rows, factors, derivative)
    want = torch.zeros(4, 5, device=DEVICE)
    want[rows] = factors[:, None] * derivative
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_the_weight_gradient_is_the_same_bits_each_time():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (200_000,), generator=generator).sort().values.cuda()
    distinct, counts = torch.unique_consecutive(ids, return_counts=True)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = torch.randperm(ids.numel(), generator=generator).cuda()
    hidden = torch.randn(5000, 512, generator=generator).bfloat16().cuda()
    grad = torch.randn(ids.numel(), generator=generator).cuda()
    index = torch.randint(0, 5000, (ids.numel(),), generator=generator).cuda()
    every_row = torch.arange(5000, device="cuda")
    results = []
    for _ in range(3):
        out = torch.zeros(60, 512, device="cuda")
        pairs.add_weight_gradient(out, distinct, grad, order, hidden, every_row, index, bounds, impl="triton")
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
