"""`SamplingRow`: one completion in flight, as the sampler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keepmask.params import SamplingParams
from keepmask.sampling.spec import SamplerSpec
from keepmask.sampling.thinking import Thinking

__all__ = ["Grammar", "SamplingRow", "TokenCounts"]


class Grammar(Protocol):
    """Where one completion stands in the form that its text must have."""

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """[V]: which ids may come next."""
        ...

    def append(self, token_id: int) -> None:
        """Account for one more token."""
        ...


class SamplingRow:
    """Parameters and history of one completion. It belongs to its request and holds all the sampler knows of it.

    Whatever it costs to keep up with a token depends on the history alone, never on the vocabulary.
    """

    __slots__ = (
        "__weakref__",
        "_num_prompt_tokens",
        "_tokens",
        "bad_words",
        "completion_index",
        "counts",
        "grammar",
        "mask_bytes",
        "mask_bytes_pending",
        "max_mask_bytes",
        "num_output_tokens",
        "params",
        "returns_mask",
        "returns_mask_logprobs",
        "seed",
        "semantics",
        "stop_token_ids",
        "thinking",
    )

    def __init__(
        self,
        params: SamplingParams,
        spec: SamplerSpec,
        *,
        prompt_token_ids: Sequence[int],
        seed: int,
        completion_index: int,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.completion_index = completion_index
        self.num_output_tokens = 0
        """The output position of the next draw."""
        asked = params.return_sampling_mask
        self.returns_mask = spec.return_sampling_mask if asked is None else asked
        self.returns_mask_logprobs = self.returns_mask and params.return_sampling_mask_logprobs
        self.semantics = params.sampling_semantics or spec.semantics
        self.stop_token_ids = np.unique(np.asarray([*spec.eos_token_ids, *params.stop_token_ids], np.int64))
        """Banned until min_tokens are out."""
        # A request's n completions share its budget evenly.
        self.max_mask_bytes = spec.max_mask_bytes_per_request // params.n
        self.mask_bytes = 0
        self.mask_bytes_pending = 0
        """Bytes of the row drawn last, which count once its token is appended."""
        prompt = np.asarray(prompt_token_ids, np.int64)
        self._num_prompt_tokens = prompt.size
        self._tokens = np.empty(prompt.size + 64, np.int64)
        self._tokens[: prompt.size] = prompt
        self.counts = self._open_counts(prompt)
        self.grammar = grammar
        self.bad_words = BadWords(bad_words_token_ids) if bad_words_token_ids else None
        budget = params.thinking_token_budget
        self.thinking = (
            None
            if budget is None
            else Thinking(budget, spec.thinking_start_token_ids, spec.thinking_end_token_ids, prompt.tolist())
        )

    @property
    def prompt_token_ids(self) -> NDArray[np.int64]:
        """The prompt."""
        return self._tokens[: self._num_prompt_tokens]

    @property
    def output_token_ids(self) -> NDArray[np.int64]:
        """The tokens appended so far."""
        return self._tokens[self._num_prompt_tokens : self._num_prompt_tokens + self.num_output_tokens]

    @property
    def signed_seed(self) -> int:
        """The seed's 64 bits in two's complement."""
        return (self.seed + 2**63) % 2**64 - 2**63

    @property
    def bans_stop_tokens(self) -> bool:
        """Whether end-of-sequence and stop tokens are banned at the next position."""
        return self.num_output_tokens < self.params.min_tokens

    def append(self, token_id: int) -> None:
        """Account for the token the engine committed."""
        end = self._num_prompt_tokens + self.num_output_tokens
        if end == self._tokens.size:
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[end] = token_id
        self.num_output_tokens += 1
        self.mask_bytes += self.mask_bytes_pending
        self.mask_bytes_pending = 0
        if self.counts is not None:
            self.counts.add(token_id)
        if self.thinking is not None:
            self.thinking.append(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)

    def _open_counts(self, prompt: NDArray[np.int64]) -> TokenCounts | None:
        params = self.params
        if params.repetition_penalty != 1:
            return TokenCounts(np.unique(prompt))
        return TokenCounts(prompt[:0]) if params.presence_penalty or params.frequency_penalty else None


class TokenCounts:
    """How often each id of interest is in the output; ids of the prompt start at 0. Adding a token costs O(1)."""

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self._size = ids.size
        self._ids = np.concatenate([ids, np.empty(64, np.int64)])
        self._counts = np.zeros(self._ids.size, np.int64)
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """[N] distinct ids, in order of appearance."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[N] occurrences in the output."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1


class BadWords:
    """Token sequences that must not be completed, found by the token before their last."""

    __slots__ = ("_longer", "_single")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._single = sorted({int(word[0]) for word in words if len(word) == 1})
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in {tuple(map(int, word)) for word in words if len(word) > 1}:
            self._longer.setdefault(word[-2], []).append((word[:-1], word[-1]))

    def banned(self, output_token_ids: NDArray[np.int64]) -> list[int]:
        """Ids that would complete a word after this output."""
        if not output_token_ids.size:
            return self._single
        matching = [
            last
            for prefix, last in self._longer.get(int(output_token_ids[-1]), ())
            if tuple(output_token_ids[-len(prefix) :].tolist()) == prefix
        ]
        return self._single + matching
