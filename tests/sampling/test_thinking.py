"""The thinking budget: what opens and closes a span, what counts, what is forced."""

import pytest

from keepmask.sampling.thinking import Thinking

START, END = (1,), (8, 9)


def forced(budget, *tokens, start=START, end=END):
    return Thinking(budget, start, end, tokens).forced_token_id


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (2, [5, 5, 5], None),  # no span
        (2, [1, 5], None),
        (2, [1, 5, 6], 8),
        (2, [1, 5, 6, 8], 9),  # one by one
        (2, [1, 5, 6, 8, 9], None),  # closed
        (2, [1, 5, 6, 8, 9, 5, 5, 5], None),
        (2, [1, 5, 6, 8, 9, 1, 5], None),  # a later span has the whole budget
        (2, [1, 5, 6, 8, 9, 1, 5, 5], 8),
        (0, [1], 8),
        (3, [1, 5, 8, 9, 5, 5], None),  # closed by the model
        (2, [1, 5, 8], 9),  # the model has begun to close it
        (2, [1, 1, 1], 8),  # start tokens inside count as any other
    ],
)
def test_end_tokens_are_forced_once_the_budget_is_spent(budget, tokens, expected):
    assert forced(budget, *tokens) == expected


def test_start_sequences_may_be_longer_than_one_token():
    assert forced(0, 1, 2, start=(1, 2)) == 8
    assert forced(0, 1, 3, 2, start=(1, 2)) is None
    assert forced(0, 1, 1, 2, start=(1, 2)) == 8


def test_an_end_that_repeats_its_beginning_is_matched_from_the_longest():
    assert forced(3, 1, 7, 8, 8, end=(8, 8, 9)) == 9
    assert forced(3, 1, 8, 9, 8, end=(8, 9, 8, 7)) == 7


def test_tokens_appended_one_by_one_are_as_those_of_the_prompt():
    tokens = [5, 1, 4, 8, 4, 8, 9, 1, 3, 3, 3]
    thinking = Thinking(3, START, END, [])
    for n, token_id in enumerate(tokens):
        assert thinking.forced_token_id == forced(3, *tokens[:n])
        thinking.append(token_id)
