"""What a request returns, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepmask.mask import SamplingMask

if TYPE_CHECKING:
    from keepmask.params import SamplingParams

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "RequestOutput", "Rollout", "WeightVersionSpan"]

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """One id's entry in `logprobs`: value in nats (or the logit, in the logits modes), rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class WeightVersionSpan(NamedTuple):
    """Output tokens [start, end) were drawn from the weights of this version."""

    start: int
    end: int
    version: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a request. `token_ids`, `logprobs` and the rows of `sampling_mask` have one length."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    sampling_mask: SamplingMask | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; the message when finish_reason is "error"."""
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    """The seed the draws used: the request's own, or the one it was given."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were taken from the cache."""
    sampling_params: SamplingParams | None = None
    """The parameters the draws used, every default resolved."""

    def rollouts(self) -> list[Rollout]:
        """One `Rollout` a completion, which is what files hold and trainers take."""
        params = {} if self.sampling_params is None else self.sampling_params.model_dump(exclude_defaults=True)
        return [
            Rollout(
                request_id=self.request_id,
                completion_index=output.index,
                prompt=self.prompt,
                prompt_token_ids=np.asarray(self.prompt_token_ids, np.int32),
                text=output.text,
                token_ids=np.asarray(output.token_ids, np.int32),
                logprobs=_drawn_logprobs(output),
                sampling_mask=output.sampling_mask,
                sampling_params=params,
                seed=self.seed,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                weight_versions=tuple(output.weight_versions),
            )
            for output in self.outputs
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One completion with everything a trainer or a report needs of it. T is its number of tokens.

    Two are equal when all their fields are, arrays by their values. sampling_params holds the fields of
    `SamplingParams` that differ from their defaults, by name.
    """

    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    """[T], the generated tokens."""
    sampling_mask: SamplingMask | None = None
    """T rows, or None where the request asked for none."""
    logprobs: NDArray[np.float32] | None = None
    """[T], the engine's log-probability of each drawn token, in nats."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    completion_index: int = 0
    prompt: str | None = None
    text: str = ""
    seed: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    policy_logprobs: NDArray[np.float32] | None = None
    """[T], the scored policy's log-probabilities on the support (replayed)."""
    policy_full_logprobs: NDArray[np.float32] | None = None
    """[T], the scored policy's log-probabilities over the whole vocabulary, temperature applied."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What came with the prompt and is not the engine's: an answer, a data source; JSON values by name."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _drawn_logprobs(output: CompletionOutput) -> NDArray[np.float32] | None:
    if output.logprobs is None:
        return None
    entries = zip(output.token_ids, output.logprobs, strict=True)
    return np.asarray([position[token_id].logprob for token_id, position in entries], np.float32)


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
        return type(mine) is type(theirs) and np.array_equal(mine, theirs)
    return bool(mine == theirs)
