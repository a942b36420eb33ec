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


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit, and the load average now: above zero, something else was running."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {"keepmask": keepmask.__version__} | _versions("torch", "transformers", "numba"),
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
