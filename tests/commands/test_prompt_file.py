"""Prompt files: every kind that is read, and every kind that is refused with its remedy."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepmask.commands.prompt_file import describe, read_prompts
from keepmask.errors import RequestError

CHAT = [{"role": "user", "content": "hi"}]


def read(tmp_path, data):
    path = tmp_path / "prompts"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_prompts(path)


def values(file):
    assert not file.invalid
    return [(each.request_id, each.value) for each in file.prompts]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_no_character_inside_a_string_cuts_a_line(tmp_path_factory, text):
    lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in (text, "\u2028\u2029\u0085\x0b\x0c\x1c", "last"))
    file = read(tmp_path_factory.mktemp("lines"), lines)
    assert values(file) == [("1", text), ("2", "\u2028\u2029\u0085\x0b\x0c\x1c"), ("3", "last")]


def test_line_ends_blank_lines_and_the_byte_order_mark_are_passed_over(tmp_path):
    assert values(read(tmp_path, b'\xef\xbb\xbf"a"\r\n\r\n  \n"b"\r\n')) == [("1", "a"), ("4", "b")]
    assert values(read(tmp_path, b'\xef\xbb\xbf\n"a"')) == [("2", "a")]


def test_a_json_array_is_its_items(tmp_path):
    rows = [{"prompt": "a"}, "b"]
    for text in (json.dumps(rows), "\n " + json.dumps(rows, indent=2)):
        assert values(read(tmp_path, text)) == [("1", "a"), ("2", "b")]
    with pytest.raises(RequestError, match="prompts: begins as a JSON array, but is not JSON"):
        read(tmp_path, "[1, 2]\n[3]\n")


def test_gzip_is_unpacked(tmp_path):
    packed = gzip.compress(b'"a"\n' * 3)
    assert len(values(read(tmp_path, packed))) == 3
    for cut in (packed[:-9], packed[:12]):
        with pytest.raises(RequestError, match="gzip stream is damaged"):
            read(tmp_path, cut)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('"a"'.encode("utf-16"), "is UTF-16 text; convert it: iconv"),
        (b"\x28\xb5\x2f\xfd....", "is zstd-compressed"),
        (b"PK\x03\x04....", "is a zip archive"),
        (b"ARROW1..", "is an Arrow file; save it as Parquet"),
        (b"PAR1 but not really", "damaged, or no table"),
        (b"", "holds no prompts"),
        (b"\n \n", "holds no prompts"),
    ],
)
def test_other_files_are_refused_with_the_remedy(tmp_path, data, says):
    with pytest.raises(RequestError, match=says):
        read(tmp_path, data)


def test_all_bad_rows_are_named_in_one_go_and_keep_their_numbers(tmp_path):
    rows = [b'"fine"', b"{", "café".encode("latin-1"), b"[" * 100_000, b'{"text": 1}', b'"also fine"', b"NaN"]
    file = read(tmp_path, b"\n".join([b'{"prompt": "x", "id": 7}', *rows]))
    assert [each.request_id for each in file.prompts] == ["7", "2"]
    assert [each.number for each in file.invalid] == [3, 4, 5, 6, 7, 8]
    message = describe(tmp_path / "f", file.invalid)
    for says in (
        "6 rows cannot be rolled out; correct them, or leave them out with --skip-invalid",
        "f, row 3: is not JSON",
        "row 4: is not UTF-8 (byte 0xe9 at 3); convert the file",
        "row 5: is nested too deeply",
        "row 6: has text; must have exactly one of prompt, messages",
        "row 7: id '7' is also that of row 1",
        "row 8: is not JSON: NaN is not a JSON number",
    ):
        assert says in message
    assert "and 5 more" in describe(tmp_path / "f", file.invalid * 4 + file.invalid[:1])


def test_parquet_rows_keep_their_other_columns(tmp_path):
    chats = [[{"role": "user", "content": f"q{i}"}] for i in range(2)]
    table = pa.table(
        {
            "data_source": ["gsm8k", "gsm8k"],
            "prompt": chats,
            "reward_model": [{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": None}],
            "score": [0.5, float("nan")],
            "image": [b"\x00\xff", None],
            "day": pa.array([0, None], pa.date32()),
            "ids": [np.arange(2), None],
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    first, second = read_prompts(tmp_path / "f.parquet").prompts
    assert (first.kind, first.value) == ("messages", chats[0])
    assert first.extra == {
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "score": 0.5,
        "image": "AP8=",
        "day": "1970-01-01",
        "ids": [0, 1],
    }
    assert second.extra == {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": None}}


def test_a_saved_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"messages": [CHAT, CHAT, CHAT], "answer": [1, 2, 3]})
    rows.filter(lambda row: row["answer"] != 2).save_to_disk(tmp_path / "set", num_shards=2)
    found = read_prompts(tmp_path / "set").prompts
    assert [(each.value, each.extra) for each in found] == [(CHAT, {"answer": 1}), (CHAT, {"answer": 3})]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "dict")
    with pytest.raises(RequestError, match="holds several splits; name the folder of one: test, train"):
        read_prompts(tmp_path / "dict")
    assert len(read_prompts(tmp_path / "dict" / "train").prompts) == 3


def test_a_folder_of_parquet_files_is_read_in_order(tmp_path):
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for i in range(2):
        pq.write_table(pa.table({"prompt": [f"{i}a", f"{i}b"]}), data / f"train-0000{i}-of-00002.parquet")
    assert [each.value for each in read_prompts(tmp_path / "hub").prompts] == ["0a", "0b", "1a", "1b"]
    pq.write_table(pa.table({"prompt": ["t"]}), data / "test-00000-of-00001.parquet")
    with pytest.raises(RequestError, match="several splits, test, train"):
        read_prompts(tmp_path / "hub")
    with pytest.raises(RequestError, match="holds no Parquet files"):
        read_prompts(data.parent.parent / "nothing" if (tmp_path / "nothing").mkdir() else tmp_path / "nothing")


def test_a_file_that_is_not_there_is_reported_as_such(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "absent")
