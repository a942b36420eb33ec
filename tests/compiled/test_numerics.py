"""bfloat16 as bits, and the exponential, against NumPy and PyTorch."""

import numpy as np
import torch

from keepmask.compiled.jit import jit
from keepmask.compiled.numerics import array, exp, narrow, widen

EDGES = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-9]


@jit
def narrowed(values, out):
    for at in range(values.size):
        out[at] = narrow(values[at], out[0])


@jit
def widened(values, out):
    for at in range(values.size):
        out[at] = widen(values[at])


@jit
def exponentials(values, out):
    for at in range(values.size):
        out[at] = exp(values[at])


def test_narrow_rounds_to_nearest_even_as_torch_does():
    noise = np.random.default_rng(0).normal(size=1000) * np.logspace(-30, 30, 1000)
    values = torch.tensor([*EDGES, *noise], dtype=torch.float32)
    out = torch.zeros(len(values), dtype=torch.bfloat16)
    narrowed(values.numpy(), array(out))
    torch.testing.assert_close(out, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_widen_is_exact():
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = np.zeros(len(values), np.float32)
    widened(array(values), out)
    assert np.array_equal(out, values.float().numpy(), equal_nan=True)
    widened(out[:3].copy(), out)
    assert np.array_equal(out[:3], values.float().numpy()[:3], equal_nan=True)


def test_exp_is_within_two_units_in_the_last_place():
    values = np.linspace(-80, 80, 100_001, dtype=np.float32)
    out = np.zeros_like(values)
    exponentials(values, out)
    want = np.exp(values.astype(np.float64))
    assert (np.abs(out - want) <= 2 * np.spacing(want.astype(np.float32))).all()
    exponentials(np.array([np.nan], np.float32), out)
    assert np.isnan(out[0])
