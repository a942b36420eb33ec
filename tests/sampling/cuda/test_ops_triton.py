"""Ordered keys, exact division and the noise, in Triton."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from kernel_rows import DEVICE, interpreted, on_device

from keepmask.sampling.cuda.ops_triton import (
    gumbel,
    least_key_from,
    near_noise,
    order_key,
    scaled,
    score_bounds,
    value_of_key,
)
from keepmask.sampling.noise import gumbel as gumbel_by_definition

pytestmark = interpreted

NUMBERS = np.asarray([0.0, 1.0, -1.0, 3.3e38, -3.3e38, 1e-45, -1e-45, 1.5, 7.25, -np.inf, np.inf, 0.1], np.float32)


@triton.jit
def keys_kernel(z_ptr, n, t_ptr, key_ptr, back_ptr, s_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    z = tl.load(z_ptr + at, mask=at < n, other=0.0)
    key = order_key(z)
    tl.store(key_ptr + at, key, mask=at < n)
    tl.store(back_ptr + at, value_of_key(key), mask=at < n)
    tl.store(s_ptr + at, scaled(z, tl.load(t_ptr)), mask=at < n)


@triton.jit
def least_key_kernel(bound_ptr, key_ptr):
    tl.store(key_ptr + tl.program_id(0), least_key_from(tl.load(bound_ptr + tl.program_id(0))))


@triton.jit
def noise_kernel(noise_ptr, s_ptr, exact_ptr, below_ptr, above_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    noise = (tl.load(noise_ptr), tl.load(noise_ptr + 1), tl.load(noise_ptr + 2))
    s = tl.load(s_ptr + at)
    below, above = score_bounds(s, at, noise)
    tl.store(exact_ptr + at, gumbel(at, noise))
    tl.store(below_ptr + at, below)
    tl.store(above_ptr + at, above)


@triton.jit
def words_kernel(high_ptr, low_ptr, n, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    high, low = tl.load(high_ptr + at, mask=at < n, other=0), tl.load(low_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, near_noise(high.to(tl.uint32), low.to(tl.uint32)), mask=at < n)


def keys(values, temperature=1.0):
    z = on_device(np.asarray(values, np.float32))
    key, back, s = torch.empty(len(z), dtype=torch.int32, device=DEVICE), torch.empty_like(z), torch.empty_like(z)
    t = on_device(np.asarray([temperature], np.float32))
    keys_kernel[(1,)](z, len(z), t, key, back, s, N=triton.next_power_of_2(len(z)), enable_fp_fusion=False)
    return key.cpu().numpy(), back.cpu().numpy(), s.cpu().numpy()


def test_keys_order_as_the_numbers_do_and_lead_back_to_them():
    key, back, _ = keys(NUMBERS)
    np.testing.assert_array_equal(back, NUMBERS)
    np.testing.assert_array_equal(np.argsort(key), np.argsort(NUMBERS, kind="stable"))
    assert keys([np.nan])[0][0] > keys([np.inf])[0][0]
    assert keys([-np.float32(np.nan)])[0][0] < keys([-np.inf])[0][0]


def test_division_rounds_once_and_zeros_are_equal():
    rng = np.random.default_rng(0)
    z = rng.normal(0, 5, 1000).astype(np.float32)
    for temperature in (0.7, 1.0, 1e-5, 3.1):
        np.testing.assert_array_equal(keys(z, temperature)[2], z / np.float32(temperature))
    s = keys([-0.0, 0.0, -1e-45], 2.0)[2]
    assert np.signbit(s).tolist() == [False] * 3


def test_the_least_key_is_of_the_lowest_float_that_reaches_the_bound():
    rng = np.random.default_rng(0)
    exact = rng.normal(0, 5, 30).astype(np.float32).astype(np.float64)
    bounds = np.concatenate([exact, exact + 1e-12, exact - 1e-12, [0.0, -0.0, -1e-60, 1e-60, -np.inf, -1e60]])
    out = torch.empty(len(bounds), dtype=torch.int32, device=DEVICE)
    least_key_kernel[(len(bounds),)](on_device(bounds), out, enable_fp_fusion=False)
    lowest = []
    for bound in bounds:
        nearest = np.float32(np.clip(bound, np.finfo(np.float32).min, None)) if bound > -np.inf else np.float32(bound)
        lowest.append(np.nextafter(nearest, np.float32(np.inf)) if float(nearest) < bound else nearest)
    np.testing.assert_array_equal(out.cpu().numpy(), keys(np.asarray(lowest, np.float32) + np.float32(0))[0])


def test_the_noise_is_philoxs_and_scores_lie_within_their_bounds():
    ids, rng = torch.arange(2048), np.random.default_rng(0)
    for position, completion, seed in [(0, 0, 0), (7, 3, 2**63 - 1), (2**31, 1, -(2**63)), (5, 2, 12345678901)]:
        expected = gumbel_by_definition(ids, *(torch.tensor(word) for word in (position, completion, seed))).numpy()
        exact = torch.empty(2048, dtype=torch.float64, device=DEVICE)
        below, above = torch.empty((2, 2048), dtype=torch.float32, device=DEVICE)
        s = (rng.normal(0, 1, 2048) * 10.0 ** rng.integers(-3, 30, 2048)).astype(np.float32)
        s[:10] = -np.inf
        noise = on_device(np.asarray([position, completion, seed]))
        noise_kernel[(1,)](noise, on_device(s), exact, below, above, N=2048, enable_fp_fusion=False)
        np.testing.assert_allclose(exact.cpu(), expected, rtol=1e-14, atol=1e-14)
        score = s + expected
        assert (below.cpu().numpy() <= score).all()
        assert (above.cpu().numpy() >= score).all()
        width = above.cpu().numpy()[10:].astype(float) - below.cpu().numpy()[10:]
        assert (width <= 2.1e-3 + 3e-6 * abs(s[10:])).all()


def test_the_cheap_noise_keeps_its_digits_at_either_end():
    top = 2**26 - 1
    near_one = [top - 2**k for k in range(26)] + [top]
    pairs = [(high, low) for high in [*near_one, 0, 1, 5, 2**20] for low in (0, 1, 2**25, top - 1, top)]
    high, low = (on_device(np.asarray(words)) for words in zip(*pairs, strict=True))
    out = torch.empty(len(pairs), dtype=torch.float32, device=DEVICE)
    words_kernel[(1,)](high, low, len(pairs), out, N=triton.next_power_of_2(len(pairs)), enable_fp_fusion=False)
    # 1 - u as an exact integer over 2**53, so that its logarithm is right where u rounds to 1
    rest = [2**53 - (2 * ((h << 26) | w) + 1) for h, w in pairs]
    exact = [-math.log(-math.log1p(-(r / 2**53))) for r in rest]
    assert np.abs(out.cpu().numpy() - np.asarray(exact)).max() < 1e-4
