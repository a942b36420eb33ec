"""The trainer's side: score a policy on the recorded supports, exactly and without full-vocabulary logits.

Names load on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepmask.replay.mismatch import Mismatch, measure_mismatch

_HOME = {
    "Mismatch": "keepmask.replay.mismatch",
    "measure_mismatch": "keepmask.replay.mismatch",
}

__all__ = ["Mismatch", "measure_mismatch"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'keepmask.replay' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
