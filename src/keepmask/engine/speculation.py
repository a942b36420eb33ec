"""`Speculation`: which guesses at the next tokens a step verifies, and what became of them.

The rows of a draft go through the forward behind the completion's own last token. Each position is then drawn from with
its own noise, one after the other, as long as the draw is the guess. So whatever is guessed, a completion's tokens,
supports and log-probabilities are those it would have had without: a guess decides only how many of them a step gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter
from typing import Any

from keepmask.config import EngineConfig, SpeculativeConfig
from keepmask.drafts import (
    Acceptance,
    Drafter,
    DraftRow,
    HistoryStore,
    StepCost,
    SuffixDrafter,
    draft_lengths,
    worthwhile,
)
from keepmask.engine.draft_model import ModelDrafter
from keepmask.engine.model_runner import ModelRunner
from keepmask.engine.probe import ProbeChunk, ProbeSequence
from keepmask.engine.request import Completion, Request
from keepmask.params import SamplingParams
from keepmask.sampling import Sampler
from keepmask.wire.rollout_file import read_rollouts

__all__ = ["Speculation", "measured_cost", "speculation_of"]


_USUAL = SamplingParams(top_k=50, top_p=0.95, logprobs=0, detokenize=False)


@dataclass(slots=True)
class _Guessing:
    """What one completion is guessed by."""

    row: DraftRow
    acceptance: Acceptance
    num_told: int = 0

    def tell(self, token_ids: Sequence[int]) -> None:
        """Let the row know those of the completion's tokens that it does not."""
        for token_id in token_ids[self.num_told :]:
            self.row.append(token_id)
        self.num_told = len(token_ids)


class Speculation:
    """Drafts for the completions in flight.

    cost: of a step by its rows, on the machine at hand. round_s: what drawing takes before its first row.
    num_drafted, num_accepted: guesses that were verified so far, and those of them that were drawn.
    """

    def __init__(self, config: SpeculativeConfig, drafter: Drafter[Any], cost: StepCost, round_s: float = 0.0) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._most = config.num_speculative_tokens
        self._drafter = drafter
        self._cost = cost
        self._round_s = round_s
        self._acceptance = Acceptance()
        self._open: dict[Completion, _Guessing] = {}

    def drafts(self, completions: Sequence[Completion], *, num_rows: int, room: int) -> list[list[int]]:
        """What to verify for each of these completions, all of which draw in a step of `num_rows` rows.

        room: rows that may be added at most.
        """
        guessing = [self._guessing(completion) for completion in completions]
        rates, rows = [entry.acceptance.rate for entry in guessing], [entry.row for entry in guessing]
        # What a further row takes, in terms of what a token takes without drafts: a less likely guess cannot pay.
        without_s = float(self._cost(num_rows))
        floor = (float(self._cost(num_rows + len(rows))) - without_s) / without_s
        lengths = [
            worthwhile(rate, floor, self._limit(completion))
            for rate, completion in zip(rates, completions, strict=True)
        ]
        per_guess_s = self._drafter.step_s / max(1, len(rows))
        if per_guess_s:  # a guess costs more than its row: first see whether it pays
            lengths = draft_lengths(rates, lengths, num_rows, self._cost, per_guess_s=per_guess_s)
        proposed = self._drafter.propose(rows, lengths)
        lengths = draft_lengths(
            rates, [len(draft) for draft in proposed], num_rows, self._cost, per_round_s=self._round_s
        )
        drafts = []
        for entry, draft, length in zip(guessing, proposed, lengths, strict=True):
            if not length:
                entry.acceptance.fade()
            taken = draft[: min(length, room)]
            room -= len(taken)
            drafts.append(taken)
        if not any(drafts):
            self._acceptance.fade()
        return drafts

    def begin(self, request: Request) -> None:
        """A request is queued."""
        self._drafter.expect(request.prompt_token_ids)

    def committed(self, completion: Completion, draft: Sequence[int], num_tokens: int) -> None:
        """The completion's last `num_tokens` tokens came out of a step that verified `draft`."""
        entry = self._guessing(completion)
        drawn = completion.token_ids[len(completion.token_ids) - num_tokens :]
        if draft:
            num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, drawn, strict=False)))
            entry.acceptance.record(len(draft), num_accepted)
            self.num_drafted += len(draft)
            self.num_accepted += num_accepted

    def end(self, request: Request) -> None:
        """All completions of the request have ended."""
        for completion in request.completions:
            if (entry := self._open.pop(completion, None)) is not None:
                entry.row.close()
        self._drafter.release(request.prompt_token_ids)

    def _guessing(self, completion: Completion) -> _Guessing:
        if (entry := self._open.get(completion)) is None:
            request = completion.request
            row = self._drafter.open(
                request.prompt_token_ids, params=request.params, seed=request.seed, completion_index=completion.index
            )
            entry = self._open[completion] = _Guessing(row, Acceptance(self._acceptance))
        entry.tell(completion.token_ids)
        return entry

    def _limit(self, completion: Completion) -> int:
        """Guesses that can come to something: the last token of a completion is drawn, not guessed at."""
        params = completion.request.params
        assert params.max_tokens is not None
        return min(self._most, params.max_tokens - len(completion.token_ids) - 1)


def speculation_of(config: EngineConfig, runner: ModelRunner, sampler: Sampler, tokenizer: Any) -> Speculation | None:
    """What the engine's configuration asks for."""
    wanted = config.speculative_config
    if wanted is None:
        return None
    cost = measured_cost(runner, sampler, config.max_num_batched_tokens)
    if wanted.method == "draft_model":
        return Speculation(wanted, ModelDrafter(config, wanted, runner.vocab_size, tokenizer), *cost)
    history = None
    if wanted.method == "history":
        history = HistoryStore(max_bytes=wanted.max_history_bytes)
        for path in wanted.rollouts:
            history.extend(read_rollouts(path)[0])
    drafter = SuffixDrafter(
        wanted.method, shortest=wanted.prompt_lookup_min, longest=wanted.prompt_lookup_max, history=history
    )
    return Speculation(wanted, drafter, *cost)


def measured_cost(runner: ModelRunner, sampler: Sampler, most: int) -> tuple[StepCost, float]:
    """The time of steps over single tokens, on the cache as it is before the first request; and of a draw's start."""
    seconds, draws = {}, {}
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if count > max(most, 2):
            break
        rows = [
            sampler.open_row(_USUAL, prompt_token_ids=[0], seed=number, completion_index=0) for number in range(count)
        ]
        batch = runner.lay_out([ProbeChunk(ProbeSequence([0], blocks=[0]), 1, draws=True)] * count)
        times = []
        for _ in range(4):
            start = perf_counter()
            head = runner.head(runner.forward(batch, [])[batch.draw_rows])
            middle = perf_counter()
            sampler.sample(head, rows)
            times.append((perf_counter() - start, perf_counter() - middle))
        seconds[count], draws[count] = min(whole for whole, _ in times), min(draw for _, draw in times)
    return StepCost(seconds), max(0.0, 2 * draws[1] - draws[2])
