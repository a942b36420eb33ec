"""torch's own linear layers, and the layers of a model that compute in compiled code."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keepmask.forward.linear import compile_linears
from keepmask.forward.linear_torch import TorchLinear


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_product_is_that_of_the_parameters_rows(dtype, biased):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 24, generator=generator).to(dtype) for n in (6, 4)]
    biases = [torch.arange(6.0).to(dtype), None] if biased else [None, None]
    x = torch.randn(3, 24, generator=generator).to(dtype)
    linear = TorchLinear(weights, biases)
    bias = F.pad(torch.arange(6.0), (0, 4)).double() if biased else None
    want = F.linear(x.double(), torch.cat(weights).double(), bias)
    assert (linear.in_features, linear.out_features) == (24, 10)
    assert torch.equal(linear.weight, torch.cat(weights))
    torch.testing.assert_close(linear(x).double(), want, rtol=0, atol=40 * torch.finfo(dtype).eps)
    assert linear.float32(x).dtype == torch.float32
    torch.testing.assert_close(linear.float32(x).double(), want, rtol=0, atol=40 * torch.finfo(torch.float32).eps)


def test_layers_of_a_model_do_not_depend_on_the_batch_once_compiled():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 7), nn.Linear(7, 3)).requires_grad_(False)
    x = torch.randn(2, 35, 64, generator=torch.Generator().manual_seed(0))
    want = model(x)
    compile_linears(model)
    torch.testing.assert_close(model(x), want)
    first = model[0](x)
    assert torch.equal(model[0](x[1, 4:5]), first[1, 4:5])
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
