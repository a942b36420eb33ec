"""`machine_facts`: what a row says of where it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import keepmask

__all__ = ["device_name", "machine_facts"]


_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine_facts(device: torch.device | None = None) -> dict[str, Any]:
    """Device, versions, commit, and the load average now: above zero, something else was running.

    device: the CPU where it is None. features: instructions that choose the compiled paths, of those the CPU has.
    """
    device = torch.device("cpu") if device is None else device
    return {
        "device": device_name(device),
        "features": [name for name in _FEATURES if name in _cpu_info("flags").split()],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {"keepmask": keepmask.__version__}
        | _versions("torch", "transformers", "numba", "numpy", "pyarrow"),
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(name: str) -> str:
    """A line about the first processor, as Linux tells it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """The commit this package's files are at, with "-dirty" where they differ; None outside a checkout."""
    folder = Path(keepmask.__file__).parent
    answers = []
    for command in (["ls-files", "--error-unmatch", "__init__.py"], ["describe", "--always", "--dirty", "--abbrev=12"]):
        try:
            answers.append(subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True))
        except (OSError, subprocess.CalledProcessError):
            return None
    return answers[-1].stdout.strip()
