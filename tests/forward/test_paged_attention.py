"""Both forms of the paged attention kernels against softmax attention in float64 NumPy."""

import math

import numpy as np
import pytest
import torch

from keepmask.forward.paged_attention import decode_attention, store_tokens

IMPLS = ["reference", "auto", "triton"]
LENGTHS = (1, 15, 16, 17, 33, 100)

impls = pytest.mark.parametrize("impl", IMPLS)


class Cache:
    """Sequences in blocks in any order; everything they do not own is NaN."""

    def __init__(self, *, lengths=LENGTHS, Hkv=2, D=32, block_size=16, dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        needed = [-(-length // block_size) for length in lengths]
        order = rng.permutation(sum(needed) + 3).tolist()
        self.keys = torch.full((len(order), Hkv, D, block_size), math.nan, dtype=dtype)
        self.values = torch.full((len(order), Hkv, block_size, D), math.nan, dtype=dtype)
        self.tables = torch.zeros((len(lengths), max(needed) + 2), dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.sequences = []  # of each row: keys and values, [L, Hkv, D] float64, as the cache holds them
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            key, value = (torch.from_numpy(rng.normal(size=(length, Hkv, D))).to(dtype) for _ in range(2))
            for at in range(length):
                self.keys[blocks[at // block_size], :, :, at % block_size] = key[at]
                self.values[blocks[at // block_size], :, at % block_size] = value[at]
            self.sequences.append((key.double().numpy(), value.double().numpy()))

    def queries(self, Hq, seed=1):
        size = (len(self.sequences), Hq, self.keys.shape[2])
        return torch.from_numpy(np.random.default_rng(seed).normal(size=size)).to(self.keys.dtype)

    def attend(self, query, impl, **options):
        options = {"scale": 0.3} | options
        rows = torch.arange(len(self.sequences), dtype=torch.int32)
        return decode_attention(query, self.keys, self.values, self.tables, rows, self.lengths, impl=impl, **options)


def truth(query, sequences, *, scale=0.3, window=None, softcap=None):
    """[S, Hq, D] float64: each query over the last `window` positions of its sequence."""
    rows = []
    for heads, (key, value) in zip(query.double().numpy(), sequences, strict=True):
        groups = heads.shape[0] // key.shape[1]
        first = 0 if window is None else max(0, key.shape[0] - window)
        row = []
        for head, q in enumerate(heads):
            scores = key[first:, head // groups] @ q * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            row.append(weights @ value[first:, head // groups] / weights.sum())
        rows.append(row)
    return np.array(rows)


@impls
@pytest.mark.parametrize(
    ("Hkv", "groups", "D"), [(1, 1, 16), (2, 2, 32), (3, 3, 64), (1, 8, 80), (2, 1, 128), (2, 3, 24)]
)
@pytest.mark.parametrize("block_size", [16, 4])
def test_every_row_attends_to_its_own_sequence(impl, Hkv, groups, D, block_size):
    cache = Cache(Hkv=Hkv, D=D, block_size=block_size)
    query = cache.queries(Hkv * groups)
    out = cache.attend(query, impl)
    assert out.shape == query.shape
    assert out.dtype == torch.float32
    assert np.abs(out.double().numpy() - truth(query, cache.sequences)).max() < 5e-6


@impls
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("Hkv", [1, 3, 40])
def test_tokens_of_one_sequence_each_see_what_is_before_them(impl, window, Hkv):
    cache = Cache(Hkv=Hkv)
    rows = [0, 2, 2, 2, 5, 5, 4, 3]
    lengths = [1, 14, 15, 16, 1, 100, 33, 17]
    query = torch.from_numpy(np.random.default_rng(3).normal(size=(8, 2 * Hkv, 32))).float()
    out = decode_attention(
        query,
        cache.keys,
        cache.values,
        cache.tables,
        torch.tensor([*rows, 0, 0], dtype=torch.int32),
        torch.tensor([*lengths, 0, 0], dtype=torch.int32),
        scale=0.3,
        window=window,
        impl=impl,
    )
    seen = [
        (key[:length], value[:length])
        for row, length in zip(rows, lengths, strict=True)
        for key, value in [cache.sequences[row]]
    ]
    assert np.abs(out.double().numpy() - truth(query, seen, window=window)).max() < 5e-6


@impls
@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 1000])
def test_a_window_hides_all_but_the_latest_positions(impl, window):
    cache = Cache()
    query = cache.queries(4)
    expected = truth(query, cache.sequences, window=window)
    assert np.abs(cache.attend(query, impl, window=window).double().numpy() - expected).max() < 2e-6


@impls
@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("window", [None, 5])
def test_a_softcap_bounds_the_scores(impl, softcap, window):
    cache = Cache()
    query = cache.queries(4)
    expected = truth(query, cache.sequences, softcap=softcap, window=window, scale=1.0)
    out = cache.attend(query, impl, softcap=softcap, window=window, scale=1.0)
    assert np.abs(out.double().numpy() - expected).max() < 5e-6


@impls
@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_costs_no_more_than_the_rounding_of_the_result(impl, dtype, epsilon):
    cache = Cache(D=64, dtype=dtype)
    query = cache.queries(6)
    expected = truth(query, cache.sequences)
    out = cache.attend(query, impl)
    assert out.dtype == dtype
    if impl == "triton" and not torch.cuda.is_available():
        epsilon *= 2  # its interpreter cuts bfloat16 off instead of rounding
    assert (np.abs(out.double().numpy() - expected) <= epsilon * np.abs(expected) + 1e-5).all()


@impls
def test_large_scores_do_not_overflow(impl):
    cache = Cache()
    query = cache.queries(4) * 1e4
    out = cache.attend(query, impl, scale=1.0)
    assert np.abs(out.double().numpy() - truth(query, cache.sequences, scale=1.0)).max() < 1e-3


@impls
def test_queries_need_not_be_contiguous(impl):
    cache = Cache()
    query = cache.queries(4)
    wide = torch.zeros(6, 7, 70)[:, 1:5, 3:35]
    wide.copy_(query)
    assert torch.equal(cache.attend(wide, impl), cache.attend(query, impl))


def test_the_result_of_a_row_does_not_depend_on_the_batch_or_the_threads():
    cache = Cache(Hkv=3, D=64)
    query = cache.queries(9)
    together = cache.attend(query, "auto")
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for row in range(len(LENGTHS)):
                (alone,) = decode_attention(
                    query[row : row + 1],
                    cache.keys,
                    cache.values,
                    cache.tables,
                    torch.tensor([row], dtype=torch.int32),
                    cache.lengths[row : row + 1],
                    scale=0.3,
                )
                assert torch.equal(alone, together[row])
    finally:
        torch.set_num_threads(threads)


@impls
@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_tokens_are_in_their_slots_and_nothing_else_changes(impl, block_size, dtype):
    num_blocks, Hkv, D, T = 7, 2, 32, 9
    rng = np.random.default_rng(2)
    keys, values = (
        torch.zeros(num_blocks, Hkv, D, block_size, dtype=dtype),
        torch.zeros(num_blocks, Hkv, block_size, D, dtype=dtype),
    )
    slots = rng.permutation(num_blocks * block_size)[:T]
    new = torch.from_numpy(rng.normal(size=(2, Hkv, T, D))).to(dtype).transpose(1, 2)  # as models give them: strided
    store_tokens(
        keys,
        values,
        new[0],
        new[1],
        torch.from_numpy(slots // block_size),
        torch.from_numpy(slots % block_size),
        impl=impl,
    )
    flat_keys = keys.permute(0, 3, 1, 2).reshape(-1, Hkv, D)
    flat_values = values.transpose(1, 2).reshape(-1, Hkv, D)
    for flat, given in ((flat_keys, new[0]), (flat_values, new[1])):
        assert torch.equal(flat[torch.from_numpy(slots)], given)
        flat[torch.from_numpy(slots)] = 0
        assert not flat.any()


@impls
@pytest.mark.parametrize(
    "change",
    [{"Hkv": 3}, {"D": 48}, {"dtype": torch.bfloat16}],
    ids=["heads", "dim", "dtype"],
)
def test_tensors_that_do_not_fit_the_cache_are_refused(impl, change):
    cache, other = Cache(), Cache(**change)
    slot = torch.zeros(1, dtype=torch.int64)
    token = torch.zeros(1, other.keys.shape[1], other.keys.shape[2], dtype=other.keys.dtype)
    fitting = torch.zeros(1, 2, 32)
    for new_keys, new_values in ((token, fitting), (fitting, token)):
        with pytest.raises(ValueError, match="do not fit a cache of"):
            store_tokens(cache.keys, cache.values, new_keys, new_values, slot, slot, impl=impl)
    with pytest.raises(ValueError, match="does not fit a cache of 2 heads of 32"):
        cache.attend(other.queries(3), impl)
