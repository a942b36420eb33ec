"""Drafts as long as they pay, by hand and against every choice there is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepmask.drafts import Acceptance, StepCost, draft_lengths, worthwhile


def speed(rates, lengths, num_rows, cost):
    tokens = sum(sum(rate**j for j in range(length + 1)) for rate, length in zip(rates, lengths, strict=True))
    return tokens / cost(num_rows + sum(lengths))


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 3)), min_size=1, max_size=3),
    st.lists(st.floats(0.001, 0.1), min_size=3, max_size=3),
)
def test_no_other_lengths_give_more_tokens_a_second(completions, steps):
    rates, most = zip(*completions, strict=True)
    cost = StepCost(dict(zip((1, 4, 12), itertools.accumulate(steps), strict=True)))
    lengths = draft_lengths(rates, most, len(rates), cost)
    assert all(0 <= length <= limit for length, limit in zip(lengths, most, strict=True))
    best = max(speed(rates, other, len(rates), cost) for other in itertools.product(*(range(m + 1) for m in most)))
    assert speed(rates, lengths, len(rates), cost) == pytest.approx(best, rel=1e-9)


def test_rows_that_cost_nothing_are_all_taken_and_dear_ones_are_not():
    free, dear = StepCost({1: 1.0, 100: 1.0}), StepCost({1: 1.0, 100: 100.0})
    assert draft_lengths([0.5, 0.9], [4, 4], 2, free) == [4, 4]
    assert draft_lengths([0.5, 0.9], [4, 4], 2, dear) == [0, 0]


def test_cost_is_measured_between_and_beyond_and_never_falls():
    cost = StepCost({1: 2.0, 3: 4.0, 5: 3.0, 9: 8.0})
    assert [cost(rows) for rows in (1, 2, 3, 4, 5, 7, 9, 13)] == [2, 3, 4, 4, 4, 6, 8, 12]


def test_a_drafter_that_always_fails_is_soon_left_alone_and_tried_again_in_a_while():
    every = Acceptance()
    mine = Acceptance(every)
    first = mine.rate
    for _ in range(60):
        mine.record(4, 0)
    assert mine.rate < 0.05
    for _ in range(2000):
        mine.fade()
        every.fade()
    assert mine.rate == pytest.approx(first, abs=0.01)


def test_only_the_first_wrong_token_of_a_draft_counts():
    mine = Acceptance(Acceptance())
    for _ in range(400):
        mine.record(8, 1)  # one right, one wrong, six never looked at
    assert mine.rate == pytest.approx(0.5, abs=0.02)


def test_rounds_that_cost_more_than_they_bring_are_left_out():
    cost = StepCost({1: 1.0, 100: 1.0})
    assert draft_lengths([0.9, 0.9], [1, 4], 2, cost, per_round_s=0.1) == [1, 4]
    assert draft_lengths([0.9, 0.5], [1, 4], 2, cost, per_round_s=0.3) == [1, 1]
    assert draft_lengths([0.9, 0.9], [4, 4], 2, cost, per_round_s=2.0) == [0, 0]


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.2), st.integers(0, 9))
def test_a_draft_is_as_long_as_its_last_token_may_pay(rate, floor, most):
    length = worthwhile(rate, floor, most)
    assert 0 <= length <= most
    if 0 < floor < 1 and 0 < rate < 1:
        assert length == 0 or rate**length > floor * (1 - 1e-9)
        assert length == most or rate ** (length + 1) <= floor * (1 + 1e-9)
