"""Products at (row, id) pairs: the PyTorch and the compiled form against plain sums in float64."""

import numpy as np
import pytest
import torch
from replay_cases import ROUNDOFF, logit_error

from keepmask.head import pair_products, pairs_dense
from keepmask.head.pairs import Pairs

IMPLS = ["gather", "numba"]
DTYPES = [torch.float32, torch.bfloat16]
T, V = 40, 70


class Case:
    """Ragged rows over some of T hidden states: rows without pairs, one pair, and more than any unrolling."""

    def __init__(self, size, dtype, seed=0, ids=torch.int32):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.tensor([0, 1, 5, 6, 7, 20, 38])
        counts = torch.tensor([0, 1, 3, 4, 5, 0, 23])
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.index = torch.repeat_interleave(torch.arange(7), counts)
        self.ids = torch.tensor(np.concatenate([rng.choice(V, n, replace=False) for n in counts.tolist()])).to(ids)
        self.pairs = Pairs(self.rows, self.ids, self.offsets)
        self.hidden = torch.randn(T, size, generator=generator).to(dtype)
        self.weight = torch.randn(V, size, generator=generator).to(dtype)
        self.grad = torch.randn(self.ids.numel(), generator=generator)

    def logits(self):
        return (self.hidden.double()[self.rows[self.index]] * self.weight.double()[self.ids.long()]).sum(-1)

    def hidden_gradient(self):
        out = torch.zeros(T, self.hidden.shape[1], dtype=torch.float64)
        return out.index_add_(
            0, self.rows[self.index], self.grad.double()[:, None] * self.weight.double()[self.ids.long()]
        )

    def weight_gradient(self):
        out = torch.zeros(V, self.hidden.shape[1], dtype=torch.float64)
        return out.index_add_(
            0, self.ids.long(), self.grad.double()[:, None] * self.hidden.double()[self.rows[self.index]]
        )


def rounded(want, dtype):
    """How far a sum of at most T float32 products, rounded once to `dtype`, may be from `want`."""
    stored = 0 if dtype == torch.float32 else ROUNDOFF[dtype] * want.abs()
    return stored + logit_error(T, want.abs().max().item())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
def test_products_are_the_plain_sums(impl, dtype, size):
    p = Case(size, dtype)
    logits = pair_products.pair_logits(p.hidden, p.weight, p.pairs, max_pairs=5, impl=impl)
    assert (logits.double() - p.logits()).abs().max() <= logit_error(size, p.logits().abs().max().item() + 1)
    out = torch.full((T, size), torch.nan, dtype=dtype)  # every row is set
    pair_products.hidden_gradient(out, p.grad, p.weight, p.pairs, max_pairs=5, impl=impl)
    want = p.hidden_gradient()
    assert ((out.double() - want).abs() <= rounded(want, dtype)).all()
    total = torch.ones(V, size, dtype=dtype)
    pair_products.add_weight_gradient(total, p.grad, p.hidden, p.pairs, impl=impl)
    want = 1 + p.weight_gradient()
    assert ((total.double() - want).abs() <= rounded(want, dtype)).all()
    sums = pair_products.weight_gradient_rows(p.grad, p.hidden, p.pairs)
    want = p.weight_gradient()[p.pairs.by_id.ids]
    assert ((sums.double() - want).abs() <= rounded(want, torch.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_products_are_the_plain_sums(dtype, monkeypatch):
    monkeypatch.setattr(pairs_dense, "_SLICE_FLOATS", 1)
    monkeypatch.setattr(pairs_dense, "_MIN_SLICE", 11)  # several slices, some without a pair
    p = Case(16, dtype)
    logits = pairs_dense.pair_logits(p.hidden, p.weight, p.pairs)
    assert (logits.double() - p.logits()).abs().max() <= logit_error(16, p.logits().abs().max().item())
    out, total = torch.full((T, 16), torch.nan, dtype=dtype), torch.ones(V, 16)
    pairs_dense.pair_gradients(p.grad, p.hidden, p.weight, p.pairs, out_hidden=out, out_weight=total)
    want = p.hidden_gradient()
    assert ((out.double() - want).abs() <= rounded(want, dtype)).all()
    want = 1 + p.weight_gradient()
    assert ((total.double() - want).abs() <= rounded(want, torch.float32)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_pairs_at_all_is_zero_everywhere(impl):
    out = torch.full((T, 8), torch.nan)
    none = torch.zeros(0, dtype=torch.int64)
    weight, empty = torch.randn(V, 8), Pairs(none, none, torch.zeros(1, dtype=torch.int64))
    logits = pair_products.pair_logits(out, weight, empty, max_pairs=5, impl=impl)
    assert logits.shape == (0,)
    pair_products.hidden_gradient(out, torch.zeros(0), weight, empty, max_pairs=5, impl=impl)
    assert torch.equal(out, torch.zeros(T, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_products_do_not_depend_on_the_number_of_threads(dtype):
    p = Case(64, dtype, ids=torch.int64)
    hidden, num_pairs = p.hidden[p.rows].repeat(200, 1), p.ids.numel()
    offsets = [p.offsets[:-1] + n * num_pairs for n in range(200)] + [torch.tensor([200 * num_pairs])]
    many = Pairs(torch.arange(7 * 200), p.ids.repeat(200), torch.cat(offsets))
    grad = p.grad.repeat(200)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty_like(hidden)
        pair_products.hidden_gradient(out, grad, p.weight, many, max_pairs=1, impl="numba")
        results.append(out)
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_compiled_products_round_to_bfloat16_as_torch_does():
    values = torch.cat(
        [torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8])]
    )
    n = values.numel()
    out = torch.empty(n, 1, dtype=torch.bfloat16)
    some = Pairs(torch.arange(n), torch.zeros(n, dtype=torch.int32), torch.arange(n + 1))
    pair_products.hidden_gradient(out, values, torch.ones(1, 1), some, max_pairs=1, impl="numba")
    torch.testing.assert_close(out[:, 0], values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_numba_reads_contiguous_float32_and_bfloat16_on_the_cpu_only():
    assert pair_products.numba_can_read(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16))
    for other in (torch.zeros(2, 3).T, torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3, device="meta")):
        assert not pair_products.numba_can_read(torch.zeros(2, 3), other)


def test_arithmetic_is_float32_or_wider():
    assert pair_products.wide(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert pair_products.wide(dtype) == torch.float32
