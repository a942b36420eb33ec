"""The numbers of a step against their definitions."""

import math

import numpy as np
import pytest
import torch

from keepmask.integrations.replay_meter import RATIO_EDGES, ReplayMeter


class Alone:
    """An accelerator of one process."""

    def reduce(self, value, reduction):
        assert reduction == "sum"
        return value

    def gather(self, value):
        return value


class Two(Alone):
    """Two processes that measured the same."""

    def reduce(self, value, reduction):
        return 2 * super().reduce(value, reduction)


@pytest.mark.parametrize("accelerator", [Alone(), Two()])
def test_means_shares_peaks_and_histograms(accelerator):
    rng = torch.Generator().manual_seed(0)
    policy, rollout = (-torch.rand(3, 5, generator=rng) for _ in range(2))
    mass = torch.full((3, 5), torch.nan)
    mass[0, 1], mass[2, 3], mass[1, 0] = 0.9, 0.7, 0.2  # the last is outside the loss mask
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[1] = 0
    meter = ReplayMeter()
    meter.add_tokens(policy, rollout, mass, mask, fresh=True)
    numbers = meter.numbers(accelerator)
    keep = mask.bool().numpy()
    ratio = np.exp((policy - rollout).double().numpy())
    full = np.array([ratio[0, 1] * np.float32(0.9), ratio[2, 3] * np.float32(0.7)])
    assert numbers["ratio_replayed_mean"] == pytest.approx(ratio[keep].mean())
    assert numbers["ratio_replayed_outside_0.1"] == pytest.approx((abs(ratio[keep] - 1) > 0.1).mean())
    assert numbers["logprob_diff_max"] == pytest.approx(abs(np.log(ratio[keep])).max())
    assert numbers["logprob_diff_mean"] == pytest.approx(abs(np.log(ratio[keep])).mean())
    assert numbers["ratio_full_mean"] == pytest.approx(full.mean())
    assert numbers["kept_mass"] == pytest.approx(0.8)
    assert numbers["kept_mass_error"] == pytest.approx(0.1 / math.sqrt(2 if type(accelerator) is Alone else 4))
    wanted, _ = np.histogram(ratio[keep], [-np.inf, *RATIO_EDGES, np.inf])
    scale = 1 if type(accelerator) is Alone else 2
    assert numbers["ratio_replayed_histogram"] == (scale * wanted).tolist()


def test_stale_tokens_count_apart_and_unknown_ones_not_at_all():
    meter = ReplayMeter()
    rollout = torch.tensor([[0.0, torch.nan]])
    meter.add_tokens(
        torch.tensor([[math.log(1.5), 0.0]]), rollout, torch.full((1, 2), torch.nan), torch.ones(1, 2), fresh=False
    )
    numbers = meter.numbers(Alone())
    assert numbers == {"ratio_stale_mean": pytest.approx(1.5), "ratio_stale_outside_0.1": 1.0}


def test_what_was_not_measured_is_left_out_and_nothing_is_counted_twice():
    meter = ReplayMeter()
    assert meter.numbers(Alone()) == {}
    meter.add_supports(torch.tensor([1, 1, 4]))
    meter.add_weights(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2), clipped=torch.tensor([[False, True]]))
    numbers = meter.numbers(Alone())
    assert numbers["support_size"] == 2
    assert numbers["support_singletons"] == pytest.approx(2 / 3)
    assert numbers["support_size_max"] == 4
    assert numbers["importance_ratio_mean"] == 2
    assert numbers["importance_ratio_max"] == 3
    assert numbers["importance_clipped"] == 0.5
    assert meter.numbers(Alone()) == {}
