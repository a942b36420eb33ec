"""An engine without a model around the real scheduler: it keeps the books of a KV cache and checks them each step."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from keepmask.engine.kvcache import BlockPool, prefix_hashes
from keepmask.engine.request import Completion, Request, State
from keepmask.engine.scheduler import Scheduler
from keepmask.params import SamplingParams


def preempt_all(scheduler):
    """Take the blocks of every running completion, as when memory runs out; all are computed again."""
    while scheduler.running:
        scheduler._preempt(scheduler.running[-1])


ROW = SimpleNamespace(append=lambda _token_id: None)


class FakeEngine:
    """Draws token 100 + its position. Of each slot it knows the tokens up to it and the version of the weights."""

    def __init__(self, *, num_blocks=8, block_size=4, max_num_seqs=4, budget=8):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.max_model_len = num_blocks * block_size
        self.version = 0
        self.requests = []
        self.lengths = {}  # completion -> how many tokens it will draw
        self.started = []  # completions in the order of their first step
        self.slots = {}  # (block, offset) -> (tokens, version)
        self.num_steps = 0
        self.num_computed = 0
        self.num_copied = 0

    def add(self, prompt, lengths, make=Completion):
        """A request with one completion for each of `lengths`."""
        params = SamplingParams(max_tokens=max(lengths))
        request = Request(request_id=str(len(self.requests)), prompt_token_ids=list(prompt), params=params, seed=0)
        for index, length in enumerate(lengths):
            completion = make(request=request, index=index, row=ROW)
            self.lengths[completion] = min(length, self.max_model_len - len(prompt))
            request.completions.append(completion)
        request.block_hashes = prefix_hashes(prompt, self.pool.block_size)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request):
        for completion in request.completions:
            if completion.state is not State.FINISHED:
                completion.finish("abort")
                self.scheduler.remove(completion)

    def change_weights(self):
        self.version += 1
        self.scheduler.weights_changed()

    def step(self):
        """One step; returns its plan."""
        known = set(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.num_steps += bool(plan.chunks)
        forked = {copy.target for copy in plan.copies}
        self._check_plan(plan)
        for copy in plan.copies:
            assert copy.source != copy.target
            self.num_copied += 1
            for offset in range(self.pool.block_size):
                self.slots.pop((copy.target, offset), None)
                if (copy.source, offset) in self.slots:
                    self.slots[copy.target, offset] = self.slots[copy.source, offset]
        for chunk in plan.chunks:
            completion = chunk.completion
            fresh = completion not in known and not forked & set(completion.blocks)
            self._check_past(completion, same_version=fresh)
            if completion not in self.started:
                self.started.append(completion)
        for chunk in plan.chunks:
            self._write(chunk)
        drawing = [chunk.completion for chunk in plan.chunks if chunk.draws]
        for chunk in plan.chunks:
            self.scheduler.computed(chunk)
        for completion in drawing:
            completion.commit(100 + len(completion.token_ids), str(self.version))
            if len(completion.token_ids) == self.lengths[completion]:
                completion.finish("length")
                self.scheduler.remove(completion)
        self.check_blocks()
        return plan

    def run(self, limit=5000):
        """Step until nothing is left to do."""
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
            assert self.num_steps < limit
        self.check_idle()

    def check_idle(self):
        assert self.pool.num_free == self.pool.num_blocks
        assert {completion.state for completion in self.lengths} <= {State.FINISHED}
        for completion, length in self.lengths.items():
            if completion.finish_reason == "length":
                assert completion.token_ids == [100 + at for at in range(length)]

    def check_blocks(self):
        """Blocks belong to running completions, as many times as these hold them, and to nobody else."""
        held = Counter()
        for completion in self.lengths:
            assert len(set(completion.blocks)) == len(completion.blocks)
            assert not completion.blocks or completion.state is State.RUNNING
            held.update(completion.blocks)
        for block in range(self.pool.num_blocks):
            assert self.pool.is_free(block) == (block not in held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        return held

    def _check_plan(self, plan):
        scheduler = self.scheduler
        held = self.check_blocks()
        completions = [chunk.completion for chunk in plan.chunks]
        assert bool(plan.chunks) == bool(scheduler.running or scheduler.waiting)
        assert len(set(completions)) == len(completions)
        assert set(completions) <= set(scheduler.running)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= scheduler.max_num_batched_tokens
        for chunk in plan.chunks:
            completion = chunk.completion
            start, stop = completion.num_computed, completion.num_computed + chunk.num_tokens
            assert 0 < chunk.num_tokens <= completion.num_pending
            assert stop <= len(completion.blocks) * self.pool.block_size
            for at in range(start // self.pool.block_size, -(-stop // self.pool.block_size)):
                assert held[completion.blocks[at]] == 1, "a block that others hold is never written"

    def _check_past(self, completion, *, same_version):
        """What is taken for computed is there: the same tokens, and where it starts anew, by the present weights."""
        tokens = completion.tokens(0, completion.num_tokens)
        for at in range(completion.num_computed):
            known, version = self.slots[self._slot(completion, at)]
            assert known == tuple(tokens[: at + 1])
            assert version == self.version or not same_version

    def _write(self, chunk):
        completion = chunk.completion
        tokens = completion.tokens(0, completion.num_tokens)
        for at in range(completion.num_computed, completion.num_computed + chunk.num_tokens):
            self.slots[self._slot(completion, at)] = (tuple(tokens[: at + 1]), self.version)
        self.num_computed += chunk.num_tokens

    def _slot(self, completion, at):
        return completion.blocks[at // self.pool.block_size], at % self.pool.block_size
