"""The compiled operations of a decoder layer against their definitions, and those against float64."""

import numpy as np
import pytest
import torch

from keepmask.forward import layer_ops, layer_ops_cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
T, E, H, D = 5, 96, 3, 32

dtypes = pytest.mark.parametrize("dtype", DTYPES)
modules = pytest.mark.parametrize("ops", [layer_ops, layer_ops_cpu], ids=["definition", "compiled"])


def noise(*shape, dtype, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * 2).to(dtype)


def close(got, want, dtype, roundings=2):
    """Whether each value is `want` but for this many roundings to the type."""
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps * roundings
    torch.testing.assert_close(got.double(), want, rtol=step, atol=4 * step)


def normed(x, weight, eps=1e-5):
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@dtypes
@modules
def test_rms_norm(ops, dtype):
    x, weight = noise(T, E, dtype=dtype), noise(E, dtype=dtype, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), normed(x.double(), weight), dtype)


@dtypes
@modules
def test_add_rms_norm_adds_in_place(ops, dtype):
    x, update, weight = noise(T, E, dtype=dtype), noise(T, E, dtype=dtype, seed=1), noise(E, dtype=dtype, seed=2)
    total = (x.double() + update.double()).to(dtype)
    close(ops.add_rms_norm(x, update, weight, 1e-5), normed(total.double(), weight), dtype)
    assert torch.equal(x, total)


@dtypes
@modules
def test_head_rms_norm_works_in_place_on_some_heads(ops, dtype):
    merged, weight = noise(T, H + 2, D, dtype=dtype), noise(D, dtype=dtype, seed=1)
    before = merged.clone()
    ops.head_rms_norm(merged[:, 1:-1], weight, 1e-5)
    close(merged[:, 1:-1], normed(before[:, 1:-1].double(), weight), dtype)
    assert torch.equal(merged[:, 0], before[:, 0])
    assert torch.equal(merged[:, -1], before[:, -1])


@dtypes
@modules
def test_rotate_turns_pairs_of_some_heads_in_place(ops, dtype):
    merged, angle = noise(T, H + 1, D, dtype=dtype), torch.arange(T)[:, None] * torch.arange(1, D // 2 + 1) / 7
    cos, sin = (part.repeat(1, 2).to(dtype) for part in (angle.cos(), angle.sin()))
    before = merged.clone()
    ops.rotate(merged[:, :H], cos, sin)
    x, y = before[:, :H].double().chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = (part.double()[:, None].chunk(2, -1) for part in (cos, sin))
    want = torch.cat([x * cos1 - y * sin1, y * cos2 + x * sin2], -1)
    close(merged[:, :H], want, dtype, roundings=3)
    assert torch.equal(merged[:, H], before[:, H])


@dtypes
@modules
def test_silu_mul(ops, dtype):
    gate, up = noise(T, E, dtype=dtype) * 4, noise(T, E, dtype=dtype, seed=1)
    close(ops.silu_mul(gate, up), gate.double() * torch.sigmoid(gate.double()) * up.double(), dtype)


@dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 9, 200])
def test_a_row_does_not_depend_on_the_others(dtype, num_rows):
    x, update, weight = (noise(num_rows, E, dtype=dtype, seed=seed) for seed in range(3))
    whole = layer_ops_cpu.add_rms_norm(x.clone(), update, weight[0], 1e-5)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = layer_ops_cpu.add_rms_norm(x[row : row + 1].clone(), update[row : row + 1], weight[0], 1e-5)
        assert torch.equal(alone[0], whole[row])
    product = layer_ops_cpu.silu_mul(x, update)
    assert torch.equal(layer_ops_cpu.silu_mul(x[-1:], update[-1:])[0], product[-1])


def test_compiled_operations_serve_whole_vectors_on_the_cpu():
    cpu = torch.device("cpu")
    assert layer_ops.fastest(cpu, torch.bfloat16, 64, 576) is layer_ops_cpu
    assert layer_ops.fastest(cpu, torch.bfloat16, 64, 80) is layer_ops
    assert layer_ops.fastest(cpu, torch.float64, 64) is layer_ops
    assert layer_ops.fastest(torch.device("cuda"), torch.bfloat16, 64) is layer_ops
