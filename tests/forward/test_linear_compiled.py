"""Compiled linear layers: products against float64, the order of their sums, a row whatever comes with it."""

import numpy as np
import pytest
import torch

from keepmask.compiled.processor import available
from keepmask.compiled.program import Program
from keepmask.forward import layer_ops
from keepmask.forward.linear import is_compiled, linear_layer
from keepmask.forward.linear_compiled import CompiledLinear, add_gated, add_layout, padded, supports
from keepmask.forward.linear_torch import TorchLinear

KINDS = [(torch.float32, "plain"), *((torch.bfloat16, name) for name in available())]
ROWS = [1, 2, 4, 5, 16, 17, 33, 49, 70, 300]

kinds = pytest.mark.parametrize(("dtype", "using"), KINDS, ids=[f"{dtype}-{name}"[6:] for dtype, name in KINDS])
num_rows = pytest.mark.parametrize("T", ROWS)


def noise(*shape, dtype, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale).to(dtype)


def layer(*sizes, K, dtype, using, biased=False, scale=1.0):
    parameters = [noise(N, K, dtype=dtype, seed=at, scale=scale) for at, N in enumerate(sizes, 1)]
    biases = [noise(N, dtype=dtype, seed=9 + at) if biased else None for at, N in enumerate(sizes)]
    return CompiledLinear(parameters, biases, using=using)


def product(x, linear):
    """[T, out] float64, and what rounding each of K additions may change: by half a unit of |x| · |weight| each."""
    weight, bias = linear.weight.double(), 0 if linear.bias is None else linear.bias.double()
    K = weight.shape[1]
    return x.double() @ weight.T + bias, (K + 1) * 2.0**-24 * (x.double().abs() @ weight.T.abs() + abs(bias))


def assert_close(got, x, linear):
    want, error = product(x, linear)
    unit = torch.finfo(got.dtype).eps / 2
    assert ((got.double() - want).abs() <= error + unit * (want.abs() + error)).all()


def laid_out(x):
    """[tiles, K, 16] in units of 4 bytes of x [T, in], the last row repeated."""
    units = x.contiguous().view(torch.float32)
    rows = torch.cat([units, units[-1:].expand(padded(len(x)) - len(x), -1)])
    return rows.view(-1, 16, units.shape[1]).transpose(1, 2).contiguous()


def out_of_layout(tokens, T, dtype):
    return tokens.transpose(1, 2).reshape(-1, tokens.shape[1])[:T].contiguous().view(dtype)


def in_order(x, weight, *, native):
    """[T, out] float32: one unit after the other is added, rounded to float32 each time.

    Of a pair of bfloat16 the second product comes first; products are exact, as in float64. native: the processor's
    instruction takes and gives denormal numbers as zero.
    """
    x, weight = x.double().numpy(), weight.double().numpy()
    K, pair = x.shape[1], (1, 0)
    total = np.zeros((len(x), len(weight)), np.float32)
    tiny = np.finfo(np.float32).tiny
    for unit in range(0, K, 2):
        for k in pair:
            exact = total.astype(np.float64) + x[:, None, unit + k] * weight[None, :, unit + k]
            total = exact.astype(np.float32)
            if native:
                total[np.abs(total) < tiny] = 0
    return total


@kinds
@num_rows
@pytest.mark.parametrize("K", [32, 352])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_the_parameters_rows(dtype, using, T, K, biased):
    linear, x = layer(64, 40, 32, K=K, biased=biased, dtype=dtype, using=using), noise(T, K, dtype=dtype)
    assert (linear.out_features, linear.in_features) == (136, K)
    assert linear(x).dtype == dtype
    assert_close(linear(x), x, linear)
    assert linear.float32(x).dtype == torch.float32
    assert_close(linear.float32(x), x, linear)


@kinds
def test_contractions_longer_than_a_part_are_summed_up_in_one_order(dtype, using):
    K = 2 * 2**10 + 64
    linear, x = layer(64, K=K, dtype=dtype, using=using), noise(70, K, dtype=dtype)
    whole = linear(x)
    assert_close(whole, x, linear)
    assert torch.equal(linear(x[:3]), whole[:3])
    assert torch.equal(linear(x[:20]), whole[:20])


@pytest.mark.parametrize("using", [name for name in available() if name != "tiles"])
@pytest.mark.parametrize("T", [1, 4, 16, 32, 64])
def test_sums_of_bfloat16_take_pair_after_pair_the_second_of_each_first(using, T):
    linear, x = layer(32, K=96, dtype=torch.bfloat16, using=using), noise(T, 96, dtype=torch.bfloat16)
    want = in_order(x, linear.weight, native=using == "avx512_bf16")
    assert np.array_equal(linear.float32(x).numpy(), want)


@pytest.mark.skipif("avx512_bf16" not in available(), reason="needs AVX-512's bfloat16")
def test_dot_products_of_bfloat16_take_and_give_denormal_numbers_as_zero():
    tiny = torch.finfo(torch.bfloat16).tiny
    weight, x = torch.full((32, 32), 0.5, dtype=torch.bfloat16), torch.zeros(2, 32, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = tiny, tiny / 2
    assert CompiledLinear([weight], [None], using="avx512_bf16").float32(x).unique().tolist() == [0.0]
    plain = CompiledLinear([weight], [None], using="plain").float32(x)
    assert plain[:, 0].tolist() == [tiny / 2, tiny / 4]


@kinds
def test_rows_need_not_lie_together(dtype, using):
    linear, wide = layer(64, K=96, dtype=dtype, using=using), noise(20, 200, dtype=dtype)
    x = wide[:, 3:99]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear(wide.T[:96, :5].T), linear(wide[:5, :96]))


