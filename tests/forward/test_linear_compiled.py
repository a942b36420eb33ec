"""Linear layers on matrix tiles: products against float64, a row whatever comes with it, and what cannot be taken."""

import numpy as np
import pytest
import torch

from keepmask.compiled.program import Program
from keepmask.compiled.tiles import available
from keepmask.forward import layer_ops
from keepmask.forward.linear import is_tiled, linear_layer
from keepmask.forward.linear_packed import PackedLinear
from keepmask.forward.linear_tiles import TiledLinear, add_gated, add_layout, padded, supports

tiles = pytest.mark.skipif(not available(), reason="needs matrix tiles (AMX)")
num_rows = pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 33, 70, 256, 300])
widths = pytest.mark.parametrize("K", [32, 96, 352, 384])  # below, at and past what the first cache is divided by


def noise(*shape, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale).bfloat16()


def layer(*sizes, K, biased=False, scale=1.0):
    parameters = [noise(N, K, seed=at, scale=scale) for at, N in enumerate(sizes, 1)]
    return TiledLinear(parameters, noise(sum(sizes), seed=9) if biased else None)


def product(x, linear):
    """[T, out] float64."""
    value = x.double() @ linear.weight.double().T
    return value if linear.bias is None else value + linear.bias.double()


def close(got, want, K):
    """Whether bfloat16 values are `want`, but for their rounding and that of float32 sums."""
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=K * 2**-20)


def in_tiles(x):
    """[tiles, K / 2, 16, 2] of x [T, K], the last row repeated."""
    T, K = x.shape
    rows = torch.cat([x, x[-1:].expand(padded(T) - T, K)])
    return rows.view(-1, 16, K // 2, 2).transpose(1, 2).contiguous()


def out_of_tiles(tokens, T):
    return tokens.transpose(1, 2).reshape(-1, tokens.shape[1] * 2)[:T]


@tiles
@num_rows
@widths
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_the_parameters_rows(T, K, biased):
    linear, x = layer(64, 32, 96, K=K, biased=biased), noise(T, K)
    assert (linear.out_features, linear.in_features) == (192, K)
    close(linear(x), product(x, linear), K)


@tiles
def test_rows_need_not_lie_together():
    linear, wide = layer(64, K=96), noise(20, 200)
    x = wide[:, 3:99]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear(wide.T[:96, :5].T), linear(wide[:5, :96]))


@tiles
@num_rows
def test_a_row_does_not_depend_on_the_others_to_the_bit(T):
    linear, x = layer(64, 32, K=352, biased=True), noise(T, 352)
    whole = linear(x)
    for row in {0, T // 2, T - 1}:
        assert torch.equal(linear(x[row : row + 1])[0], whole[row])
    assert torch.equal(linear(x.flip(0)), whole.flip(0))


@tiles
def test_a_row_does_not_depend_on_the_number_of_threads():
    linear, x, before = layer(64, 32, K=96), noise(40, 96), torch.get_num_threads()
    results = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        results.append(linear(x))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@tiles
@num_rows
def test_layout_holds_every_token_and_repeats_the_last(T):
    x, tokens = noise(T, 96), torch.zeros(padded(T) // 16, 48, 16, 2, dtype=torch.bfloat16)
    program = Program()
    add_layout(program, 96, x=x.data_ptr(), x_stride=2 * 96, tokens=tokens.data_ptr())
    program.run(T=T)
    assert torch.equal(tokens, in_tiles(x))


@tiles
@num_rows
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_and_then_added(T, biased):
    linear, x = layer(32, 64, K=352, biased=biased), noise(T, 352)
    out = noise(T + 3, 96, seed=5)
    want = torch.cat([out[:T] + linear(x), out[T:]])
    tokens, program = in_tiles(x), Program()
    linear.add_to(program, tokens=tokens.data_ptr(), out=out.data_ptr(), adds=True)
    program.run(T=T)
    assert torch.equal(out, want)


@tiles
@num_rows
@pytest.mark.parametrize("biased", [False, True])
def test_gated_products_are_laid_out_for_the_next(T, biased):
    gate, up = (layer(96, K=352, biased=biased, scale=scale) for scale in (0.1, 1.0))
    x, out = noise(T, 352), torch.zeros(padded(T) // 16, 48, 16, 2, dtype=torch.bfloat16)
    tokens, program = in_tiles(x), Program()
    add_gated(program, gate, up, tokens=tokens.data_ptr(), out=out.data_ptr())
    program.run(T=T)
    first, second = gate(x).double(), up(x).double()
    got = out_of_tiles(out, T)
    torch.testing.assert_close(got.double(), first * torch.sigmoid(first) * second, rtol=3 * 2**-8, atol=1e-6)
    assert (got == layer_ops.silu_mul(gate(x), up(x))).double().mean() > 0.99  # torch's exp differs in its last bit


@tiles
def test_changes_in_place_are_followed():
    parameters = [torch.nn.Parameter(noise(n, 64, seed=n), requires_grad=False) for n in (32, 64)]
    linear, x = TiledLinear(parameters, None), noise(3, 64)
    for factor in (2.0, -1.0):
        linear.restore()
        for parameter in parameters:
            parameter.mul_(factor)
        linear.refresh()
        close(linear(x), x.double() @ torch.cat(parameters).double().T, 64)


@tiles
def test_weights_may_lie_anywhere():
    memory, x = noise(64 * 64 + 8), noise(2, 64, seed=1)
    weight = memory[1:4097].view(64, 64)
    assert torch.equal(TiledLinear([weight], None)(x), TiledLinear([weight.clone()], None)(x))


@tiles
def test_infinite_and_missing_numbers_stay_in_their_row():
    linear, x = layer(64, K=96), noise(20, 96)
    clean = linear(x)
    x[3, 5], x[19, 0] = torch.nan, torch.inf
    spoilt = linear(x)
    assert spoilt[3].isnan().all()
    assert not spoilt[19].isfinite().any()
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(64, 64),
        torch.ones(64, 48, dtype=torch.bfloat16),
        torch.ones(40, 64, dtype=torch.bfloat16),
        torch.ones(64, 64, dtype=torch.bfloat16).T,
    ],
    ids=["float32", "inputs", "outputs", "columns"],
)
def test_other_types_and_sizes_are_left_to_other_layers(weight):
    assert not supports(weight)
    with pytest.raises(ValueError, match="matrix tiles cannot take it"):
        TiledLinear([weight], None)
    fallback = linear_layer([weight], None)
    assert isinstance(fallback, PackedLinear)
    assert not is_tiled(fallback)


@tiles
def test_tiles_are_taken_where_all_weights_fit():
    fitting, other = noise(64, 64), noise(40, 64)
    assert is_tiled(linear_layer([fitting, fitting.clone()], None, sole=True))
    assert not is_tiled(linear_layer([fitting, other], None))
