"""Entropy and KL on ragged supports, against dense NumPy rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepmask import MaskError
from keepmask.replay import stats
from keepmask.replay.support import Support

ROWS = st.lists(st.lists(st.floats(-8, 8), max_size=6), min_size=1, max_size=6)


def support_of(rows):
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    ids = np.concatenate([np.arange(len(row)) for row in rows]) if offsets[-1] else np.zeros(0)
    return Support(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets))


def log_softmax(row):
    row = np.asarray(row, np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum()) if row.size else row


def flat(rows):
    return torch.tensor(np.concatenate(rows) if rows else [], dtype=torch.float64)


@given(ROWS)
def test_entropy_is_that_of_each_row(rows):
    logprobs = [log_softmax(row) for row in rows]
    expected = [-(np.exp(row) * row).sum() for row in logprobs]
    torch.testing.assert_close(stats.entropy(flat(logprobs), support_of(rows)), torch.tensor(expected))


@given(ROWS, st.integers(0, 2**32))
def test_exact_kl_is_that_of_each_row_and_never_negative(rows, seed):
    rng = np.random.default_rng(seed)
    policy = [log_softmax(row) for row in rows]
    reference = [log_softmax(np.asarray(row) + rng.normal(size=len(row))) for row in rows]
    expected = [(np.exp(p) * (p - q)).sum() for p, q in zip(policy, reference, strict=True)]
    kl = stats.exact_kl(flat(policy), flat(reference), support_of(rows))
    torch.testing.assert_close(kl, torch.tensor(expected), atol=1e-12, rtol=1e-9)
    assert (kl >= -1e-12).all()


def test_singletons_and_empty_rows_have_no_entropy_and_no_kl():
    support = support_of([[0.0], [], [0.0]])
    assert stats.entropy(torch.zeros(2), support).tolist() == [0, 0, 0]
    assert stats.exact_kl(torch.zeros(2), torch.zeros(2), support).tolist() == [0, 0, 0]


def test_an_id_of_probability_zero_adds_nothing_to_value_or_gradient():
    logprobs = torch.tensor([0.0, -math.inf], requires_grad=True)
    support = support_of([[0.0, 0.0]])
    entropy = stats.entropy(logprobs, support)
    kl = stats.exact_kl(logprobs, torch.tensor([-math.log(2), -math.inf]), support)
    assert entropy.item() == 0
    assert kl.item() == pytest.approx(math.log(2))
    (entropy + kl).sum().backward()
    assert logprobs.grad.isfinite().all()


def test_entropy_and_kl_pass_the_gradient_check():
    support = support_of([[0.0] * 3, [], [0.0] * 2])
    policy = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 2
    reference = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2
    assert torch.autograd.gradcheck(lambda p: stats.entropy(p, support), policy.requires_grad_())
    assert torch.autograd.gradcheck(lambda p: stats.exact_kl(p, reference, support), policy)


def test_the_estimators_average_to_the_exact_kl_as_their_docstrings_say():
    rng = np.random.default_rng(0)
    policy, reference = log_softmax(rng.normal(size=20)), log_softmax(rng.normal(size=20))
    probs = np.exp(policy)
    exact = (probs * (policy - reference)).sum()
    p, q = torch.tensor(policy), torch.tensor(reference)

    def mean(estimator):
        return (torch.tensor(probs) * estimator(p, q)).sum().item()

    assert mean(stats.k1) == pytest.approx(exact)
    assert mean(stats.k3) == pytest.approx(exact)
    assert mean(stats.k2) == pytest.approx((probs * (policy - reference) ** 2).sum() / 2)
    assert (stats.k3(p, q) >= 0).all()


def test_k3_keeps_tiny_differences():
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12])
    assert stats.k3(policy, reference).item() == pytest.approx(2**-25, rel=1e-2)


def test_the_masked_mean_ignores_what_is_masked():
    values = torch.tensor([1.0, math.nan, 3.0])
    assert stats.masked_mean(values, torch.tensor([1, 0, 1])).item() == 2
    assert stats.masked_mean(values, torch.zeros(3)).item() == 0


def test_values_that_do_not_pair_with_the_support_are_refused():
    with pytest.raises(MaskError, match="3 pairs"):
        stats.entropy(torch.zeros(2), support_of([[0.0, 0.0, 0.0]]))
