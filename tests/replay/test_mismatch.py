"""The mismatch table, checked against dense NumPy softmaxes written here."""

import numpy as np
import pytest
import torch

from keepmask import MaskError, SamplingMask
from keepmask.outputs import Rollout
from keepmask.replay import measure_mismatch

V = 50


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def top_p_rollout(rng, num_tokens, top_p=0.8):
    """A rollout drawn at top_p from random logits, and the full log-probs of its logits."""
    full = log_softmax(rng.normal(size=(num_tokens, V)) * 2)
    rows, tokens, on_support = [], [], []
    for row in full:
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(np.exp(row[order])) - np.exp(row[order])
        kept = np.sort(order[before < top_p])
        conditional = log_softmax(row[kept])
        drawn = rng.choice(kept.size, p=np.exp(conditional))
        rows.append(kept)
        tokens.append(kept[drawn])
        on_support.append(conditional[drawn])
    rollout = Rollout(
        prompt_token_ids=np.array([1, 2], np.int32),
        token_ids=np.array(tokens, np.int32),
        sampling_mask=SamplingMask.from_lists(rows),
        logprobs=np.array(on_support, np.float32),
    )
    return rollout, full, rows


def test_with_the_engines_weights_the_replayed_ratio_is_one_and_the_full_ratio_is_the_kept_mass():
    rng = np.random.default_rng(0)
    rollout, full, rows = top_p_rollout(rng, 400)
    drawn_full = full[np.arange(400), rollout.token_ids]
    mass = np.array([np.exp(full[t, row]).sum() for t, row in enumerate(rows)])
    result = measure_mismatch([rollout], [drawn_full - np.log(mass)], [drawn_full])
    np.testing.assert_allclose(result.ratio_replayed, 1, atol=1e-6)
    np.testing.assert_allclose(result.ratio_full, mass, atol=1e-6)
    np.testing.assert_allclose(result.kept_mass, mass, atol=1e-12)


def test_the_table_holds_the_plain_statistics_of_the_arrays():
    rng = np.random.default_rng(1)
    rollouts, replayed, full = [], [], []
    for num_tokens in (7, 1, 30):
        rollout, logprobs, _ = top_p_rollout(rng, num_tokens)
        rollouts.append(rollout)
        full.append(logprobs[np.arange(num_tokens), rollout.token_ids])
        replayed.append(rollout.logprobs + rng.normal(size=num_tokens) * 0.1)
    table = measure_mismatch(rollouts, replayed, full).table()
    old = np.concatenate([r.logprobs for r in rollouts]).astype(np.float64)
    for name, new in (("replayed", np.concatenate(replayed)), ("full", np.concatenate(full))):
        ratio = np.exp(new - old)
        assert table[f"ratio_{name}_mean"] == pytest.approx(ratio.mean())
        assert table[f"ratio_{name}_median"] == pytest.approx(np.median(ratio))
        assert table[f"ratio_{name}_outside_0.1"] == np.mean((ratio < 0.9) | (ratio > 1.1))
        assert table[f"log_ratio_{name}_mean"] == pytest.approx((new - old).mean())
    sizes = [len(row) for r in rollouts for row in r.sampling_mask.token_ids]
    assert table["logprob_diff_max"] == pytest.approx(np.abs(np.concatenate(replayed) - old).max())
    assert table["kept_mass_mean"] == pytest.approx(np.exp(np.concatenate(full) - np.concatenate(replayed)).mean())
    assert table["mass_outside_mean"] == pytest.approx(1 - table["kept_mass_mean"])
    assert table["support_size_mean"] == pytest.approx(np.mean(sizes))
    assert table["support_size_median"] == np.median(sizes)
    assert table["support_size_p99"] == pytest.approx(np.percentile(sizes, 99))
    assert table["support_singleton_share"] == np.mean(np.array(sizes) == 1)
    assert table["num_tokens"] == 38


def test_scores_stored_with_the_rollouts_are_used_by_default():
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32),
        token_ids=np.array([4, 5], np.int32),
        sampling_mask=SamplingMask.from_lists([[4, 9], [5]]),
        logprobs=np.array([-0.5, 0], np.float32),
        policy_logprobs=np.array([-0.25, 0], np.float32),
        policy_full_logprobs=np.array([-1.25, -0.5], np.float32),
    )
    result = measure_mismatch([rollout])
    np.testing.assert_allclose(result.log_ratio_replayed, [0.25, 0])
    np.testing.assert_allclose(result.kept_mass, np.exp([-1, -0.5]))
    assert result.worst(1) == [(0, 0, 4, -0.5, -0.25, -1.25, 2)]


