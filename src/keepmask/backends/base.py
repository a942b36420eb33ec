"""`Rollouts`: what a trainer asks of whoever draws for it, an engine in its process or anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from numpy.typing import ArrayLike

from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Rollouts", "tied_once", "weight_parts"]

_PART_BYTES = 64 * 2**20  # of weights that travel in one request


@runtime_checkable
class Rollouts(Protocol):
    """Satisfied by shape: `LLM` and the clients are `Rollouts` without naming it.

    prompts are token ids. params are one for all prompts, or one for each. A prompt has as many rollouts as its params
    say, in the order of their completions. Raises RequestError for what cannot be served, naming the field, and
    BackendError or EngineError where the engine could not be reached or failed.
    """

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """The rollouts of each prompt, all of them drawn together."""

    def rollouts_as_finished(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """The same as (number of the prompt, its rollouts), as each prompt finishes. Closing the iterator ends the
        others.
        """

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """The parameters that the draws would use, with every default that this engine fills in."""

    def update_weights(self, weights: Mapping[str, Tensor], *, version: str | None = None) -> str:
        """Draw with these weights from now on, all of the model's; returns what they are called in `weight_versions`.

        weights: by their names in the model's state dict. version: their name; by default the old one plus one.
        """

    @property
    def weight_version(self) -> str:
        """Of the weights that draw the next token."""

    def close(self) -> None:
        """Give up what is held: requests under way end."""


def weight_parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
    """Safetensors files of about 64 MB each; of tied tensors the first."""
    import safetensors.torch  # loads torch

    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tied_once(weights):
        part[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
        if size >= _PART_BYTES:
            yield safetensors.torch.save(part)
            part, size = {}, 0
    if part:
        yield safetensors.torch.save(part)


def tied_once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Without those that are another name of a tensor before them."""
    seen = set()
    for name, tensor in weights:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen:
            seen.add(place)
            yield name, tensor
