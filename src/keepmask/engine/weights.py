"""`WeightStage`: new weights, checked and held until they replace a model's own all at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from keepmask.errors import RequestError

__all__ = [
    "INDEX_NAME",
    "WeightStage",
    "checksum",
    "checksums",
    "indexed_names",
    "randomize",
    "read_safetensors",
    "safetensors_files",
    "weight_bytes",
]

INDEX_NAME = "model.safetensors.index.json"
"""In a folder of a checkpoint in parts: which file holds which tensors."""
_MAX_LISTED = 8  # offending tensors named in one error; the rest are counted


class WeightStage:
    """Tensors that are to replace the weights of `model`, by their names in its state dict.

    `add` takes them in any number of parts and refuses a part as a whole, naming every tensor that does not fit; the
    model is not touched before `exchange`. Where the model ties weights, one of the names is enough, and more of them
    must hold the same.

    partial: weights that are not given stay as they are; by default all must be given.
    cast: values may come in another floating-point type, and are rounded to the model's.
    """

    def __init__(self, model: nn.Module, *, partial: bool = False, cast: bool = False) -> None:
        self._model = model
        self._targets: dict[str, Tensor] = model.state_dict()  # for their names, shapes and types
        self._partial, self._cast = partial, cast
        self._names = _first_names(self._targets)
        self._staged: dict[str, Tensor] = {}
        self._given: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Names that are still to come; none where the stage is partial and holds anything."""
        if self._partial and self._staged:
            return []
        return [name for name in self._targets if name == self._names[name] and name not in self._staged]

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Check and copy these tensors. Raises RequestError naming those that do not fit, and then keeps none."""
        problems = [f"{name}: {problem}" for name, value in tensors.items() if (problem := self._problem(name, value))]
        new: dict[str, Tensor] = {}
        if not problems:
            for name, value in tensors.items():
                target, first = self._targets[name], self._names[name]
                copied = value.detach().to(device=target.device, dtype=target.dtype, copy=True)
                earlier = new.get(first, self._staged.get(first))
                if earlier is not None and not torch.equal(earlier, copied):
                    problems.append(f"{name}: is tied to {first}, which was given other values")
                new.setdefault(first, copied)
        if problems:
            raise _refusal(f"{len(problems)} of {len(tensors)} tensors do not fit", problems)
        self._staged = {**new, **self._staged}
        self._given |= tensors.keys()

    def check_complete(self) -> None:
        """Raise RequestError naming the weights that are missing."""
        if missing := self.missing:
            raise _refusal(f"{len(missing)} tensors are missing", missing)

    def check_checksums(self, expected: Mapping[str, str]) -> None:
        """Raise RequestError naming the staged tensors whose `checksum` is not the expected one."""
        held = {name: self._staged[self._names[name]] for name in self._given}
        wrong = [name for name, value in held.items() if name in expected and checksum(value) != expected[name]]
        wrong += [f"{name} (not given)" for name in expected if name not in held]
        if wrong:
            raise _refusal(f"{len(wrong)} tensors have another checksum than expected", wrong)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the staged values with the model's: calling it again puts everything back.

        An exception in the middle leaves the model as it was.
        """
        targets, done = self._model.state_dict(), []
        try:
            for name in self._staged:
                self._swap(name, targets[name])
                done.append(name)
        except BaseException:
            for name in done:
                self._swap(name, targets[name])
            raise

    def _swap(self, name: str, target: Tensor) -> None:
        old = target.clone()
        try:
            target.copy_(self._staged[name])
        except BaseException:
            target.copy_(old)
            raise
        self._staged[name] = old

    def _problem(self, name: str, value: Tensor) -> str | None:
        """Why a tensor cannot be taken."""
        target = self._targets.get(name)
        if target is None:
            return "the model has no such weight"
        if name in self._given:
            return "was given already"
        if value.shape != target.shape:
            return f"shape {list(value.shape)} instead of {list(target.shape)}"
        if value.dtype != target.dtype:
            if not self._cast:
                return f"{_name(value.dtype)} instead of {_name(target.dtype)} (cast=True rounds)"
            if not (value.is_floating_point() and target.is_floating_point()):
                return f"{_name(value.dtype)} cannot become {_name(target.dtype)}"
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return "holds NaN or infinity"
        return None


def checksum(tensor: Tensor) -> str:
    """SHA-256 over type, shape and values, in hexadecimal. Equal for equal tensors on any device."""
    digest = hashlib.sha256(f"{_name(tensor.dtype)}{list(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksums(model: nn.Module) -> dict[str, str]:
    """`checksum` of every weight, by its name in the state dict."""
    return {name: checksum(tensor) for name, tensor in model.state_dict().items()}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, tied ones counted once."""
    tensors = model.state_dict()
    return sum(tensors[name].nbytes for name in set(_first_names(tensors).values()))


@torch.no_grad()
def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Overwrite every floating-point weight with noise: what is right afterwards was transferred."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.empty(tensor.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator)
            tensor.copy_(noise)


def read_safetensors(data: bytes, *, name: str = "weights", names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file. names: those it has to hold, and no others.

    Raises RequestError when it is none, or holds others.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise RequestError(f"{name}: not a safetensors file: {error}", param="weights") from None
    if names is not None and (others := sorted(tensors.keys() ^ set(names))):
        raise _refusal(f"{len(others)} tensors of {name} are not where {INDEX_NAME} says", others)
    return tensors


def indexed_names(index: bytes) -> dict[str, list[str]]:
    """Names of the tensors in each file, from the text of a `model.safetensors.index.json`. Raises RequestError."""
    try:
        places = json.loads(index)["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RequestError(f"weights: {INDEX_NAME} is no index: it has no weight_map", param="weights") from None
    found: dict[str, list[str]] = {}
    for name, file in places:
        if not isinstance(file, str) or not file.endswith(".safetensors") or file != Path(file).name:
            raise RequestError(f"weights: {INDEX_NAME}: {str(file)[:80]!r} is no file beside it", param="weights")
        found.setdefault(file, []).append(name)
    return found


def safetensors_files(path: Path) -> dict[Path, list[str] | None]:
    """The file itself, or the safetensors files of a folder, those of its index where it has one; with the names of
    their tensors, where the index tells. Raises RequestError when there are none.
    """
    index = path / INDEX_NAME
    found: dict[Path, list[str] | None] = {path: None}
    if index.is_file():
        found = {path / file: names for file, names in sorted(indexed_names(index.read_bytes()).items())}
    elif path.is_dir():
        found = dict.fromkeys(sorted(path.glob("*.safetensors")))
    if missing := [file for file in found or [path] if not file.is_file()]:
        raise RequestError(f"weights: no safetensors file at {missing[0]}", param="weights")
    return found


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name, the first one of the same memory."""
    firsts: dict[tuple[object, ...], str] = {}

    def place(tensor: Tensor) -> tuple[object, ...]:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()

    return {name: firsts.setdefault(place(tensor), name) for name, tensor in tensors.items()}


def _refusal(summary: str, items: list[str]) -> RequestError:
    listed = "; ".join(items[:_MAX_LISTED])
    more = f"; and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return RequestError(f"weights: {summary}, the model keeps its own: {listed}{more}", param="weights")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
