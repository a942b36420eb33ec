"""The supports of a batch: of any width, whole, and only of the rows that return theirs."""

import numpy as np
import pytest
from sampler_rows import draw, masks, open_row, sample, support

from keepmask.sampling import Sampler


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("K", [1, 4095, 4096, 4097, 7999])
def test_rows_of_any_width_are_exact(impl, K):
    z = np.random.default_rng(0).permutation(8000).astype(np.float32) / 1000
    batch = draw(Sampler(masks(8000), impl=impl), z, top_k=K, return_sampling_mask_logprobs=True)
    ids, logprobs = batch.mask.wait().row(0)
    kept = np.flatnonzero(z >= np.sort(z)[-K])
    np.testing.assert_array_equal(ids, kept)
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    weights = np.exp(z[kept].astype(float))
    np.testing.assert_allclose(logprobs, np.log(weights / weights.sum()), atol=1e-5)


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_a_ban_without_a_filter_makes_an_explicit_row_with_its_logprobs(impl):
    z = np.random.default_rng(0).normal(0, 1, 5000).astype(np.float32)
    sampler = Sampler(masks(5000, eos_token_ids=(7,)), impl=impl)
    rows = [
        open_row(sampler, min_tokens=1, return_sampling_mask_logprobs=True),
        open_row(sampler, min_tokens=1),
        open_row(sampler, allowed_token_ids=[5, 3, 9], return_sampling_mask_logprobs=True),
    ]
    batch = sample(sampler, [z] * 3, rows)
    ids, logprobs = batch.mask.wait().row(0)
    assert ids.tolist() == [i for i in range(5000) if i != 7]
    expected = z[ids] - np.log(np.exp(z[ids].astype(float)).sum())
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    mask = batch.mask.wait()
    assert mask.row(1)[0].size == 4999
    assert mask.row(1)[1] is None
    assert mask.row(2)[0].tolist() == [3, 5, 9]
    assert np.exp(mask.row(2)[1].astype(float)).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_only_rows_that_return_masks_are_captured(impl):
    sampler = Sampler(masks(9), impl=impl)
    rows = [
        open_row(sampler, top_k=2),
        open_row(sampler, return_sampling_mask=False),
        open_row(sampler, top_k=3, return_sampling_mask_logprobs=True),
    ]
    batch = sample(sampler, [np.arange(9)] * 3, rows)
    assert support(batch, 0) == [7, 8]
    assert batch.mask.wait().row(0)[1] is None
    assert support(batch, 2) == [6, 7, 8]
    assert batch.mask.wait().row(2)[1].size == 3
    with pytest.raises(KeyError):
        batch.mask.wait().row(1)
    assert sample(sampler, [np.arange(9)], [rows[1]]).mask is None
