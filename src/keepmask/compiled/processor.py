"""Which of the processor's instructions the matrix products are made of.

The environment is read here and, for everything else, in `keepmask.cli`: what a processor can do is a fact of the
machine, not of an engine, and the variable exists so that one machine can run what others would.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import Literal, get_args

import llvmlite.binding

from keepmask.errors import ConfigError

__all__ = ["VARIABLE", "Instructions", "available", "instructions"]

Instructions = Literal["tiles", "avx512_bf16", "plain"]
"""Matrix tiles of bfloat16 (AMX); dot products of bfloat16 pairs (`vdpbf16ps`); float32 multiply-adds alone."""

VARIABLE = "KEEPMASK_CPU"
"""The environment variable that names the instructions to use in place of the best there are."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux, Documentation/arch/x86/xstate.rst


@cache
def available() -> tuple[Instructions, ...]:
    """What this process may use, the best first. Linux gives the tiles' registers to processes that ask for them."""
    features = llvmlite.binding.get_host_cpu_features() if platform.machine() in ("x86_64", "AMD64") else {}
    found: list[Instructions] = ["plain"]
    if all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512bf16")):
        found.insert(0, "avx512_bf16")
        if sys.platform == "linux" and all(features.get(name) for name in ("amx-tile", "amx-bf16")):
            if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
                found.insert(0, "tiles")
    return tuple(found)


def instructions() -> Instructions:
    """What products use in this process: the best available, or what `KEEPMASK_CPU` names.

    Raises ConfigError where that names none, or one that the processor lacks.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return available()[0]
    for name in available():
        if name == asked:
            return name
    legal = ", ".join(get_args(Instructions))
    if asked in get_args(Instructions):
        raise ConfigError(
            f"{VARIABLE}={asked}: this processor has no such instructions; it has {', '.join(available())}"
        )
    raise ConfigError(f"{VARIABLE}={asked!r}: must be one of {legal}, or unset for the best of them")