def test_worst_tokens_come_largest_difference_first():
    rollouts = [
        Rollout(
            prompt_token_ids=np.array([3], np.int32),
            token_ids=np.array([4, 5], np.int32),
            logprobs=np.array(values, np.float32),
        )
        for values in ([-1, -2], [-3, -0.5])
    ]
    worst = measure_mismatch(rollouts, [[-1.5, -2.25], [-1, -0.5]]).worst(3)
    assert [(t.rollout, t.position) for t in worst] == [(1, 0), (0, 0), (0, 1)]
    assert worst[0].support_size is None


def test_tokens_outside_the_loss_mask_are_not_measured():
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32),
        token_ids=np.array([4, 5, 6], np.int32),
        logprobs=np.array([-1, -np.inf, -2], np.float32),
    )
    result = measure_mismatch([rollout], [[-1, np.nan, -2.5]], loss_masks=[[1, 0, 1]])
    assert result.position.tolist() == [0, 2]
    assert result.table()["num_tokens"] == 2


def test_a_whole_vocabulary_row_counts_with_the_width_it_has():
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32),
        token_ids=np.array([4, 5], np.int32),
        sampling_mask=SamplingMask.from_lists([[4], []]),
        logprobs=np.array([0, -2], np.float32),
    )
    unknown = measure_mismatch([rollout], [[0, -2]])
    assert unknown.table()["support_size_mean"] == 1
    assert unknown.table()["num_rows_of_unknown_width"] == 1
    assert unknown.worst(2)[1].support_size is None
    assert measure_mismatch([rollout], [[0, -2]], vocab_size=V).table()["support_size_mean"] == (1 + V) / 2


def test_what_was_not_scored_has_no_entry():
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32), token_ids=np.array([4], np.int32), logprobs=np.zeros(1, np.float32)
    )
    result = measure_mismatch([rollout], [[0.0]])
    assert result.ratio_full is None
    assert not {"ratio_full_mean", "kept_mass_mean", "support_size_mean"} & result.table().keys()
    assert measure_mismatch([], []).table() == {"num_tokens": 0}


@pytest.mark.parametrize(
    ("logprobs", "policy", "message"),
    [
        (None, [[0.0, 0.0]], "logprobs: needed for every rollout, absent in rollout 0"),
        ([0, 0], None, "policy_logprobs: needed for every rollout, absent in rollout 0"),
        ([0, 0], [[0.0]], r"policy_logprobs: .* other shapes in rollout 0 \(\[1\] for \[2\]\)"),
        ([0, 0], [[0.0, 0.0], [0.0]], "policy_logprobs: 2 arrays for 1 rollouts"),
        ([0, 0], [torch.zeros(2, requires_grad=True)], r"rollout 0 cannot be read .*need .detach\(\)"),
        ([0, 0], [torch.zeros(2, dtype=torch.bfloat16)], r"rollout 0 cannot be read .*\.float\(\)"),
        ([0, 0], [[0.0, np.nan]], r"policy_logprobs: must be finite; not so in rollout 0 \(position 1\)"),
    ],
)
def test_scores_that_do_not_fit_are_refused_by_rollout(logprobs, policy, message):
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32),
        token_ids=np.array([4, 5], np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
    )
    with pytest.raises(MaskError, match=message):
        measure_mismatch([rollout], policy)


def test_the_turns_of_a_dialogue_are_given_one_by_one():
    rollout, *_ = top_p_rollout(np.random.default_rng(0), 2)
    with pytest.raises(MaskError, match="one by one; a list stands in place of rollout 1"):
        measure_mismatch([rollout, [rollout]], [[0.0, 0.0]] * 2)


def test_a_mask_with_other_rows_than_tokens_is_refused():
    rollout = Rollout(
        prompt_token_ids=np.array([3], np.int32),
        token_ids=np.array([4, 5], np.int32),
        sampling_mask=SamplingMask.from_lists([[4]]),
        logprobs=np.zeros(2, np.float32),
    )
    with pytest.raises(MaskError, match=r"sampling_mask: .* rollout 0 \(1 rows for 2 tokens\)"):
        measure_mismatch([rollout], [[0.0, 0.0]])
