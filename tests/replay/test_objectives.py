"""Objectives against their papers' formulas, written as loops over sequences and tokens in float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from keepmask import MaskError
from keepmask.replay import objectives
from keepmask.replay.support import Support

LENGTHS = [5, 1, 4, 3]
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
CU_SEQLENS = torch.tensor(STARTS, dtype=torch.int32)
BUDGET = 8

SEQUENCE_OBJECTIVES = {
    "grpo": {},
    "dr_grpo": {"max_tokens": BUDGET},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
}
TOKEN_OBJECTIVES = {"dapo": {}, "cispo": {"clip_high": 0.3, "clip_low": 0.4}}
ALL = SEQUENCE_OBJECTIVES | TOKEN_OBJECTIVES


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.1, STARTS[-1])
    policy = old + rng.normal(size=STARTS[-1]) * 0.4
    advantages = np.repeat(rng.normal(size=len(LENGTHS)), LENGTHS)
    loss_mask = (rng.random(STARTS[-1]) < 0.7).astype(np.int64)
    loss_mask[STARTS[1]] = 0  # the second sequence has no loss token
    loss_mask[0] = 1
    return policy, old, advantages, loss_mask


def as_tensors(arrays):
    policy, old, advantages, loss_mask = (torch.tensor(array) for array in arrays)
    return policy.requires_grad_(), old, advantages, loss_mask


def call(name, arrays, **extra):
    boundaries = {"cu_seqlens": CU_SEQLENS} if name in SEQUENCE_OBJECTIVES and arrays[0].ndim == 1 else {}
    return getattr(objectives, name)(*arrays, **ALL[name], **boundaries, **extra)


def pessimistic(r, a, low, high):
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def sequences(loss_mask):
    spans = [range(STARTS[s], STARTS[s + 1]) for s in range(len(LENGTHS))]
    spans = [[t for t in span if loss_mask[t]] for span in spans]
    return [span for span in spans if span]


def by_definition(name, policy, old, advantages, loss_mask):
    """The loss as its paper writes it."""
    spans = sequences(loss_mask)
    r = np.exp(policy - old)
    if name == "grpo":
        return np.mean([np.mean([pessimistic(r[t], advantages[t], 0.2, 0.2) for t in span]) for span in spans])
    if name == "dr_grpo":
        total = sum(pessimistic(r[t], advantages[t], 0.2, 0.2) for span in spans for t in span)
        return total / len(spans) / BUDGET
    if name == "dapo":
        return np.mean([pessimistic(r[t], advantages[t], 0.2, 0.28) for span in spans for t in span])
    if name == "gspo":
        s = [np.exp(np.mean([policy[t] - old[t] for t in span])) for span in spans]
        return np.mean([pessimistic(s_i, advantages[span[0]], 0.1, 0.15) for s_i, span in zip(s, spans, strict=True)])
    return np.mean([-min(max(r[t], 0.6), 1.3) * advantages[t] * policy[t] for span in spans for t in span])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_each_objective_is_its_formula(name, seed):
    arrays = tokens(seed)
    assert call(name, as_tensors(arrays)).loss.item() == pytest.approx(by_definition(name, *arrays), rel=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_the_gradient_is_that_of_the_formula(name):
    arrays = tokens(1)
    tensors = as_tensors(arrays)
    call(name, tensors).loss.backward()
    step = 1e-6
    for t in range(STARTS[-1]):
        up, down = arrays[0].copy(), arrays[0].copy()
        up[t] += step
        down[t] -= step
        slope = (by_definition(name, up, *arrays[1:]) - by_definition(name, down, *arrays[1:])) / (2 * step)
        assert tensors[0].grad[t].item() == pytest.approx(slope, abs=1e-7)


def test_cispo_weighs_every_tokens_score_with_its_bounded_ratio():
    arrays = tokens(2)
    tensors = as_tensors(arrays)
    call("cispo", tensors).loss.backward()
    policy, old, advantages, loss_mask = arrays
    expected = -np.clip(np.exp(policy - old), 0.6, 1.3) * advantages * loss_mask / loss_mask.sum()
    np.testing.assert_allclose(tensors[0].grad.numpy(), expected)


def padded(arrays):
    """The same tokens as [B, L], with NaN and infinities where nothing is."""
    wide = [np.full((len(LENGTHS), max(LENGTHS)), fill) for fill in (-np.inf, np.nan, np.nan, 0)]
    for target, source in zip(wide, arrays, strict=True):
        for s, length in enumerate(LENGTHS):
            target[s, :length] = source[STARTS[s] : STARTS[s + 1]]
    return wide


@pytest.mark.parametrize("name", ALL)
def test_padded_and_packed_tokens_have_one_loss_and_one_gradient(name):
    arrays = tokens(3)
    flat, wide = as_tensors(arrays), as_tensors(padded(arrays))
    packed_loss, padded_loss = call(name, flat), call(name, wide)
    assert padded_loss.loss.item() == pytest.approx(packed_loss.loss.item(), rel=1e-12)
    assert padded_loss.clip_fraction == packed_loss.clip_fraction
    packed_loss.loss.backward()
    padded_loss.loss.backward()
    for s, length in enumerate(LENGTHS):
        torch.testing.assert_close(wide[0].grad[s, :length], flat[0].grad[STARTS[s] : STARTS[s + 1]])
        assert not wide[0].grad[s, length:].any()


@pytest.mark.parametrize("name", ALL)
def test_micro_batches_add_up_with_the_denominator_of_the_whole(name):
    arrays = tokens(4)
    whole = call(name, as_tensors(arrays))
    count = len(sequences(arrays[3])) if name in SEQUENCE_OBJECTIVES else int(arrays[3].sum())
    total = 0.0
    for s in range(len(LENGTHS)):
        part = as_tensors([array[STARTS[s] : STARTS[s + 1]] for array in arrays])
        boundaries = {"cu_seqlens": torch.tensor([0, LENGTHS[s]])} if name in SEQUENCE_OBJECTIVES else {}
        total += getattr(objectives, name)(*part, **ALL[name], **boundaries, denominator=count).loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_weights_multiply_and_penalties_add(name):
    arrays = tokens(5)
    weights, penalty = torch.linspace(0.2, 2, STARTS[-1]).double(), torch.linspace(0, 1, STARTS[-1]).double()
    plain = call(name, as_tensors(arrays))
    result = call(name, as_tensors(arrays), weights=weights, penalty=penalty)
    expected = torch.where(torch.tensor(arrays[3]).bool(), plain.token_losses * weights + penalty, 0.0)
    torch.testing.assert_close(result.token_losses, expected)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_without_loss_tokens_has_loss_zero_and_no_gradient(name):
    policy, old, advantages, loss_mask = tokens()
    tensors = as_tensors((policy, old, advantages, loss_mask * 0))
    result = call(name, tensors)
    result.loss.backward()
    assert result.loss.item() == 0
    assert not tensors[0].grad.any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_the_clip_fraction_counts_loss_tokens_that_pass_no_gradient(name):
    arrays = tokens(6)
    tensors = as_tensors(arrays)
    result = call(name, tensors)
    result.loss.backward()
    stopped = (tensors[0].grad == 0) & tensors[3].bool()
    assert result.clip_fraction.item() == pytest.approx(stopped.sum().item() / arrays[3].sum())


def test_on_policy_every_clipped_objective_has_the_gradient_of_reinforce():
    _, old, advantages, loss_mask = tokens(7)
    for name in ("dapo", "cispo"):
        tensors = as_tensors((old, old, advantages, loss_mask))
        call(name, tensors).loss.backward()
        np.testing.assert_allclose(tensors[0].grad.numpy(), -advantages * loss_mask / loss_mask.sum())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("difference", [100.0, -100.0, 800.0])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_one_far_token_makes_no_loss_infinite(name, difference, advantage):
    policy, old, advantages, loss_mask = tokens()
    old[0], policy[0], advantages[:] = -difference - 1, -1.0, advantage
    result = call(name, as_tensors((policy, old, advantages, loss_mask)))
    leaf = torch.tensor(policy, requires_grad=True)
    call(name, (leaf, *as_tensors((policy, old, advantages, loss_mask))[1:])).loss.backward()
    assert result.loss.isfinite()
    assert leaf.grad.isfinite().all()
    log_ratio = (policy - old) * loss_mask
    if name == "gspo":  # the mean over the sequence
        log_ratio = np.concatenate(
            [
                np.full(len(x), x.sum() / max(1, len(m[m > 0])))
                for x, m in zip(np.split(log_ratio, STARTS[1:-1]), np.split(loss_mask, STARTS[1:-1]), strict=True)
            ]
        )
    far = ((np.abs(log_ratio) > 20) & (loss_mask > 0)).sum()
    assert far >= 1
    assert result.clamped_fraction * loss_mask.sum() == pytest.approx(far)
    if name != "gspo":
        assert result.ratio[0].item() == pytest.approx(math.exp(math.copysign(20, difference)))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_delta_bounds_the_ratio_of_negative_advantages(name):
    policy, old, advantages, loss_mask = tokens(3)
    advantages[:], loss_mask[:] = -1.0, 1
    policy = old + np.linspace(-1, 2, policy.size)
    free, bounded = (call(name, as_tensors((policy, old, advantages, loss_mask)), delta=d) for d in (None, 1.5))
    ratio = free.ratio.numpy()
    assert (ratio > 1.5).any()
    want = np.maximum(ratio, 1 - {"gspo": 0.1}.get(name, 0.2))
    np.testing.assert_allclose(free.token_losses, want, rtol=1e-12)
    np.testing.assert_allclose(bounded.token_losses, np.minimum(want, 1.5), rtol=1e-12)
    assert bounded.clip_fraction * ratio.size == pytest.approx(
        float(free.clip_fraction) * ratio.size + (ratio > 1.5).sum()
    )
    with pytest.raises(MaskError, match=r"delta=1\.0: must be above"):
        call(name, as_tensors((policy, old, advantages, loss_mask)), delta=1.0)


# --- score centering


def ragged_policy(seed):
    """Logits of a policy and of a sampler over ragged supports, and a drawn pair in each row."""
    rng = np.random.default_rng(seed)
    counts = np.array([4, 1, 3, 6, 2])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    policy = torch.tensor(rng.normal(size=offsets[-1]), requires_grad=True)
    sampler = [torch.tensor(rng.normal(size=count)).log_softmax(0) for count in counts]
    support = Support(torch.arange(offsets[-1]), torch.tensor(offsets))
    return policy, sampler, support, offsets


def members(logits, offsets):
    rows = [logits[start:stop].log_softmax(0) for start, stop in pairwise(offsets)]
    return torch.cat(rows)


def centred_gradient(policy, sampler, support, offsets, drawn, advantages, weight=None):
    logprobs, pairs = members(policy, offsets), torch.tensor(drawn) + torch.tensor(offsets[:-1])
    rollout = torch.cat(sampler)
    result = objectives.score_centering(
        logprobs[pairs],
        rollout[pairs],
        advantages,
        torch.ones(len(drawn)),
        policy_member_logprobs=logprobs,
        rollout_member_logprobs=rollout,
        support=support,
        weight=weight,
    )
    return torch.autograd.grad(result.loss, policy)[0]


def test_under_the_sampler_a_constant_reward_moves_nothing():
    policy, sampler, support, offsets = ragged_policy(0)
    advantages = torch.full((5,), 1.7, dtype=torch.float64)
    row = slice(offsets[2], offsets[3])
    mean = torch.zeros(3, dtype=torch.float64)
    for j in range(3):  # every possible draw of the third token
        gradient = centred_gradient(policy, sampler, support, offsets, [0, 0, j, 0, 0], advantages)[row]
        assert gradient.abs().max() > 1e-3
        mean += sampler[2][j].exp() * gradient
    assert mean.abs().max() < 1e-12


def test_the_centred_score_is_the_score_minus_its_mean_under_the_sampler():
    policy, sampler, support, offsets = ragged_policy(1)
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7], dtype=torch.float64)
    drawn = [1, 0, 2, 4, 0]
    gradient = centred_gradient(policy, sampler, support, offsets, drawn, advantages)
    for t, j in enumerate(drawn):
        row = policy[offsets[t] : offsets[t + 1]].detach()
        p, q = row.softmax(0), sampler[t].exp()
        score_of = torch.eye(row.numel(), dtype=torch.float64) - p  # row j: d log p_j / d logits
        expected = -advantages[t] * (score_of[j] - q @ score_of) / 5
        torch.testing.assert_close(gradient[offsets[t] : offsets[t + 1]], expected)


def test_score_centering_composes_with_truncated_weights():
    policy, sampler, support, offsets = ragged_policy(2)
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7], dtype=torch.float64)
    drawn = [1, 0, 2, 4, 0]
    gradient = centred_gradient(policy, sampler, support, offsets, drawn, advantages, lambda r: r.clamp(max=1.2))
    for t, j in enumerate(drawn):
        row = policy[offsets[t] : offsets[t + 1]].detach()
        p, q = row.softmax(0), sampler[t].exp()
        weights = (p / q).clamp(max=1.2)
        score_of = torch.eye(row.numel(), dtype=torch.float64) - p
        expected = -advantages[t] * (weights[j] * score_of[j] - (q * weights) @ score_of) / 5
        torch.testing.assert_close(gradient[offsets[t] : offsets[t + 1]], expected)


def test_with_the_samplers_own_weights_centering_changes_no_gradient():
    _, sampler, support, offsets = ragged_policy(3)
    policy = torch.cat(sampler).requires_grad_()
    advantages = torch.ones(5, dtype=torch.float64)
    drawn = [1, 0, 2, 4, 0]
    gradient = centred_gradient(policy, sampler, support, offsets, drawn, advantages)
    logprobs = members(policy, offsets)[torch.tensor(drawn) + torch.tensor(offsets[:-1])]
    torch.testing.assert_close(gradient, torch.autograd.grad(-logprobs.mean(), policy)[0])


def test_score_centering_refuses_loss_tokens_whose_sampler_is_unknown():
    support = Support(torch.tensor([3, 4]), torch.tensor([0, 2, 2]))
    pairs = torch.full((2,), -math.log(2))
    arguments = {"policy_member_logprobs": pairs, "rollout_member_logprobs": pairs, "support": support}
    logprobs, advantages = torch.tensor([-0.7, -3.0]), torch.ones(2)
    with pytest.raises(MaskError, match="whole-vocabulary rows"):
        objectives.score_centering(logprobs, logprobs, advantages, torch.tensor([1, 1]), **arguments)
    assert objectives.score_centering(
        logprobs, logprobs, advantages, torch.tensor([1, 0]), **arguments
    ).loss.item() == pytest.approx(-(-0.7 + math.log(2)), rel=1e-5)


@pytest.mark.parametrize("weight", [None, lambda r: r, lambda r: r.clamp(max=2.0)])
def test_ids_the_sampler_all_but_never_draws_weigh_nothing(weight):
    # exp(-120) is 0 in float32, and the ratio to it infinite.
    support = Support(torch.tensor([3, 4]), torch.tensor([0, 2]))
    policy = torch.tensor([0.3, -0.2]).log_softmax(0).requires_grad_()
    rollout = torch.tensor([0.0, -120.0])
    result = objectives.score_centering(
        policy[:1], rollout[:1], torch.ones(1), torch.ones(1), policy_member_logprobs=policy,
        rollout_member_logprobs=rollout, support=support, weight=weight,
    )  # fmt: skip
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0, abs=1e-6)  # the one id drawn is all that is expected
    assert policy.grad.abs().max() < 1e-6


# --- advantages


def test_advantages_are_taken_within_groups_in_any_order():
    rewards = torch.tensor([1.0, 5.0, 0.0, 1.0, 7.0, 2.0])
    groups = torch.tensor([4, 9, 4, 4, 9, 2])
    centred = objectives.center(rewards, groups)
    torch.testing.assert_close(centred, torch.tensor([1 / 3, -1.0, -2 / 3, 1 / 3, 1.0, 0.0]))
    standard = objectives.standardize(rewards, groups, epsilon=0.0)
    for group in (4, 9):
        rows = groups == group
        expected = (rewards[rows] - rewards[rows].mean()) / rewards[rows].std()
        torch.testing.assert_close(standard[rows], expected)


def test_groups_of_equal_rewards_and_groups_of_one_have_no_advantage():
    assert objectives.standardize(torch.tensor([2.0, 2.0, 5.0]), torch.tensor([0, 0, 1])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("reward", [0.7, 10.1, 1 / 3, -1e7, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_have_no_advantage_at_all(reward, dtype):
    rewards, groups = torch.full((11,), reward, dtype=dtype), torch.tensor([0] * 8 + [1] * 3)
    for advantages in (objectives.standardize(rewards, groups), objectives.center(rewards, groups)):
        assert advantages.dtype == dtype
        assert not advantages.any()


def test_rewards_may_be_integers_and_ones_that_are_not_finite_are_left_out_of_their_group():
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    whole = objectives.standardize(torch.tensor([1, 0, 1, 1, 5, 3]), groups)
    torch.testing.assert_close(whole, objectives.standardize(torch.tensor([1.0, 0, 1, 1, 5, 3]), groups))
    for bad in (torch.nan, torch.inf, -torch.inf):
        got = objectives.standardize(torch.tensor([1.0, bad, 0.0, 1.0, bad, bad]), groups)
        rest = objectives.standardize(torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.int64))
        torch.testing.assert_close(got, torch.stack([rest[0], *torch.zeros(1), *rest[1:], *torch.zeros(2)]))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: call("grpo", [t[:, None, None] for t in as_tensors(tokens())]), "cu_seqlens"),
        (lambda: objectives.dapo(*as_tensors(tokens()), clip_low=1.5), "clip_low=1.5"),
        (lambda: objectives.dr_grpo(*as_tensors(tokens()), max_tokens=0, cu_seqlens=CU_SEQLENS), "max_tokens=0"),
        (lambda: objectives.center(torch.zeros(3), torch.zeros(2)), "must both be"),
        (
            lambda: objectives.dapo(torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(3, 1), torch.ones(1, 4)),
            "advantages must have the shape of the tokens",
        ),
        (lambda: call("grpo", (*as_tensors(tokens())[:2], torch.ones(4), torch.ones(13))), r"\[13\], got \[4\]"),
        (lambda: call("cispo", (*as_tensors(tokens())[:2], torch.ones(1), torch.ones(13))), r"\[13\], got \[1\]"),
        (lambda: call("dapo", as_tensors(tokens()), weights=torch.ones(1)), "weights must have the shape"),
        (lambda: call("dapo", as_tensors(tokens()), penalty=torch.ones(4)), "penalty must have the shape"),
        (
            lambda: objectives.grpo(*as_tensors(tokens()), cu_seqlens=CU_SEQLENS[:-1]),
            "from 0 to the number of tokens, 13",
        ),
        (lambda: objectives.grpo(*as_tensors(tokens()), cu_seqlens=CU_SEQLENS + 1), "it goes from 1 to 14"),
        (
            lambda: objectives.grpo(*as_tensors(tokens()), cu_seqlens=torch.tensor([0, 9, 5, 13])),
            "cu_seqlens must rise",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(refused, message):
    with pytest.raises(MaskError, match=message):
        refused()
