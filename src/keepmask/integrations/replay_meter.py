"""`ReplayMeter`: how far the trainer's log-probabilities are from the engine's, added up over a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RATIO_EDGES", "ReplayMeter"]

RATIO_EDGES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0)
"""Inner edges of the bins of ratio histograms; the first and the last bin are open."""

_TOLERANCE = 0.1  # a ratio further from 1 is counted as outside


class ReplayMeter:
    """Sums over the tokens of a step; `numbers` are their means and shares, by the names of metrics.jsonl.

    A ratio is exp(trainer - rollout): `replayed` with both log-probabilities on the support, `full` with the trainer's
    over the whole vocabulary. Tokens count as fresh while the trainer's weights are those that drew them; only of these
    it is known what the ratio should be: 1.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    def add_tokens(self, policy: Tensor, rollout: Tensor, kept_mass: Tensor, loss_mask: Tensor, *, fresh: bool) -> None:
        """Take in a micro-batch. All [B, T]; kept_mass is NaN where it was not computed."""
        keep = loss_mask.bool() & ~rollout.isnan()
        difference = (policy - rollout).detach()[keep].double()
        mass = kept_mass[keep].double()
        ratio = difference.exp()
        known = ~mass.isnan()
        outside = (ratio - 1).abs() > _TOLERANCE
        if fresh:
            self._add("tokens", torch.tensor(float(ratio.numel())))
            self._add("replayed", ratio.sum())
            self._add("replayed_outside", outside.sum())
            self._add("replayed_histogram", _histogram(ratio))
            self._add("difference", difference.abs().sum())
            self._peak("difference", difference.abs())
            full = (ratio * mass)[known]
            self._add("rows", known.sum())
            self._add("full", full.sum())
            self._add("full_outside", ((full - 1).abs() > _TOLERANCE).sum())
            self._add("full_histogram", _histogram(full))
            self._add("mass", mass[known].sum())
            self._add("mass_square", mass[known].square().sum())
        else:
            self._add("stale_tokens", torch.tensor(float(ratio.numel())))
            self._add("stale", ratio.sum())
            self._add("stale_outside", outside.sum())

    def add_weights(self, raw: Tensor, loss_mask: Tensor, *, clipped: Tensor) -> None:
        """Importance weights before their cap, [B, T], and which of them it changed."""
        keep = loss_mask.bool()
        self._add("weights", keep.sum())
        self._add("weight", raw.detach()[keep].double().sum())
        self._add("weights_clipped", clipped[keep].sum())
        self._peak("weight", raw.detach()[keep].double())

    def add_supports(self, sizes: Tensor) -> None:
        """Ids in the supports of drawn tokens, [T] (the vocabulary's size where nothing was truncated)."""
        self._add("supports", torch.tensor(float(sizes.numel())))
        self._add("ids", sizes.double().sum())
        self._add("singletons", (sizes == 1).sum())
        self._peak("ids", sizes.double())

    def numbers(self, accelerator: Any) -> dict[str, Any]:
        """The metrics of all processes since the last call; what was not measured is left out."""
        total = {name: accelerator.reduce(value, reduction="sum").cpu() for name, value in sorted(self._sums.items())}
        most = {name: float(accelerator.gather(value.reshape(1)).max()) for name, value in sorted(self._peaks.items())}
        self._sums, self._peaks = {}, {}

        def mean(name: str, count: str) -> float:
            return float(total[name] / total[count].clamp(min=1))

        found: dict[str, Any] = {}
        if float(total.get("tokens", torch.zeros(()))):
            found |= {
                "ratio_replayed_mean": mean("replayed", "tokens"),
                "ratio_replayed_outside_0.1": mean("replayed_outside", "tokens"),
                "ratio_replayed_histogram": total["replayed_histogram"].tolist(),
                "logprob_diff_mean": mean("difference", "tokens"),
                "logprob_diff_max": most["difference"],
            }
            if float(total["rows"]):
                mass = mean("mass", "rows")
                spread = max(mean("mass_square", "rows") - mass * mass, 0.0)
                found |= {
                    "ratio_full_mean": mean("full", "rows"),
                    "ratio_full_outside_0.1": mean("full_outside", "rows"),
                    "ratio_full_histogram": total["full_histogram"].tolist(),
                    "kept_mass": mass,
                    "kept_mass_error": (spread / float(total["rows"])) ** 0.5,
                }
        if "stale_tokens" in total:
            found["ratio_stale_mean"] = mean("stale", "stale_tokens")
            found["ratio_stale_outside_0.1"] = mean("stale_outside", "stale_tokens")
        if "weights" in total:
            found["importance_ratio_mean"] = mean("weight", "weights")
            found["importance_ratio_max"] = most.get("weight", 1.0)
            found["importance_clipped"] = mean("weights_clipped", "weights")
        if "supports" in total:
            found["support_size"] = mean("ids", "supports")
            found["support_singletons"] = mean("singletons", "supports")
            found["support_size_max"] = most["ids"]
        return found

    def _add(self, name: str, value: Tensor) -> None:
        value = value.double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _peak(self, name: str, values: Tensor) -> None:
        if values.numel():
            peak = values.max()
            self._peaks[name] = torch.maximum(self._peaks[name], peak) if name in self._peaks else peak


def _histogram(ratio: Tensor) -> Tensor:
    """[len(RATIO_EDGES) + 1]: counts."""
    bins = torch.bucketize(ratio, torch.tensor(RATIO_EDGES, dtype=ratio.dtype, device=ratio.device))
    return torch.bincount(bins, minlength=len(RATIO_EDGES) + 1)
