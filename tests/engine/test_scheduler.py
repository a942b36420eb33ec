from collections import Counter

import pytest
from fake_engine import FakeEngine, preempt_all
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepmask.engine.request import Completion, State


class Schedules(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts, pre-emptions and new weights, on any small engine."""

    def __init__(self):
        super().__init__()
        self.engine = None

    @precondition(lambda self: self.engine is None)
    @rule(
        num_blocks=st.integers(1, 10),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
    )
    def start(self, **sizes):
        self.engine = FakeEngine(**sizes)

    @precondition(lambda self: self.engine is not None and len(self.engine.requests) < 8)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),  # few tokens, so that prefixes meet
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    )
    def add(self, prompt, lengths):
        if self.engine.max_model_len > 1:
            self.engine.add(prompt[: self.engine.max_model_len - 1], lengths)

    @precondition(lambda self: self.engine is not None)
    @rule()
    def step(self):
        self.engine.step()

    @precondition(lambda self: self.engine is not None and self.engine.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(self.engine.requests)))

    @precondition(lambda self: self.engine is not None)
    @rule()
    def change_weights(self):
        self.engine.change_weights()

    @precondition(lambda self: self.engine is not None)
    @rule()
    def preempt_running(self):
        preempt_all(self.engine.scheduler)
        assert self.engine.pool.num_free == self.engine.pool.num_blocks

    @invariant()
    def blocks_add_up(self):
        if self.engine is not None:
            self.engine.check_blocks()

    def teardown(self):
        if self.engine is not None:
            self.engine.run()
            arrivals = [c.request for c in self.engine.started if c.index == 0]
            order = [self.engine.requests.index(request) for request in arrivals]
            assert order == sorted(order), "first come, first served"


Schedules.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSchedules = Schedules.TestCase


def states(request):
    return [completion.state for completion in request.completions]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    engine = FakeEngine(num_blocks=8, budget=8)
    engine.add(range(20), [1])
    assert [chunk.num_tokens for _ in range(3) for chunk in engine.step().chunks] == [8, 8, 4]


def test_a_long_prompt_does_not_hold_up_what_is_running():
    engine = FakeEngine(num_blocks=20, budget=4)
    first = engine.add([1, 2], [12])
    engine.step()
    engine.add(range(40), [1])
    for _ in range(10):
        assert next(iter(engine.step().chunks)).completion.request is first


def test_siblings_share_the_blocks_of_their_prompt():
    engine = FakeEngine(num_blocks=16, max_num_seqs=8, budget=16)
    request = engine.add(range(10), [5, 5, 5])
    assert states(request) == [State.WAITING, State.HELD, State.HELD]
    assert engine.step().copies == []
    assert states(request) == [State.RUNNING, State.WAITING, State.WAITING]
    assert len(engine.step().copies) == 2
    blocks = Counter(block for completion in request.completions for block in completion.blocks)
    assert sorted(blocks.values()) == [1, 1, 1, 3, 3]
    engine.run()
    assert engine.num_computed == 10 + 2 + 3 * 4  # the prompt once, its last token for each sibling, then the draws


def test_a_sibling_that_shares_keys_of_old_weights_offers_none_to_others():
    engine = FakeEngine(num_blocks=16, max_num_seqs=8, budget=16)
    request = engine.add(range(4), [6, 6])  # one full block, which the sibling copies
    engine.step()
    engine.change_weights()
    engine.step()
    assert states(request) == [State.RUNNING, State.RUNNING]
    other = engine.add(range(5), [1])
    engine.run()
    assert other.num_cached_tokens == 0


def test_a_completion_computed_anew_by_new_weights_offers_its_blocks():
    engine = FakeEngine(num_blocks=16, budget=16)
    engine.add(range(8), [6])
    engine.step()
    engine.change_weights()
    preempt_all(engine.scheduler)
    engine.step()
    other = engine.add(range(9), [1])
    engine.run()
    assert other.num_cached_tokens == 8


def test_preempted_completions_and_siblings_come_before_newer_requests():
    engine = FakeEngine(num_blocks=16, max_num_seqs=1, budget=16)
    first, second = engine.add(range(8), [3, 3]), engine.add(range(20, 28), [1])
    engine.step()
    preempt_all(engine.scheduler)
    engine.run()
    assert engine.started == [*first.completions, *second.completions]


def test_a_prefix_is_found_until_the_weights_change():
    engine = FakeEngine(num_blocks=16, budget=32)
    cached = []
    for change in (False, False, True, False):
        if change:
            engine.change_weights()
        request = engine.add(range(13), [1])
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 12, 0, 12]


def test_a_prompt_half_computed_when_the_weights_change_is_not_offered_to_others():
    engine = FakeEngine(num_blocks=16, budget=8)
    engine.add(range(16), [4])
    engine.step()
    engine.change_weights()
    engine.step()
    request = engine.add(range(16), [1])
    engine.run()
    assert request.num_cached_tokens == 0


def test_the_completion_that_started_last_is_preempted_and_keeps_its_tokens():
    engine = FakeEngine(num_blocks=5, block_size=4, budget=16)
    first, second = engine.add(range(8), [10]), engine.add(range(8, 14), [10])
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert states(first) == [State.RUNNING]
    assert states(second) == [State.WAITING]
    assert second.completions[0].token_ids
    assert second.completions[0].blocks == []
    engine.run()
    assert engine.scheduler.num_preemptions == 1


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_an_abort_in_any_state_frees_what_was_held(num_steps):
    engine = FakeEngine(num_blocks=6, max_num_seqs=2, budget=8)
    requests = [engine.add(range(at, at + 11), [6, 6]) for at in range(3)]
    for _ in range(num_steps):
        engine.step()
    seen = {completion.state for request in requests for completion in request.completions}
    assert seen >= {State.HELD, State.WAITING}
    for request in requests:
        engine.abort(request)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.step().chunks == []


def test_siblings_go_on_when_the_one_that_computes_their_prompt_fails():
    engine = FakeEngine(num_blocks=16, budget=4)
    request = engine.add(range(10), [3, 3, 3])
    engine.step()
    failed = request.completions[0]
    failed.finish("error", "why")
    engine.scheduler.remove(failed)
    engine.run()
    assert [completion.finish_reason for completion in request.completions] == ["error", "length", "length"]


class Compared(Completion):
    """Counts how often it is compared: once for each entry that a search of a list passes."""

    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return self is other

    __hash__ = object.__hash__


@pytest.mark.parametrize("end", ["run", "abort"])
def test_the_cost_of_a_request_does_not_grow_with_the_queue(end, monkeypatch):
    monkeypatch.setattr(FakeEngine, "check_blocks", lambda _self: Counter())
    monkeypatch.setattr(FakeEngine, "_check_plan", lambda _self, _plan: None)
    comparisons = []
    for num_requests in (500, 5000):
        engine = FakeEngine(num_blocks=64, max_num_seqs=8, budget=64)
        engine.started = {}
        for at in range(num_requests):
            engine.add([at % 7, 1, 2], [1, 1], make=Compared)
        Compared.count = 0
        if end == "abort":
            for request in engine.requests:
                engine.abort(request)
        else:
            while engine.scheduler.waiting or engine.scheduler.running:
                finish_step(engine)
        comparisons.append(Compared.count / num_requests)
    assert comparisons[1] <= comparisons[0] * 1.1 + 1


def finish_step(engine):
    """A step without the books of the fake engine."""
    plan = engine.scheduler.schedule()
    drawing = [chunk.completion for chunk in plan.chunks if chunk.draws]
    for chunk in plan.chunks:
        engine.scheduler.computed(chunk)
    for completion in drawing:
        completion.commit(1, "0")
        completion.finish("length")
        engine.scheduler.remove(completion)
