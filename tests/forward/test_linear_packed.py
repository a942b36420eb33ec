"""Linear layers in the layout of the CPU's kernels: the products, and weights that are kept in that layout only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepmask.forward.linear_packed import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]


def parameters(dtype, sizes=(6, 4, 10), width=32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, width, generator=generator).to(dtype), requires_grad=False) for n in sizes]


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sole", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_product_is_that_of_the_parameters_rows(dtype, sole, with_bias, num_rows):
    given = parameters(dtype)
    weight = torch.cat(given).double()
    bias = torch.arange(20).to(dtype) / 8 if with_bias else None
    x = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = PackedLinear(given, bias, sole=sole)
    want = F.linear(x.double(), weight, None if bias is None else bias.double())
    close(linear(x), want, dtype)
    assert (linear.out_features, linear.in_features) == (20, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(20,), (6, 4, 10)])
def test_parameters_kept_packed_take_no_memory_and_come_back_to_the_bit(dtype, sizes):
    given = parameters(dtype, sizes)
    before = [parameter.clone() for parameter in given]
    linear = PackedLinear(given, None, sole=True)
    if linear.packed is None:
        pytest.skip("this CPU has no packed layout")
    assert all(parameter.isnan().all() for parameter in given)
    assert all(parameter.untyped_storage().nbytes() == dtype.itemsize for parameter in given)
    with pytest.raises(RuntimeError, match="restore"):
        _ = linear.weight
    linear.restore()
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    assert torch.equal(linear.weight, torch.cat(before))


@pytest.mark.parametrize("sole", [False, True])
def test_changes_are_followed_after_refresh(sole):
    given = parameters(torch.float32)
    linear, x = PackedLinear(given, None, sole=sole), torch.ones(2, 32)
    for factor in (2.0, -1.0):
        linear.restore()
        for parameter in given:
            parameter.mul_(factor)
        want = F.linear(x, torch.cat(given)).double()
        linear.refresh()
        linear.refresh()
        close(linear(x), want, torch.float32)
