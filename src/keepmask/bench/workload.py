"""`Workload`: what one measurement asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["FULL", "QUICK", "SAMPLING", "Sizes", "Workload"]

SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
"""How every completion is drawn; end tokens are ignored, so that all have the same length."""

_GRPO_GROUPS, _GRPO_SIZE, _GRPO_PROMPT = 8, 8, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that arrive at once: prompts of random ids, all of one length, and completions of one length."""

    requests: int
    n: int = 1
    """Completions of each prompt."""
    prompt: int
    """Tokens of a prompt."""
    output: int
    """Tokens of a completion."""

    @property
    def num_sequences(self) -> int:
        """Completions that are decoded together."""
        return self.requests * self.n

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated."""
        return self.num_sequences * self.output

    @property
    def label(self) -> str:
        """Such as "64 of 32 + 128", or "8 x 8 of 256 + 128" for eight completions of each of eight prompts."""
        return f"{self.requests}{f' x {self.n}' if self.n > 1 else ''} of {self.prompt} + {self.output}"

    def prompts(self, vocab_size: int, *, seed: int) -> list[list[int]]:
        """Token ids [requests][prompt] from the upper three quarters of the vocabulary, clear of special tokens."""
        ids = np.random.default_rng(seed).integers(vocab_size // 4, vocab_size, (self.requests, self.prompt))
        return [row.tolist() for row in ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The workloads of a run, and how long it may take."""

    requests: tuple[int, ...]
    prompts: tuple[int, ...]
    output: int
    groups: bool
    """Whether GRPO's shape, n completions of each prompt, is among them."""
    seconds: float
    """Time for the rounds; a round is cut short where it would take longer."""
    rounds: int
    """Most times each workload is measured."""

    def workloads(self, only: Iterable[int] | None = None) -> list[Workload]:
        """From few requests to many. only: numbers of requests to keep."""
        found = [
            Workload(requests=requests, prompt=prompt, output=self.output)
            for prompt in self.prompts
            for requests in (self.requests if only is None else sorted(set(only)))
        ]
        if self.groups and only is None:
            found.append(Workload(requests=_GRPO_GROUPS, n=_GRPO_SIZE, prompt=_GRPO_PROMPT, output=self.output))
        return found


FULL = Sizes(requests=(1, 8, 32, 64, 128), prompts=(32, 256), output=128, groups=True, seconds=400, rounds=5)
QUICK = Sizes(requests=(1, 8, 64), prompts=(32,), output=32, groups=False, seconds=20, rounds=3)
