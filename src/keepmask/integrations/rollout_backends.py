"""Who draws a trainer's rollouts, and the weights it draws them with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from keepmask.backends.base import Rollouts
from keepmask.backends.http import Client
from keepmask.errors import ConfigError
from keepmask.llm import LLM

__all__ = ["embedded", "rollouts_from"]


def rollouts_from(where: str | Rollouts, model: nn.Module, options: Mapping[str, Any]) -> Rollouts:
    """The backend that `where` names: "embedded", a server's URL, or a backend already.

    options: of `EngineConfig` for an embedded engine, of `Client` for a URL. Raises ConfigError for others.
    """
    if where == "embedded":
        return embedded(model, **options)
    if isinstance(where, str):
        if not where.startswith(("http://", "https://")):
            raise ConfigError(f"rollouts={where!r}: must be 'embedded', a server's URL, or an object like Rollouts")
        return Client(where, **options)
    if not isinstance(where, Rollouts):
        raise ConfigError(f"backend: {type(where).__name__} has not the methods of keepmask.backends.base.Rollouts")
    return where


def embedded(model: nn.Module, **options: Any) -> LLM:
    """An engine for the policy `model`, with masks and processed log-probs. options: as of `LLM.from_module`."""
    given: dict[str, Any] = {
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
    }
    return LLM.from_module(model, **given | options)
