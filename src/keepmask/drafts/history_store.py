"""`HistoryStore`: what was rolled out for a prompt before, in as much memory as it is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from keepmask.outputs import Rollout

__all__ = ["HistoryStore"]

Completions = OrderedDict[tuple[int, int], NDArray[np.int32]]
"""Tokens of the completions of one prompt by seed and completion index, the latest last."""


class HistoryStore:
    """Completions by prompt; a later one of the same seed and index replaces an earlier one.

    Over `max_bytes` of tokens, the prompts that were used longest ago are forgotten.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._by_prompt: OrderedDict[bytes, Completions] = OrderedDict()
        self._num_nameless = 0

    def __len__(self) -> int:
        return len(self._by_prompt)

    def extend(self, rollouts: Iterable[Rollout]) -> None:
        """Remember these rollouts."""
        for rollout in rollouts:
            seed = rollout.seed
            if seed is None:  # below any seed a request can have
                self._num_nameless += 1
                seed = -(2**64) - self._num_nameless
            self.put(rollout.prompt_token_ids.tolist(), (seed, rollout.completion_index), rollout.token_ids.tolist())

    def put(self, prompt_token_ids: Sequence[int], name: tuple[int, int], token_ids: Sequence[int]) -> None:
        """Remember one completion. name: its seed and completion index."""
        key = _digest(prompt_token_ids)
        completions = self._by_prompt.setdefault(key, OrderedDict())
        self._by_prompt.move_to_end(key)
        if (old := completions.pop(name, None)) is not None:
            self.nbytes -= old.nbytes
        completions[name] = np.asarray(token_ids, np.int32)
        self.nbytes += completions[name].nbytes
        while self.nbytes > self.max_bytes:
            _, forgotten = self._by_prompt.popitem(last=False)
            self.nbytes -= sum(tokens.nbytes for tokens in forgotten.values())

    def get(self, prompt_token_ids: Sequence[int]) -> Completions:
        """The completions of this prompt."""
        key = _digest(prompt_token_ids)
        if key not in self._by_prompt:
            return OrderedDict()
        self._by_prompt.move_to_end(key)
        return OrderedDict(self._by_prompt[key])


def _digest(token_ids: Sequence[int]) -> bytes:
    return blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16).digest()
