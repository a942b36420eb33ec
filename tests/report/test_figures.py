import numpy as np
import pytest

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.report.figures import measure
from made_rollouts import made_rollout, made_rollouts


def with_log_ratio(request_id, values):
    """A rollout whose full-vocabulary log-ratios are these, and whose replayed ones are zero."""
    rollout = made_rollout(request_id, num_tokens=len(values))
    changes = {
        "policy_logprobs": rollout.logprobs,
        "policy_full_logprobs": rollout.logprobs + np.asarray(values, np.float32),
    }
    return made_rollout(request_id, num_tokens=len(values), **changes)


def test_counts_are_over_all_rollouts():
    metrics = measure(made_rollouts(num_requests=3, n=2, num_tokens=5))
    assert (metrics.num_rollouts, metrics.num_prompts, metrics.num_tokens) == (6, 3, 30)
    sizes = [
        row for rollout in made_rollouts(num_requests=3, n=2, num_tokens=5) for row in rollout.sampling_mask.counts
    ]
    assert metrics.support_sizes.tolist() == sizes


def test_the_table_is_that_of_the_mismatch_unless_one_is_given():
    metrics = measure(made_rollouts())
    assert metrics.table == metrics.mismatch.table()
    assert measure(made_rollouts(), table={"ratio_full_mean": 0.5}).table == {"ratio_full_mean": 0.5}


def test_without_scores_there_are_supports_only():
    metrics = measure(made_rollouts(scored=False))
    assert metrics.mismatch is None
    assert set(metrics.table) == {
        "support_size_mean",
        "support_size_median",
        "support_size_p99",
        "support_singleton_share",
    }
    assert metrics.worst_full(3) == metrics.worst_replayed(3) == []


def test_without_masks_and_scores_there_are_counts_only():
    metrics = measure(made_rollouts(scored=False, sampling_mask=None))
    assert metrics.table == {}
    assert metrics.num_tokens == 72


def test_only_scored_rollouts_are_compared_and_keep_their_index():
    rollouts = [made_rollout("0", scored=False), with_log_ratio("1", [0.0, -2.0, 0.0])]
    metrics = measure(rollouts)
    assert metrics.scored == (1,)
    (worst,) = metrics.worst_full(1)
    assert (worst.rollout, worst.position) == (1, 1)
    assert worst.log_ratio_full == pytest.approx(-2.0)
    assert worst.support_size == rollouts[1].sampling_mask.counts[1]


def test_the_widest_supports_come_first():
    masks = [SamplingMask.from_lists([[1], [1, 2, 3]]), None, SamplingMask.from_lists([[], range(9)])]
    rollouts = [made_rollout(str(i), num_tokens=2, scored=False, sampling_mask=mask) for i, mask in enumerate(masks)]
    places = measure(rollouts).widest(3)
    assert [(place.rollout, place.position, place.support_size) for place in places] == [
        (2, 1, 9),
        (0, 1, 3),
        (0, 0, 1),
    ]


def test_a_sequence_ratio_multiplies_the_tokens_so_far():
    rollouts = [with_log_ratio(str(i), [-0.1, -0.2, -0.3]) for i in range(5)]
    curve = measure(rollouts).sequence_full
    assert curve.positions.tolist() == [1, 2, 3]
    np.testing.assert_allclose(curve.median, np.exp([-0.1, -0.3, -0.6]), rtol=1e-6)
    np.testing.assert_allclose(measure(rollouts).sequence_replayed.median, 1)


def test_a_sequence_ratio_ends_where_fewer_than_five_completions_reach():
    rollouts = [with_log_ratio(str(i), [-0.5] * length) for i, length in enumerate([2, 3, 4, 4, 4, 9, 9])]
    curve = measure(rollouts).sequence_full
    assert curve.positions.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(curve.low, np.exp([-0.5, -1, -1.5, -2]), rtol=1e-6)


def test_sequence_quantiles_are_over_the_completions_that_reach_the_position():
    values = np.linspace(-1, 0, 11)
    curve = measure([with_log_ratio(str(i), [value]) for i, value in enumerate(values)]).sequence_full
    np.testing.assert_allclose([curve.low[0], curve.median[0], curve.high[0]], np.exp([-0.9, -0.5, -0.1]), rtol=1e-6)


def test_enormous_ratios_stay_finite():
    metrics = measure([with_log_ratio("0", [500.0] * 4)])
    assert np.isfinite(metrics.sequence_full.high).all()


def test_no_rollouts_give_empty_metrics():
    metrics = measure([])
    assert (metrics.num_rollouts, metrics.num_tokens, metrics.mismatch, metrics.widest(3)) == (0, 0, None, [])


def test_rollouts_of_no_tokens_give_no_curve():
    metrics = measure(made_rollouts(num_tokens=0))
    assert metrics.sequence_full is None
    assert metrics.table == {"num_tokens": 0}


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(MaskError, match="policy_logprobs: must be finite"):
        measure([made_rollout(policy_logprobs=np.full(12, np.nan, np.float32))])
