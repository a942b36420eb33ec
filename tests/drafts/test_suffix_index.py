"""Places in sequences, against a search through all of them."""

from hypothesis import given
from hypothesis import strategies as st

from keepmask.drafts.suffix_index import SuffixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def most_agreeing(sequences, number, shortest, longest):
    """How many tokens before any place agree with the end of a sequence; 0 where fewer than `shortest` do."""
    end, best = sequences[number], 0
    for other in sequences:
        for at in range(len(other)):  # a place is followed by a token
            size = 0
            while size < min(longest, at, len(end)) and other[at - size - 1] == end[len(end) - size - 1]:
                size += 1
            best = max(best, size)
    return best if best >= shortest else 0


@given(st.lists(TOKENS, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 4))
def test_a_found_place_agrees_with_as_much_of_the_end_as_any(sequences, shortest, more):
    index = SuffixIndex(shortest=shortest, longest=shortest + more)
    for tokens in sequences:
        index.add(tokens)
    most = most_agreeing(sequences, 0, shortest, shortest + more)
    place = index.find(0)
    # Of an n-gram's places only the latest are compared, so with many the most may lie further back.
    assert (place is None) == (most == 0)
    if place is not None:
        number, at = place
        size = min(most, at)
        assert sequences[number][at - shortest : at] == sequences[0][len(sequences[0]) - shortest :]
        if sum(map(len, sequences)) <= 16:
            assert size == most
            assert sequences[number][at - most : at] == sequences[0][len(sequences[0]) - most :]


def test_the_latest_of_equal_places_is_found():
    index = SuffixIndex(shortest=2, longest=4)
    number = index.add([7, 8, 1, 7, 8, 2, 7, 8])
    assert index.find(number) == (number, 5)


def test_a_longer_agreement_is_preferred_to_a_later_one():
    index = SuffixIndex(shortest=2, longest=4)
    index.add([5, 7, 8, 1])
    index.add([6, 7, 8, 2])
    number = index.add([5, 7, 8])
    assert index.find(number) == (0, 3)


def test_nothing_is_found_before_there_are_tokens_enough():
    index = SuffixIndex(shortest=2, longest=4)
    index.add([1, 1, 1])
    assert index.find(index.add([1])) is None