@kinds
@num_rows
def test_a_row_does_not_depend_on_the_others_to_the_bit(dtype, using, T):
    linear, x = layer(64, 40, K=352, biased=True, dtype=dtype, using=using), noise(T, 352, dtype=dtype)
    whole, wide = linear(x), linear.float32(x)
    for size in {1, 3, 16, 40}:
        for start in {0, T // 2, max(T - size, 0)}:
            rows = slice(start, start + size)
            assert torch.equal(linear(x[rows]), whole[rows])
            assert torch.equal(linear.float32(x[rows]), wide[rows])
    assert torch.equal(linear(x.flip(0)), whole.flip(0))


@kinds
def test_a_row_does_not_depend_on_the_number_of_threads(dtype, using):
    linear, x, before = (
        layer(64, 96, K=96, dtype=dtype, using=using),
        noise(300, 96, dtype=dtype),
        torch.get_num_threads(),
    )
    results = []
    for number in (1, 2, 4, 5):
        torch.set_num_threads(number)
        results.append(linear(x))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@kinds
@num_rows
def test_layout_holds_every_token_and_repeats_the_last(dtype, using, T):
    x = noise(T, 96, dtype=dtype)
    want = laid_out(x)
    tokens, program = torch.zeros_like(want), Program()
    add_layout(program, 96, dtype, x=x.data_ptr(), x_stride=x[0].nbytes, tokens=tokens.data_ptr())
    program.run(T=T)
    assert torch.equal(tokens, want)


@kinds
@num_rows
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_and_then_added(dtype, using, T, biased):
    linear, x = layer(32, 64, K=352, biased=biased, dtype=dtype, using=using), noise(T, 352, dtype=dtype)
    out = noise(T + 3, 96, dtype=dtype, seed=5)
    want = torch.cat([out[:T] + linear(x), out[T:]])
    tokens, program = laid_out(x), Program()
    places = linear.parts_of(out.data_ptr(), out.element_size())
    linear.add_to(program, tokens=tokens.data_ptr(), out=places, ending="adds")
    program.run(T=T)
    assert torch.equal(out, want)


@kinds
@num_rows
@pytest.mark.parametrize("biased", [False, True])
def test_gated_products_are_laid_out_for_the_next(dtype, using, T, biased):
    gate, up = (layer(96, K=352, biased=biased, scale=scale, dtype=dtype, using=using) for scale in (0.1, 1.0))
    x = noise(T, 352, dtype=dtype)
    tokens, program = laid_out(x), Program()
    out = torch.zeros(len(tokens), 96 * dtype.itemsize // 4, 16)
    add_gated(program, gate, up, tokens=tokens.data_ptr(), out=out.data_ptr())
    program.run(T=T)
    first, second = gate(x).double(), up(x).double()
    got = out_of_layout(out, T, dtype)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), first * torch.sigmoid(first) * second, rtol=3 * step, atol=1e-6)
    if dtype == torch.bfloat16:
        same = got == layer_ops.silu_mul(gate(x), up(x))
        assert same.double().mean() > 0.99  # torch's exp differs in its last bit


@kinds
def test_changes_in_place_are_followed_and_nothing_is_written(dtype, using):
    parameters = [torch.nn.Parameter(noise(n, 64, dtype=dtype, seed=n)) for n in (32, 64)]
    bias = torch.nn.Parameter(noise(32, dtype=dtype))
    linear, x = CompiledLinear(parameters, [bias, None], using=using), noise(3, 64, dtype=dtype)
    for factor in (2.0, -1.0):
        with torch.no_grad():
            for parameter in (*parameters, bias):
                parameter.mul_(factor)
        kept = [parameter.clone() for parameter in parameters]
        assert_close(linear(x), x, linear)
        assert torch.equal(linear.weight, torch.cat(kept))
        assert all(torch.equal(*pair) for pair in zip(parameters, kept, strict=True))


@kinds
def test_weights_may_lie_anywhere(dtype, using):
    memory, x = noise(64 * 64 + 8, dtype=dtype), noise(2, 64, dtype=dtype, seed=1)
    weight = memory[1:4097].view(64, 64)
    assert torch.equal(CompiledLinear([weight], [None], using=using)(x), CompiledLinear([weight.clone()], [None])(x))


@kinds
def test_infinite_and_missing_numbers_stay_in_their_row(dtype, using):
    linear, x = layer(64, K=96, dtype=dtype, using=using), noise(20, 96, dtype=dtype)
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
        torch.ones(64, 64, dtype=torch.float16),
        torch.ones(64, 48, dtype=torch.bfloat16),
        torch.ones(16, 64, dtype=torch.bfloat16),
        torch.ones(64, 64, dtype=torch.bfloat16).T,
    ],
    ids=["float16", "inputs", "outputs", "columns"],
)
def test_other_types_and_sizes_are_left_to_torch(weight):
    assert not supports(weight)
    with pytest.raises(ValueError, match="compiled products cannot take it"):
        CompiledLinear([weight], [None])
    fallback = linear_layer([weight], [None])
    assert isinstance(fallback, TorchLinear)
    assert not is_compiled(fallback)


def test_tiles_are_taken_where_all_weights_are_whole_panels():
    fitting, other = (noise(N, 64, dtype=torch.bfloat16) for N in (64, 40))
    assert CompiledLinear([fitting, fitting], [None, None]).using == available()[0]
    assert CompiledLinear([fitting, other], [None, None]).using == next(name for name in available() if name != "tiles")
