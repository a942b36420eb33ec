"""The trainer's side: score a policy on the recorded supports, exactly and without full-vocabulary logits.

Names and modules load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keepmask.extras import needs

if TYPE_CHECKING:
    from keepmask.replay import objectives, ratios, stats
    from keepmask.replay.history import LogitBias, TokenHistory
    from keepmask.replay.lm_head import add_lm_head
    from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden, logprobs_from_logits
    from keepmask.replay.mask_store import MaskStore
    from keepmask.replay.mismatch import Mismatch, TokenMismatch, measure_mismatch
    from keepmask.replay.outside import MassOutside, estimate_mass_outside
    from keepmask.replay.parallel import VocabParallel
    from keepmask.replay.policy_head import Head, LowRank
    from keepmask.replay.replay_batch import ReplayBatch, Shard
    from keepmask.replay.score_batch import PaddedScores, score, score_padded
    from keepmask.replay.scores import RowStatus, SupportScores
    from keepmask.replay.support import Support
    from keepmask.replay.transforms import TokenTransforms
    from keepmask.replay.views import PaddedBatch

_HOME = {
    "Head": "keepmask.replay.policy_head",
    "LogitBias": "keepmask.replay.history",
    "LowRank": "keepmask.replay.policy_head",
    "MaskStore": "keepmask.replay.mask_store",
    "MassOutside": "keepmask.replay.outside",
    "Mismatch": "keepmask.replay.mismatch",
    "PaddedBatch": "keepmask.replay.views",
    "PaddedScores": "keepmask.replay.score_batch",
    "ReplayBatch": "keepmask.replay.replay_batch",
    "RowStatus": "keepmask.replay.scores",
    "ScoreOptions": "keepmask.replay.logprobs",
    "Shard": "keepmask.replay.replay_batch",
    "Support": "keepmask.replay.support",
    "SupportScores": "keepmask.replay.scores",
    "TokenHistory": "keepmask.replay.history",
    "TokenMismatch": "keepmask.replay.mismatch",
    "TokenTransforms": "keepmask.replay.transforms",
    "VocabParallel": "keepmask.replay.parallel",
    "add_lm_head": "keepmask.replay.lm_head",
    "estimate_mass_outside": "keepmask.replay.outside",
    "logprobs_from_hidden": "keepmask.replay.logprobs",
    "logprobs_from_logits": "keepmask.replay.logprobs",
    "measure_mismatch": "keepmask.replay.mismatch",
    "score": "keepmask.replay.score_batch",
    "score_padded": "keepmask.replay.score_batch",
}

__all__ = [
    "Head",
    "LogitBias",
    "LowRank",
    "MaskStore",
    "MassOutside",
    "Mismatch",
    "PaddedBatch",
    "PaddedScores",
    "ReplayBatch",
    "RowStatus",
    "ScoreOptions",
    "Shard",
    "Support",
    "SupportScores",
    "TokenHistory",
    "TokenMismatch",
    "TokenTransforms",
    "VocabParallel",
    "add_lm_head",
    "estimate_mass_outside",
    "logprobs_from_hidden",
    "logprobs_from_logits",
    "measure_mismatch",
    "objectives",
    "ratios",
    "score",
    "score_padded",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'keepmask.replay' has no attribute {name!r}")
    with needs("engine" if name == "add_lm_head" else "replay", f"keepmask.replay.{name}"):
        if name in ("objectives", "ratios", "stats"):
            return import_module(f"keepmask.replay.{name}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
