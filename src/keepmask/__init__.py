"""Sampling-distribution replay for RL on language models: roll out with masks, score on the same support.

Importing keepmask loads no torch; `LLM` and the `replay` package do when first used. A name whose libraries are not
installed says which extra brings them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keepmask.extras import needs

if TYPE_CHECKING:
    from keepmask import replay
    from keepmask.async_llm import AsyncLLM
    from keepmask.config import EngineConfig
    from keepmask.errors import BackendError, ConfigError, EngineError, KeepmaskError, MaskError, RequestError
    from keepmask.llm import LLM
    from keepmask.mask import SamplingMask
    from keepmask.outputs import CompletionOutput, RequestOutput
    from keepmask.params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "keepmask.llm",
    "AsyncLLM": "keepmask.async_llm",
    "BackendError": "keepmask.errors",
    "CompletionOutput": "keepmask.outputs",
    "ConfigError": "keepmask.errors",
    "EngineConfig": "keepmask.config",
    "EngineError": "keepmask.errors",
    "KeepmaskError": "keepmask.errors",
    "MaskError": "keepmask.errors",
    "RequestError": "keepmask.errors",
    "RequestOutput": "keepmask.outputs",
    "SamplingMask": "keepmask.mask",
    "SamplingParams": "keepmask.params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BackendError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "KeepmaskError",
    "MaskError",
    "RequestError",
    "RequestOutput",
    "SamplingMask",
    "SamplingParams",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name == "replay":
        return import_module("keepmask.replay")
    if name not in _HOME:
        raise AttributeError(f"module 'keepmask' has no attribute {name!r}")
    with needs("engine", f"keepmask.{name}"):
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
