"""Softmax over ragged rows: the PyTorch and the compiled form against rows taken one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepmask.compiled.jit import jit_reassociated
from keepmask.compiled.numerics import exp
from keepmask.head import pair_rows

IMPLS = st.sampled_from(["gather", "numba"])
VALUES = st.floats(-200, 200, width=32)
ROWS = st.lists(st.lists(VALUES, max_size=9), max_size=6)


def flat(rows):
    z = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return z, torch.repeat_interleave(torch.arange(len(rows)), offsets.diff()), offsets


def target_positions(rows, offsets):
    """The last pair of each row; -1 for every third row and those without pairs."""
    return torch.tensor(
        [end - 1 if row and t % 3 else -1 for t, (row, end) in enumerate(zip(rows, offsets[1:].tolist(), strict=True))],
        dtype=torch.int64,
    )


@given(ROWS, IMPLS)
def test_statistics_are_those_of_each_row(rows, impl):
    z, index, offsets = flat(rows)
    positions = target_positions(rows, offsets)
    peak, total, weighted, target = pair_rows.row_stats(z, index, offsets, positions, impl=impl)
    assert total.dtype == weighted.dtype == torch.float64
    for t, row in enumerate(rows):
        assert target[t] == (row[-1] if positions[t] >= 0 else 0)
        if not row:
            assert (peak[t], total[t], weighted[t]) == (-torch.inf, 0, 0)
            continue
        centred = torch.tensor(row, dtype=torch.float32).double() - max(row)
        assert peak[t] == max(row)
        assert total[t].item() == pytest.approx(centred.exp().sum().item(), rel=1e-6)
        assert weighted[t].item() == pytest.approx((centred * centred.exp()).sum().item(), rel=1e-5, abs=1e-6)


@given(ROWS, IMPLS)
def test_members_are_log_probabilities(rows, impl):
    rows = [row for row in rows if row]
    z, index, offsets = flat(rows)
    peak, total, _, _ = pair_rows.row_stats(z, index, offsets, target_positions(rows, offsets), impl=impl)
    got = pair_rows.member_logprobs(z, index, offsets, peak, total.log().float(), impl=impl)
    want = [torch.tensor(row, dtype=torch.float64).log_softmax(0) for row in rows]
    torch.testing.assert_close(got.double(), torch.cat([*want, torch.zeros(0).double()]), rtol=1e-6, atol=1e-5)


@given(ROWS, IMPLS, st.booleans(), st.booleans())
def test_pair_gradient_is_the_derivative(rows, impl, for_targets, for_entropy):
    rows = [row for row in rows if row]
    z, index, offsets = flat(rows)
    positions = target_positions(rows, offsets)
    leaf = z.double().requires_grad_()
    logprobs = torch.cat([*(row.log_softmax(0) for row in leaf.split(offsets.diff().tolist())), leaf[:0]])
    probs = logprobs.exp()
    entropy = -torch.zeros(len(rows)).double().index_add(0, index, probs * logprobs.clamp(min=-1e4))
    weights = torch.linspace(-1, 2, 2 * len(rows)).view(2, -1)
    normalizer = torch.stack([*(row.logsumexp(0) for row in leaf.split(offsets.diff().tolist())), leaf.new_zeros(())])[
        :-1
    ]
    # A target held elsewhere has a logit that is not among these, but the normaliser is.
    targets = torch.where(positions >= 0, leaf[positions] if rows else 0.0, 0.0) - normalizer
    loss = (weights[0] * targets).sum() * for_targets + (weights[1] * entropy).sum() * for_entropy
    (want,) = torch.autograd.grad(loss, leaf) if for_targets or for_entropy else (torch.zeros_like(leaf),)
    got = pair_rows.pair_gradient(
        logprobs.detach().float(), index, offsets, positions,
        weights[0] if for_targets else None, (weights[1], entropy.detach().float()) if for_entropy else None,
        impl=impl,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["gather", "numba"])
def test_negligible_probabilities_leave_no_denormal_numbers(impl):
    z = torch.tensor([0.0, -70.0, -90.0, -104.0])
    index, offsets, positions = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 4]), torch.tensor([0])
    grad = pair_rows.pair_gradient(
        z, index, offsets, positions, torch.ones(1), (torch.ones(1), torch.zeros(1)), impl=impl
    )
    assert grad[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("impl", ["gather", "numba"])
def test_a_nan_reaches_every_score_of_its_row(impl):
    z, index, offsets = flat([[1.0, float("nan"), 0.0], [1.0, 2.0]])
    _, total, weighted, _ = pair_rows.row_stats(z, index, offsets, torch.tensor([0, 4]), impl=impl)
    assert total.isnan().tolist() == weighted.isnan().tolist() == [True, False]


def test_the_exponential_is_accurate_to_float32():
    @jit_reassociated
    def exponentials(x, out):
        for i in range(x.size):
            out[i] = exp(x[i])

    x = torch.linspace(-80, 80, 100_001)
    out = torch.empty_like(x)
    exponentials(x.numpy(), out.numpy())
    assert (out.double() / x.double().exp() - 1).abs().max() < 2 * 2**-23
    nan = torch.tensor([torch.nan])
    exponentials(nan.numpy(), nan.numpy())
    assert nan.isnan()
