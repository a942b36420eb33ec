"""Supports on their way to the host: compact, wide, whole, and complete only after `wait`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampler_rows import draw, masks, open_row, sample, support

from keepmask.sampling import PendingMask, Sampler
from keepmask.sampling.pending_mask import MAX_COMPACT_IDS, HostRows, pack_ids, unpack_ids


@given(st.integers(1, 5000), st.data())
def test_packed_ids_come_back(V, data):
    ids = np.asarray(sorted(data.draw(st.sets(st.integers(0, V - 1)))), np.int32)
    bits = pack_ids(ids, V)
    assert bits.nbytes == (V + 7) // 8
    assert unpack_ids(bits, V).tolist() == ids.tolist()
    assert all(bits[i // 8] >> (i % 8) & 1 for i in ids.tolist())


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("K", [MAX_COMPACT_IDS - 1, MAX_COMPACT_IDS, MAX_COMPACT_IDS + 1, 7999])
def test_rows_on_either_side_of_the_compact_width_are_exact(impl, K):
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
    assert batch.mask.row(1)[0].size == 4999
    assert batch.mask.row(1)[1] is None
    assert batch.mask.row(2)[0].tolist() == [3, 5, 9]
    assert np.exp(batch.mask.row(2)[1].astype(float)).sum() == pytest.approx(1, abs=1e-6)


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
    assert batch.mask.row(0)[1] is None
    assert support(batch, 2) == [6, 7, 8]
    assert batch.mask.row(2)[1].size == 3
    with pytest.raises(KeyError):
        batch.mask.row(1)
    assert sample(sampler, [np.arange(9)], [rows[1]]).mask is None


def test_a_pending_mask_copies_out_of_memory_that_is_used_again():
    buffer = np.zeros((1, 4), np.int32)
    calls = []

    class Copy:
        def synchronize(self):
            buffer[0, :2] = [3, 5]
            calls.append("complete")

    def release():
        buffer[:] = -1
        calls.append("released")

    rows = HostRows([2], buffer, np.asarray([2]), np.zeros((1, 4), np.float32), [False], 8)
    pending = PendingMask(rows, ready=Copy(), release=release)
    assert pending.wait() is pending
    pending.wait()
    assert calls == ["complete", "released"]
    assert pending.row(2)[0].tolist() == [3, 5]
