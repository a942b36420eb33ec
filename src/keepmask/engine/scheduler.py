"""`Scheduler`: which completions compute how many tokens in the next step. No tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from keepmask.engine.kvcache import BlockPool
from keepmask.engine.request import Completion, Request, State

__all__ = ["BlockCopy", "Schedule", "ScheduledChunk", "Scheduler"]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`completion` computes its next `num_tokens` tokens; the draw follows when none are left to compute."""

    completion: Completion
    num_tokens: int
    draft: Sequence[int] = ()
    """Guesses at the tokens that are drawn, computed along: as long as they hold, further ones are drawn."""

    @property
    def draws(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one is drawn."""
        return self.num_tokens == self.completion.num_pending

    @property
    def num_rows(self) -> int:
        """Rows of the forward."""
        return self.num_tokens + len(self.draft)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block's keys and values before the forward."""

    source: int
    target: int


@dataclass(slots=True)
class Schedule:
    """The work of one step."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class Speculation(Protocol):
    """Guesses at the next tokens of completions."""

    def drafts(self, completions: Sequence[Completion], *, num_rows: int, room: int) -> list[list[int]]:
        """What to verify for each of them, of at most `room` tokens together, in a step of `num_rows` rows."""


class Scheduler:
    """First come, first served, within a budget of tokens, completions and KV blocks per step.

    Running completions go first, the one that started first foremost; what is left of the token budget goes to waiting
    ones. A prompt longer than the budget is computed in chunks. When blocks run out, the running completion that
    started last gives up its blocks and is computed again later: it keeps its tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculation: Speculation | None = None,
    ) -> None:
        self.pool = pool
        self.speculation = speculation
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: OrderedDict[Completion, None] = OrderedDict()  # a queue that gives up any entry at once
        self.running: list[Completion] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a new request: its first completion computes the prompt, its siblings wait for that."""
        first = request.completions[0]
        first.state = State.WAITING
        self.waiting[first] = None

    def schedule(self) -> Schedule:
        """Choose the next step's work and reserve its blocks. Empty only when nothing is left to do."""
        plan = Schedule()
        budget = self._continue_running(plan, self.max_num_batched_tokens)
        budget = self._admit(plan, budget)
        assert plan.chunks or not (self.running or self.waiting)
        if self.speculation is not None and budget > 0:
            plan.chunks = self._with_drafts(plan.chunks, budget, self.speculation)
        return plan

    def computed(self, chunk: ScheduledChunk) -> None:
        """Record that the chunk's keys and values are in the cache."""
        completion = chunk.completion
        prompt_len = len(completion.request.prompt_token_ids)
        in_prompt = completion.num_computed < prompt_len
        completion.num_computed += chunk.num_tokens
        if in_prompt:
            self._register_prompt(completion)
            if completion.num_computed >= prompt_len:
                self._release_held(completion.request)

    def remove(self, completion: Completion) -> None:
        """Forget a finished completion and free its blocks."""
        if completion in self.waiting:
            del self.waiting[completion]
        elif completion in self.running:
            self.running.remove(completion)
        self._free(completion)
        if not any(other.state in (State.WAITING, State.RUNNING) for other in completion.request.completions):
            self._release_held(completion.request)

    def weights_changed(self) -> None:
        """Keys and values of the old weights will not be found for new requests; running ones keep theirs."""
        self.pool.forget_all()
        for completion in self.running:
            completion.registers = False

    def _register_prompt(self, completion: Completion) -> None:
        """Offer the prompt's full blocks to the prefix cache."""
        hashes = completion.request.block_hashes
        full = min(completion.num_computed // self.pool.block_size, len(hashes)) if completion.registers else 0
        for at in range(completion.num_registered, full):
            self.pool.register(completion.blocks[at], hashes[at])
        completion.num_registered = max(completion.num_registered, full)

    def _continue_running(self, plan: Schedule, budget: int) -> int:
        """Schedule running completions, oldest first; returns the tokens left in the budget."""
        at = 0
        while at < len(self.running) and budget > 0:
            completion = self.running[at]
            num_tokens = min(completion.num_pending, budget)
            if self._reserve(completion, completion.num_computed + num_tokens):
                plan.chunks.append(ScheduledChunk(completion, num_tokens))
                budget -= num_tokens
                at += 1
            # else the completion gave up its own place: the list is shorter and the loop ends
        return budget

    def _reserve(self, completion: Completion, num_tokens: int) -> bool:
        """Give the completion blocks for its first `num_tokens` tokens, pre-empting later ones if need be.

        False when the completion itself was the last one and had to go.
        """
        missing = self.pool.blocks_for(num_tokens) - len(completion.blocks)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is completion:
                return False
        if missing > 0:
            completion.blocks += self._take(completion, missing, after=completion.blocks[-1])
        return True

    def _with_drafts(self, chunks: list[ScheduledChunk], room: int, speculation: Speculation) -> list[ScheduledChunk]:
        """Let chunks that draw verify what the next tokens may be, in blocks that nobody will need in the next step."""
        drawing = [chunk for chunk in chunks if chunk.draws]
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        drafts = speculation.drafts([chunk.completion for chunk in drawing], num_rows=num_rows, room=room)
        extended = {}
        for chunk, draft in zip(drawing, drafts, strict=True):
            completion = chunk.completion
            spare = len(completion.blocks) + max(0, self.pool.num_free - len(self.running))
            kept = draft[: max(0, spare * self.pool.block_size - completion.num_tokens)]
            if kept:
                missing = self.pool.blocks_for(completion.num_tokens + len(kept)) - len(completion.blocks)
                if missing > 0:
                    completion.blocks += self._take(completion, missing, after=completion.blocks[-1])
                extended[completion] = replace(chunk, draft=kept)
        return [extended.get(chunk.completion, chunk) for chunk in chunks]

    def _admit(self, plan: Schedule, budget: int) -> int:
        """Move waiting completions to the running ones while budget, places and blocks allow; returns what is left."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            completion = next(iter(self.waiting))
            if (donor := self._donor(completion)) is not None:
                started = self._fork(plan, completion, donor)
            else:
                started = self._start(completion)
            if not started:
                break
            del self.waiting[completion]
            completion.state = State.RUNNING
            self.running.append(completion)
            num_tokens = min(completion.num_pending, budget)
            budget -= num_tokens
            plan.chunks.append(ScheduledChunk(completion, num_tokens))
        return budget

    def _start(self, completion: Completion) -> bool:
        """Reserve blocks for all the tokens of the completion, starting from a cached prefix of its prompt."""
        hashes = completion.request.block_hashes
        cached = self.pool.find(hashes[: (len(completion.request.prompt_token_ids) - 1) // self.pool.block_size])
        revived = sum(1 for block in cached if self.pool.is_free(block))
        missing = self.pool.blocks_for(completion.num_tokens) - len(cached)
        if missing + revived > self.pool.num_free:
            return False
        self.pool.share(cached)
        completion.blocks = cached + self._take(completion, missing, after=cached[-1] if cached else None)
        completion.num_computed = len(cached) * self.pool.block_size
        completion.num_registered = len(cached)
        if not completion.token_ids and completion.index == 0:
            completion.request.num_cached_tokens = completion.num_computed
        return True

    def _take(self, completion: Completion, count: int, *, after: int | None = None) -> list[int]:
        """Blocks for a completion, near what it may still need."""
        request = completion.request
        most = self.pool.blocks_for(len(request.prompt_token_ids) + (request.params.max_tokens or 0))
        return self.pool.take(count, after=after, room=most - len(completion.blocks) - count)

    def _donor(self, completion: Completion) -> Completion | None:
        """A running sibling whose prompt is computed."""
        if completion.token_ids:
            return None
        size = len(completion.request.prompt_token_ids)
        for sibling in completion.request.completions:
            if sibling.state is State.RUNNING and sibling.num_computed >= size:
                return sibling
        return None

    def _fork(self, plan: Schedule, completion: Completion, donor: Completion) -> bool:
        """Share the donor's prompt blocks; copy the one that holds the last prompt token, which is computed anew."""
        if not self.pool.num_free:
            return False
        last = len(completion.request.prompt_token_ids) - 1
        shared = donor.blocks[: last // self.pool.block_size]
        self.pool.share(shared)
        (own,) = self._take(completion, 1)
        plan.copies.append(BlockCopy(donor.blocks[len(shared)], own))
        completion.blocks = [*shared, own]
        completion.num_computed = last
        completion.num_registered = len(shared)
        completion.registers = donor.registers
        return True

    def _preempt(self, completion: Completion) -> None:
        self.running.remove(completion)
        self._free(completion)
        self._put_first(completion)
        self.num_preemptions += 1

    def _free(self, completion: Completion) -> None:
        self.pool.release(completion.blocks)
        completion.blocks = []
        completion.num_computed = 0
        completion.num_registered = 0
        completion.registers = True

    def _release_held(self, request: Request) -> None:
        """Siblings may start: they share the prompt that is there now, or compute it themselves."""
        held = [completion for completion in request.completions if completion.state is State.HELD]
        for completion in reversed(held):
            self._put_first(completion)

    def _put_first(self, completion: Completion) -> None:
        completion.state = State.WAITING
        self.waiting[completion] = None
        self.waiting.move_to_end(completion, last=False)
