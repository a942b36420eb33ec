from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from keepmask.engine.completion_text import CompletionText
from keepmask.engine.token_bytes import byte_values

BYTES = tiny.byte_tokenizer().backend_tokenizer
PIECES = tiny.byte_fallback_tokenizer()
WORDS = "the cat 😀 sat, 漢字 é! ok"
REPLACEMENT = "\ufffd"


def text_of(backend, **options):
    return CompletionText(backend, byte_ids=byte_values(backend), **options)


def grown(text, token_ids):
    """What `released` says after each token, and once there are no more."""
    seen = []
    for token_id in token_ids:
        if text.push([token_id]) is not None:
            break
        seen.append(text.released())
    text.end()
    return [*seen, text.released()]


def spelled(words):
    return BYTES.encode(words).ids


def fallback_ids(words):
    return [PIECES.token_to_id(f"<0x{byte:02X}>") for byte in words.encode()]


@pytest.mark.parametrize("backend", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_any_tokens_grow_to_the_text_the_tokenizer_gives_them(backend, skip, data):
    size = backend.get_vocab_size()
    characters = st.sampled_from([spelled, fallback_ids][backend is PIECES](WORDS))
    token_ids = data.draw(st.lists(st.integers(0, size - 1) | characters | st.integers(0, 2), max_size=25))
    steps = grown(text_of(backend, skip_special_tokens=skip), token_ids)
    assert steps[-1] == backend.decode(token_ids, skip_special_tokens=skip)
    assert all(later.startswith(earlier) for earlier, later in pairwise(steps))


@pytest.mark.parametrize(
    ("backend", "token_ids"), [(BYTES, spelled(WORDS)), (PIECES, fallback_ids(WORDS))], ids=["bytes", "pieces"]
)
def test_text_grows_by_whole_characters(backend, token_ids):
    steps = grown(text_of(backend), token_ids)
    assert len(token_ids) == len(WORDS.encode())
    assert all(REPLACEMENT not in step for step in steps)
    assert steps[-1] == WORDS
    if backend is BYTES:  # where a run of bytes may yet turn out wrong, none of it is shown
        assert len(set(steps)) == len(WORDS)


def test_half_a_character_at_the_end_is_shown_as_the_tokenizer_shows_it():
    token_ids = spelled("a😀")[:-1]
    steps = grown(text_of(BYTES), token_ids)
    assert steps[-2] == "a"
    assert steps[-1] == BYTES.decode(token_ids)
    assert steps[-1].startswith(f"a{REPLACEMENT}")


def test_one_wrong_byte_takes_the_run_of_bytes_before_it_along():
    token_ids = [PIECES.token_to_id("▁hello"), *fallback_ids("ab"), PIECES.token_to_id("<0xFF>")]
    assert PIECES.decode(token_ids) == "hello" + 3 * REPLACEMENT
    assert grown(text_of(PIECES), token_ids) == ["hello"] * 4 + ["hello" + 3 * REPLACEMENT]


def test_a_special_token_that_is_left_out_does_not_part_a_character():
    half = fallback_ids("é")
    token_ids = [half[0], PIECES.token_to_id("</s>"), half[1], PIECES.token_to_id("b")]
    assert grown(text_of(PIECES), token_ids)[-1] == "éb"


def test_tokens_named_like_bytes_are_no_bytes_where_the_tokenizer_does_not_decode_them():
    assert len(byte_values(PIECES)) == 256
    assert byte_values(BYTES) == {}


def find(stop, words, **options):
    """What ends the text, the text, and after how many tokens, one byte each."""
    text = text_of(BYTES, stop=[stop] if isinstance(stop, str) else stop, **options)
    for at, token_id in enumerate(spelled(words), start=1):
        if (found := text.push([token_id])) is not None:
            return found, text.released(), at
    text.end()
    return None, text.released(), None


@pytest.mark.parametrize("stop", ["sat", " sat,", "漢", "😀 s", "t"])
def test_a_stop_string_is_found_across_tokens_and_cut(stop):
    end = WORDS.index(stop) + len(stop)
    assert find(stop, WORDS) == (stop, WORDS[: WORDS.index(stop)], len(WORDS[:end].encode()))
    assert find(stop, WORDS, include_stop=True)[:2] == (stop, WORDS[:end])


def test_a_stop_string_ends_the_text_in_the_middle_of_a_token():
    text = text_of(BYTES, stop=["30"])
    assert text.push(spelled("a")) is None
    assert text.push([BYTES.token_to_id("w301")]) == "30"
    assert text.released() == "aw"
    assert text.num_tokens == 2


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_the_stop_string_that_ends_first_cuts_the_text(words, stops, min_tokens, include):
    """By definition, over all places: the earliest end after min_tokens, and of those that end together the longest."""
    ends = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(words))
        if words.startswith(stop, at) and at + len(stop) > min_tokens
    ]
    expected = (None, words, None)
    if ends:
        end, at, stop = min(ends)
        expected = (stop, words[: end if include else at], end)
    assert find(stops, words, include_stop=include, min_tokens=min_tokens) == expected


@given(
    st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_what_was_released_is_never_taken_back(words, stops, include):
    steps = grown(text_of(BYTES, stop=stops, include_stop=include), spelled(words))
    assert all(later.startswith(earlier) for earlier, later in pairwise(steps))


def test_only_as_much_is_held_back_as_may_begin_a_stop_string():
    text = text_of(BYTES, stop=["xyz"])
    text.push(spelled("hello"))
    assert text.released() == "hel"
    text = text_of(BYTES, stop=["xyz"], include_stop=True)
    text.push(spelled("hello"))
    assert text.released() == "hello"
