import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import tiny
from keepmask.engine.completion_text import CompletionText, TextOffsets
from keepmask.engine.token_bytes import TokenBytes, byte_values

BYTE_LEVEL = tiny.byte_tokenizer().backend_tokenizer
FALLBACK = tiny.byte_fallback_tokenizer()


@given(st.text())
def test_bytes_of_byte_level_tokens_add_up_to_the_text(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(TokenBytes(BYTE_LEVEL), ids)).decode() == text


def test_a_token_that_ends_within_a_character_has_its_own_bytes():
    ids = BYTE_LEVEL.encode("😀", add_special_tokens=False).ids
    assert list(map(TokenBytes(BYTE_LEVEL), ids)) == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert BYTE_LEVEL.decode(ids[:2]) == "\ufffd"  # which is three other bytes


def test_sentencepiece_bytes_and_spaces():
    of = TokenBytes(FALLBACK)
    names = {
        name: of(FALLBACK.token_to_id(name)) for name in ("<0xF0>", "<0x00>", "▁the", "b", "é", "▁▁", "</s>", "\ufffd")
    }
    assert names == {
        "<0xF0>": b"\xf0",
        "<0x00>": b"\0",
        "▁the": b" the",
        "b": b"b",
        "é": "é".encode(),
        "▁▁": b"  ",
        "</s>": b"</s>",
        "\ufffd": "\ufffd".encode(),
    }


def test_special_and_unmapped_tokens():
    of = TokenBytes(BYTE_LEVEL)
    assert (of(tiny.EOS), of(300), of(99_999)) == (b"<eos>", b"w300", b"")


def test_names_like_bytes_are_text_where_the_tokenizer_does_not_decode_them():
    backend = Tokenizer(models.WordLevel({"<0x41>": 0, "ab": 1}, unk_token="ab"))
    assert byte_values(backend) == {}
    assert TokenBytes(backend)(0) == b"<0x41>"


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 4, 4, 4, 4, 4, 5]), (False, [0, 4, 9, 9, 9, 9, 10])])
def test_offsets_count_the_text_that_is_shown(skip, offsets):
    smile = BYTE_LEVEL.encode("😀", add_special_tokens=False).ids
    tokens = [300, tiny.BOS, *smile, 301]
    found = TextOffsets(CompletionText(BYTE_LEVEL, skip_special_tokens=skip))
    assert found.push(tokens[:3]) + found.push(tokens[3:]) == offsets
