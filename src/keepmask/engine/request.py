"""`Request` and its `Completion`s: the state of one prompt and its n continuations. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keepmask.mask import SamplingMask
from keepmask.outputs import FinishReason, WeightVersionSpan

if TYPE_CHECKING:
    from keepmask.engine.completion_text import CompletionText
    from keepmask.params import SamplingParams
    from keepmask.sampling import SamplingRow, TokenLogprobs

__all__ = ["Completion", "Request", "State", "SupportRows"]


class State(Enum):
    """Where a completion stands."""

    HELD = "held"  # waits for a sibling to compute their prompt
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SupportRows:
    """Supports of one completion as they come, in flat growing buffers."""

    __slots__ = ("_ids", "_logprobs", "_offsets", "_size")

    def __init__(self, *, with_logprobs: bool) -> None:
        self._ids = np.empty(256, np.int32)
        self._logprobs = np.empty(256, np.float32) if with_logprobs else None
        self._offsets = [0]
        self._size = 0

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def num_ids(self) -> int:
        """Ids of all rows."""
        return self._size

    def append(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32] | None) -> None:
        """Add the row of the next token."""
        end = self._size + ids.size
        if end > self._ids.size:
            room = max(end, 2 * self._ids.size)
            self._ids = np.resize(self._ids, room)
            if self._logprobs is not None:
                self._logprobs = np.resize(self._logprobs, room)
        self._ids[self._size : end] = ids
        if self._logprobs is not None and logprobs is not None:
            self._logprobs[self._size : end] = logprobs
        self._offsets.append(end)
        self._size = end

    def mask(self, start: int = 0) -> SamplingMask:
        """The rows from `start` on."""
        low = self._offsets[start]
        logprobs = None if self._logprobs is None else self._logprobs[low : self._size].copy()
        offsets = np.asarray(self._offsets[start:], np.int64) - low
        return SamplingMask.adopt(self._ids[low : self._size].copy(), offsets, logprobs)


@dataclass(eq=False, slots=True, kw_only=True)
class Completion:
    """One continuation of a request's prompt."""

    request: Request
    index: int
    row: SamplingRow
    state: State = State.HELD
    token_ids: list[int] = field(default_factory=list)
    """Every drawn token, in order."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    """Sum of the drawn tokens' entries in `logprobs`."""
    supports: SupportRows | None = None
    text: CompletionText | None = None
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    blocks: list[int] = field(default_factory=list)
    """KV cache blocks, in order of position."""
    num_computed: int = 0
    """Tokens (of prompt and output) whose keys and values are in `blocks`."""
    num_registered: int = 0
    """Leading blocks that were offered to the prefix cache."""
    registers: bool = True
    """Whether its blocks may be offered: not once some of them hold keys and values of older weights."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens still to compute before the next draw."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop) of prompt and output."""
        prompt = self.request.prompt_token_ids
        size = len(prompt)
        if start >= size:
            return self.token_ids[start - size : stop - size]
        return prompt[start:stop] + self.token_ids[: max(0, stop - size)]

    def commit(self, token_id: int, weight_version: str) -> None:
        """Append a drawn token, which came from the weights of this version."""
        position = len(self.token_ids)
        self.token_ids.append(token_id)
        self.row.append(token_id)
        spans = self.weight_versions
        if spans and spans[-1].version == weight_version:
            spans[-1] = spans[-1]._replace(end=position + 1)
        else:
            spans.append(WeightVersionSpan(position, position + 1, weight_version))

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No more tokens will be drawn."""
        assert self.state is not State.FINISHED
        self.state = State.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A prompt, its sampling parameters with every default resolved, and its completions."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    prompt: str | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Those of the params, to look up in."""
    stop_names: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are one special token each, by its id."""
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix hashes of the prompt's full blocks."""

    @property
    def finished(self) -> bool:
        """Whether every completion has finished."""
        return all(completion.state is State.FINISHED for completion in self.completions)
