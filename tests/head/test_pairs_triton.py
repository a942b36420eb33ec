"""Replay kernels in Triton against the PyTorch definitions, in the interpreter or compiled where there is a GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from replay_cases import ROUNDOFF, score_error
from test_pair_products import Case, T, V, rounded

from keepmask.head import pair_products
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.head.pair_products import triton_can_read
from keepmask.head.pairs import Pairs

pytestmark = pytest.mark.skipif(
    not triton_can_read(torch.zeros(1, 1, device="cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1 before it is imported",
)

pairs_triton = pytest.importorskip("keepmask.head.pairs_triton")
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


def by_definition(p, positions, bias, form, transforms):
    """Logits, transformed ones, row by row; and the derivative of the targets' log-probabilities, in float64."""
    hidden = p.hidden.double().requires_grad_()
    products = (hidden[p.rows[p.index]] * p.weight.double()[p.ids.long()]).sum(-1)
    logits = form.apply(products if bias is None else products + bias.double()[p.ids.long()])
    z = transforms.apply(logits)
    rows = z.split(p.offsets.diff().tolist())
    scores = [
        row.log_softmax(0)[position - start]
        for row, position, start in zip(rows, positions.tolist(), p.offsets.tolist(), strict=False)
        if position >= 0
    ]
    (derivative,) = torch.autograd.grad(torch.stack(scores).sum(), hidden)
    return logits.detach(), z.detach(), [row.detach() for row in rows], derivative[p.rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 16, 33, 96])
@pytest.mark.parametrize("kind", ["plain", "transformed", "rounded"])
def test_scores_and_derivative_are_those_of_the_definition(dtype, size, kind):
    p = Case(size, dtype)
    counts = p.offsets.diff()
    positions = torch.where(counts > 0, p.offsets[:-1] + counts // 2, -1)
    form, transforms = PLAIN if kind == "plain" else everything(p.ids.numel())
    form = form if kind == "rounded" else replace(form, rounding=None)
    bias = None if kind == "plain" else torch.linspace(-1, 1, V).to(dtype)
    got, stats, derivative = pairs_triton.score_rows(
        *map(on_device, (p.hidden, p.weight, bias)),
        Pairs(*map(on_device, (p.rows, p.ids, p.offsets))),
        on_device(positions),
        form,
        PairTransforms(**{name: on_device(value) for name, value in vars(transforms).items()}),
        jacobian=True,
    )
    logits, _, rows, want = by_definition(p, positions, bias, form, transforms)
    limit = score_error(size, logits.abs().max().item() + 8)
    # A sum that lies on the border between two bfloat16 may be rounded to either.
    near = (got.cpu().double() - logits).abs() <= limit
    assert near.float().mean() >= (0.9 if kind == "rounded" else 1.0)
    if kind == "rounded":
        return
    for a, row in enumerate(rows):
        peak, total, weighted, target = (values[a].item() for values in stats)
        if not row.numel():
            assert (peak, total, weighted, target) == (-torch.inf, 0, 0, 0)
            continue
        centred = row - row.max()
        assert peak == pytest.approx(row.max().item(), abs=limit)
        assert total == pytest.approx(centred.exp().sum().item(), rel=2 * limit)
        assert weighted == pytest.approx((centred.exp() * centred).sum().item(), abs=4 * limit * row.numel())
        assert target == pytest.approx(row[positions[a] - p.offsets[a]].item(), abs=limit)
    rounding = ROUNDOFF[dtype] + 4 * limit
    assert ((derivative.cpu().double() - want).abs() <= rounding * (want.abs() + p.weight.abs().max())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 33, 300])
def test_gradients_are_those_of_the_definition(dtype, size):
    p = Case(size, dtype)
    out = torch.full((T, size), torch.nan, dtype=dtype, device=DEVICE)
    some = Pairs(*map(on_device, (p.rows, p.ids, p.offsets)))
    pair_products.hidden_gradient(out, on_device(p.grad), on_device(p.weight), some, max_pairs=9, impl="triton")
    want = p.hidden_gradient()
    assert ((out.cpu().double() - want).abs() <= rounded(want, dtype)).all()
    total = torch.ones(V, size, device=DEVICE)
    pair_products.add_weight_gradient(total, on_device(p.grad), on_device(p.hidden), some, impl="triton")
    want = 1 + p.weight_gradient()
    assert ((total.cpu().double() - want).abs() <= rounded(want, torch.float32)).all()


@pytest.mark.slow
def test_kernels_compile_for_a_cuda_device():
    done = subprocess.run([sys.executable, "-c", COMPILE], env=os.environ | {"TRITON_INTERPRET": "0"}, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"] * 3  # none keeps an array in local memory


# Interpreted and compiled functions do not share a process.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from keepmask.head.pairs_triton import _Out, _Rows, _Shape, _Table, _score_row, _sum_row

rows, table = _Rows("*i64", "*i64", "*i64"), _Table("*bf16", "i64")

def compiled(kernel, constants, **signature):
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            values |= {(kernel.arg_names.index(name), i): None for i, part in enumerate(kind) if part == "constexpr"}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constexprs=values)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    print(".visible .entry" in ptx, ".local" in ptx)

for bias, kind in (("constexpr", ("constexpr",) * 4), ("*bf16", ("*fp32",) * 4)):
    compiled(
        _score_row, {"SHAPE": _Shape(4096, 4096, 2), "ROUND": False, "CAP": bias != "constexpr"},
        hidden=table, head=("*bf16", "i64", bias), rows=rows, pairs=("*i32", "*i64"), transforms=kind,
        out=_Out("*fp32", "*fp32", "*bf16", "i32"), form=("fp32", "fp32"),
    )
compiled(
    _sum_row, {"SHAPE": _Shape(4096, 256, 32), "ADD": True}, out=_Table("*fp32", "i64"), rows=rows,
    factors=("*fp32", "*i64"), table=table, lookup=("*i64", "*i64"),
)
"""


def test_scaled_rows():
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
    ids = torch.randint(0, 50, (200_000,), generator=generator).cuda()
    some = Pairs(torch.arange(5000).cuda(), ids, (torch.arange(5001) * 40).cuda())
    hidden = torch.randn(5000, 512, generator=generator).bfloat16().cuda()
    grad = torch.randn(ids.numel(), generator=generator).cuda()
    results = []
    for _ in range(3):
        out = torch.zeros(60, 512, device="cuda")
        pair_products.add_weight_gradient(out, grad, hidden, some, impl="triton")
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
