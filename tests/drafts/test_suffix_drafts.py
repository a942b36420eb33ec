"""What each method goes by, and that a draft is what came next there."""

import numpy as np
import pytest

from keepmask.drafts import HistoryStore, SuffixDrafter
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

PROMPT = [1, 2, 3, 4, 5]


def opened(drafter, *, seed=7, index=0, prompt=PROMPT):
    drafter.expect(prompt)
    return drafter.open(prompt, params=SamplingParams(), seed=seed, completion_index=index)


def told(row, tokens):
    for token_id in tokens:
        row.append(token_id)
    return row


def test_ngrams_come_from_the_prompt_and_the_completion():
    row = told(opened(SuffixDrafter("ngram")), [9, 2, 3])
    assert row.propose(2) == [4, 5]
    told(row, [4, 6, 9, 2])
    assert row.propose(3) == [3, 4, 6]


def test_a_completion_that_repeats_itself_is_continued_beyond_its_end():
    row = told(opened(SuffixDrafter("ngram")), [6, 7, 8, 6, 7, 8, 6, 7])
    assert row.propose(7) == [8, 6, 7, 8, 6, 7, 8]


def test_completions_of_other_prompts_are_not_looked_at():
    for method in ("ngram", "siblings"):
        drafter = SuffixDrafter(method)
        told(opened(drafter), [20, 21, 22])
        assert told(opened(drafter, prompt=[1, 2]), [20, 21]).propose(1) == []


def test_siblings_continue_one_another_and_their_own_ngrams_do_not():
    for method, expected in (("siblings", [22, 23]), ("ngram", [])):
        drafter = SuffixDrafter(method)
        told(opened(drafter), [20, 21, 22, 23])
        assert told(opened(drafter, index=1), [20, 21]).propose(4) == expected


def test_ended_siblings_are_looked_at_until_the_last_request_of_the_prompt_ends():
    drafter = SuffixDrafter("siblings")
    told(opened(drafter), [20, 21, 22]).close()
    drafter.expect(PROMPT)
    drafter.release(PROMPT)
    assert told(opened(drafter, index=1), [20, 21]).propose(4) == [22]
    for _ in range(2):
        drafter.release(PROMPT)
    assert told(opened(drafter), [20, 21]).propose(4) == []


def test_history_begins_with_the_completion_of_the_same_seed_and_index():
    history = HistoryStore(max_bytes=1000)
    for index, tokens in enumerate(([30, 31, 32], [40, 41, 42], [50, 51])):
        history.put(PROMPT, (7, index), tokens)
    drafter = SuffixDrafter("history", history=history)
    row = opened(drafter, index=1)
    assert row.propose(2) == [40, 41]
    told(row, [40])
    assert row.propose(5) == [41, 42]
    told(row, [30, 31])  # it left that completion, and came upon another
    assert row.propose(5) == [32]


def test_what_ends_is_history_for_the_next_request():
    history = HistoryStore(max_bytes=1000)
    drafter = SuffixDrafter("history", history=history)
    told(opened(drafter), [60, 61, 62]).close()
    drafter.release(PROMPT)
    assert opened(drafter).propose(5) == [60, 61, 62]


def test_nothing_is_proposed_where_nothing_is_known():
    for method in ("ngram", "siblings"):
        assert opened(SuffixDrafter(method)).propose(5) == []


def test_an_empty_completion_in_the_past_proposes_nothing():
    history = HistoryStore(max_bytes=1000)
    history.put([1], (7, 0), [])
    assert opened(SuffixDrafter("history", history=history), prompt=[1]).propose(5) == []


def test_history_stays_within_its_bytes_and_forgets_what_was_used_longest_ago():
    history = HistoryStore(max_bytes=4 * 10)
    history.put([1], (0, 0), range(4))
    history.put([2], (0, 0), range(4))
    history.get([1])
    history.put([3], (0, 0), range(4))
    assert history.nbytes == 4 * 8
    assert list(history.get([1])) == [(0, 0)]
    assert not history.get([2])
    history.put([4], (0, 0), range(11))  # more than there is room for at all
    assert history.nbytes == 0
    assert len(history) == 0


def test_a_later_completion_of_the_same_name_replaces_the_earlier():
    history = HistoryStore(max_bytes=1000)
    history.put([1], (0, 0), [5, 6])
    history.put([1], (0, 0), [7])
    assert history.get([1])[0, 0].tolist() == [7]
    assert history.nbytes == 4


def test_rollouts_without_a_seed_are_kept_apart():
    history = HistoryStore(max_bytes=1000)
    tokens = [np.array(ids, np.int32) for ids in ([5], [6])]
    history.extend(Rollout(prompt_token_ids=np.array([1], np.int32), token_ids=ids) for ids in tokens)
    assert [ids.tolist() for ids in history.get([1]).values()] == [[5], [6]]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_is_proposed_than_is_asked_for(most):
    row = told(opened(SuffixDrafter("ngram")), [6, 6, 6, 6])
    assert row.propose(most) == [6] * most
