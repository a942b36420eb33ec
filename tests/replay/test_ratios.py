"""Importance weights against loops over tokens written here."""

import math

import pytest
import torch

from keepmask import MaskError
from keepmask.replay import ratios

# Three sequences of 4, 1 and 3 tokens; ratios chosen on both sides of every bound.
RATIOS = [0.9, 3.0, 0.4, 1.5, 7.0, 0.1, 1.0, 2.0]
LOSS_MASK = [1, 1, 1, 0, 1, 1, 1, 1]
CU_SEQLENS = torch.tensor([0, 4, 5, 8], dtype=torch.int32)


def packed(dtype=torch.float32):
    rollout = torch.linspace(-3, -0.5, 8, dtype=dtype)
    policy = rollout + torch.tensor(RATIOS, dtype=dtype).log()
    return policy, rollout, torch.tensor(LOSS_MASK)


def padded():
    """The same tokens as [B, L]; NaN and -inf where nothing is."""
    policy, rollout, loss_mask = packed()
    shape = (3, 4)
    wide_policy, wide_rollout = torch.full(shape, math.nan), torch.full(shape, -math.inf)
    wide_mask = torch.zeros(shape, dtype=torch.int64)
    for s, (start, stop) in enumerate([(0, 4), (4, 5), (5, 8)]):
        wide_policy[s, : stop - start] = policy[start:stop]
        wide_rollout[s, : stop - start] = rollout[start:stop]
        wide_mask[s, : stop - start] = loss_mask[start:stop]
    return wide_policy, wide_rollout, wide_mask


def test_tis_cuts_token_ratios_at_the_cap():
    result = ratios.tis(*packed(), cap=2.0)
    expected = [min(r, 2.0) if m else 0.0 for r, m in zip(RATIOS, LOSS_MASK, strict=True)]
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert result.kept.tolist() == [bool(m) for m in LOSS_MASK]
    assert result.truncated_share.item() == pytest.approx(2 / 7)
    assert result.rejected_share.item() == 0


def test_mis_rejects_token_ratios_above_the_cap():
    policy, rollout, loss_mask = packed(torch.float64)
    result = ratios.mis(policy, rollout, loss_mask, cap=2.5)
    expected = [r if m and r <= 2.5 else 0.0 for r, m in zip(RATIOS, LOSS_MASK, strict=True)]
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64))
    assert result.kept.tolist() == [w > 0 for w in expected]
    assert result.rejected_share.item() == pytest.approx(2 / 7)


def test_icepop_rejects_on_both_sides():
    result = ratios.icepop(*packed(), low=0.5, high=5.0)
    expected = [r if m and 0.5 <= r <= 5.0 else 0.0 for r, m in zip(RATIOS, LOSS_MASK, strict=True)]
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert result.rejected_share.item() == pytest.approx(3 / 7)


def sequence_products():
    return [0.9 * 3.0 * 0.4] * 4 + [7.0] + [0.1 * 1.0 * 2.0] * 3


def test_sequence_tis_cuts_the_product_over_the_loss_tokens():
    result = ratios.sequence_tis(*packed(), cap=2.0, cu_seqlens=CU_SEQLENS)
    expected = [min(p, 2.0) if m else 0.0 for p, m in zip(sequence_products(), LOSS_MASK, strict=True)]
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert result.truncated_share.item() == pytest.approx(1 / 7)


def test_sequence_mis_rejects_whole_sequences():
    result = ratios.sequence_mis(*packed(), cap=2.0, cu_seqlens=CU_SEQLENS)
    expected = [p if m and p <= 2.0 else 0.0 for p, m in zip(sequence_products(), LOSS_MASK, strict=True)]
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert result.kept.tolist() == [True, True, True, False, False, True, True, True]


@pytest.mark.parametrize("weigh", [ratios.tis, ratios.mis, ratios.icepop, ratios.sequence_tis, ratios.sequence_mis])
def test_padded_tokens_weigh_what_packed_ones_do(weigh):
    boundaries = {"cu_seqlens": CU_SEQLENS} if weigh.__name__.startswith("sequence") else {}
    flat, wide = weigh(*packed(), **boundaries), weigh(*padded())
    for s, (start, stop) in enumerate([(0, 4), (4, 5), (5, 8)]):
        torch.testing.assert_close(wide.weights[s, : stop - start], flat.weights[start:stop])
        assert not wide.weights[s, stop - start :].any()
    assert wide.truncated_share == flat.truncated_share
    assert wide.rejected_share == flat.rejected_share


def test_a_ratio_beyond_float32_is_cut_or_rejected_and_never_nan():
    policy, rollout, loss_mask = torch.tensor([0.0, 0.0]), torch.tensor([-500.0, -1.0]), torch.ones(2)
    assert ratios.tis(policy, rollout, loss_mask, cap=3.0).weights.tolist() == pytest.approx([3.0, math.e])
    assert ratios.mis(policy, rollout, loss_mask, cap=3.0).weights.tolist() == pytest.approx([0.0, math.e])


def test_weights_pass_no_gradient_and_the_log_ratio_does():
    policy, rollout, loss_mask = packed()
    policy.requires_grad_()
    assert not ratios.tis(policy, rollout, loss_mask).weights.requires_grad
    ratios.log_ratio(policy, rollout, loss_mask).sum().backward()
    assert policy.grad.tolist() == LOSS_MASK


def test_what_is_outside_the_loss_mask_never_reaches_the_gradient():
    policy = torch.tensor([-math.inf, -1.0], requires_grad=True)
    ratios.log_ratio(policy, torch.tensor([-math.inf, -2.0]), torch.tensor([0, 1])).exp().sum().backward()
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ratios.tis(*packed(), cap=0.5), "cap=0.5: must be >= 1"),
        (lambda: ratios.icepop(*packed(), low=2.0), "low=2.0, high=5.0"),
        (lambda: ratios.sequence_tis(*packed()), "give cu_seqlens for packed tokens"),
        (lambda: ratios.sequence_tis(*padded(), cu_seqlens=CU_SEQLENS), "packed tokens are"),
        (lambda: ratios.log_ratio(torch.zeros(3), torch.zeros(2), torch.zeros(3)), "must have one shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(MaskError, match=message):
        call()
