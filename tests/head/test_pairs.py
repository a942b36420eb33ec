"""Products at (row, id) pairs: the PyTorch and the compiled form against plain sums in float64."""

import numpy as np
import pytest
import torch
from replay_cases import ROUNDOFF, logit_error

from keepmask.head import pairs, pairs_dense

IMPLS = ["gather", "numba"]
DTYPES = [torch.float32, torch.bfloat16]
T, V = 40, 70


class Pairs:
    """Ragged rows over some of T hidden states: rows without pairs, one pair, and more than any unrolling."""

    def __init__(self, size, dtype, seed=0, ids=torch.int32):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.tensor([0, 1, 5, 6, 7, 20, 38])
        counts = torch.tensor([0, 1, 3, 4, 5, 0, 23])
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.index = torch.repeat_interleave(torch.arange(7), counts)
        self.ids = torch.tensor(np.concatenate([rng.choice(V, n, replace=False) for n in counts.tolist()])).to(ids)
        self.hidden = torch.randn(T, size, generator=generator).to(dtype)
        self.weight = torch.randn(V, size, generator=generator).to(dtype)
        self.grad = torch.randn(self.ids.numel(), generator=generator)
        self.order = torch.argsort(self.ids, stable=True)
        self.distinct, counts = torch.unique_consecutive(self.ids[self.order].long(), return_counts=True)
        self.bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

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
    p = Pairs(size, dtype)
    logits = pairs.pair_logits(p.hidden, p.rows, p.weight, p.ids, p.offsets, p.index, max_pairs=5, impl=impl)
    assert (logits.double() - p.logits()).abs().max() <= logit_error(size, p.logits().abs().max().item() + 1)
    out = torch.full((T, size), torch.nan, dtype=dtype)  # every row is set
    pairs.hidden_gradient(out, p.rows, p.grad, p.weight, p.ids, p.offsets, max_pairs=5, impl=impl)
    want = p.hidden_gradient()
    assert ((out.double() - want).abs() <= rounded(want, dtype)).all()
    total = torch.ones(V, size, dtype=dtype)
    pairs.add_weight_gradient(
        total, p.distinct, p.grad, p.order, p.hidden, p.rows, p.index[p.order], p.bounds, impl=impl
    )
    want = 1 + p.weight_gradient()
    assert ((total.double() - want).abs() <= rounded(want, dtype)).all()
    sums = pairs.weight_gradient_rows(p.grad, p.order, p.hidden, p.rows, p.index[p.order], p.bounds)
    want = p.weight_gradient()[p.distinct]
    assert ((sums.double() - want).abs() <= rounded(want, torch.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_products_are_the_plain_sums(dtype, monkeypatch):
    monkeypatch.setattr(pairs_dense, "_SLICE_FLOATS", 1)
    monkeypatch.setattr(pairs_dense, "_MIN_SLICE", 11)  # several slices, some without a pair
    p = Pairs(16, dtype)
    ids, index = p.ids[p.order].long(), p.index[p.order]
    logits = pairs_dense.pair_logits(p.hidden, p.rows, p.weight, ids, index)
    torch.testing.assert_close(logits.double(), p.logits()[p.order], rtol=0, atol=1e-5)
    out, total = torch.full((T, 16), torch.nan, dtype=dtype), torch.ones(V, 16)
    pairs_dense.pair_gradients(
        p.grad[p.order], p.hidden, p.rows, p.weight, ids, index, out_hidden=out, out_weight=total
    )
    want = p.hidden_gradient()
    assert ((out.double() - want).abs() <= rounded(want, dtype)).all()
    torch.testing.assert_close(total.double(), 1 + p.weight_gradient(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_pairs_at_all_is_zero_everywhere(impl):
    out = torch.full((T, 8), torch.nan)
    none = torch.zeros(0, dtype=torch.int64)
    weight, offsets = torch.randn(V, 8), torch.zeros(1, dtype=torch.int64)
    logits = pairs.pair_logits(out, none, weight, none, offsets, none, max_pairs=5, impl=impl)
    assert logits.shape == (0,)
    pairs.hidden_gradient(out, none, torch.zeros(0), weight, none, offsets, max_pairs=5, impl=impl)
    assert torch.equal(out, torch.zeros(T, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_products_do_not_depend_on_the_number_of_threads(dtype):
    p = Pairs(64, dtype, ids=torch.int64)
    many = Pairs(64, dtype)
    many.ids = p.ids.repeat(200)
    many.rows = torch.arange(7 * 200)
    many.hidden = p.hidden[p.rows].repeat(200, 1)
    many.offsets = torch.cat(
        [p.offsets[:-1] + n * p.ids.numel() for n in range(200)] + [torch.tensor([200 * p.ids.numel()])]
    )
    grad = p.grad.repeat(200)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty_like(many.hidden)
        pairs.hidden_gradient(out, many.rows, grad, p.weight, many.ids, many.offsets, max_pairs=1, impl="numba")
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
    pairs.hidden_gradient(
        out, torch.arange(n), values, torch.ones(1, 1), torch.zeros(n, dtype=torch.int32), torch.arange(n + 1),
        max_pairs=1, impl="numba",
    )  # fmt: skip
    torch.testing.assert_close(out[:, 0], values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_numba_reads_contiguous_float32_and_bfloat16_on_the_cpu_only():
    assert pairs.numba_can_read(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16))
    for other in (torch.zeros(2, 3).T, torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, 3, device="meta")):
        assert not pairs.numba_can_read(torch.zeros(2, 3), other)


def test_arithmetic_is_float32_or_wider():
    assert pairs.wide(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert pairs.wide(dtype) == torch.float32
