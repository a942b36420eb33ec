import contextlib
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepmask.errors import MaskError
from keepmask.wire.parquet import keys, merge, read_footer, read_table, row_groups, write_table
from keepmask.wire.rollouts import from_table, to_table
from made_rollouts import METADATA, made_rollout, made_rollouts


def write(path, rollouts, run=METADATA, token_text=None):
    with path.open("wb") as stream:
        write_table(stream, to_table(rollouts), run, token_text or {})
    return path


def read(path):
    return [rollout for group in row_groups(path) for rollout in from_table(read_table(group))]


def test_a_file_gives_back_its_rows_and_its_footer(tmp_path):
    path = write(tmp_path / "f", made_rollouts(), token_text={7: "<é>", 3: "\n"})
    assert read(path) == made_rollouts()
    footer = read_footer(path)
    assert footer.run == METADATA
    assert footer.token_text == {7: "<é>", 3: "\n"}


def test_the_footer_is_one_json_document_under_one_key(tmp_path):
    metadata = pq.ParquetFile(write(tmp_path / "f", made_rollouts(), token_text={7: "x"})).metadata
    assert list(metadata.metadata) == [b"keepmask"]
    document = json.loads(metadata.metadata[b"keepmask"])
    assert document["format"] == 1
    assert document["run"] == METADATA
    assert document["token_text"] == {"7": "x"}
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_merging_orders_rows_by_request_number_and_keeps_each_once(tmp_path):
    ids = ["req-10", "req-9", "req-2", "other"]
    parts = [write(tmp_path / name, [made_rollout(name, 1), made_rollout(name, 0)]) for name in ids]
    groups = [group for part in [*parts, parts[0]] for group in row_groups(part)]
    merged = tmp_path / "merged"
    with merged.open("wb") as stream:
        merge(groups, stream, METADATA)
    order = [key for group in row_groups(merged) for key in keys(read_table(group))]
    assert order == [(name, i) for name in ("other", "req-2", "req-9", "req-10") for i in (0, 1)]
    assert read(merged)[2] == made_rollout("req-2", 0)


def test_merging_unites_the_token_texts(tmp_path):
    parts = [write(tmp_path / str(i), [made_rollout(str(i))], token_text={i: f"t{i}"}) for i in range(3)]
    buffer = io.BytesIO()
    merge([group for part in parts for group in row_groups(part)], buffer, METADATA)
    (tmp_path / "all").write_bytes(buffer.getvalue())
    assert read_footer(tmp_path / "all").token_text == {0: "t0", 1: "t1", 2: "t2"}


def test_a_newer_format_is_refused_with_the_remedy(tmp_path):
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([])) as writer:
        writer.add_key_value_metadata({b"keepmask": json.dumps({"format": 2, "keepmask": "9.0"}).encode()})
    (tmp_path / "f").write_bytes(sink.getvalue())
    with pytest.raises(MaskError, match=r"format 2, written by keepmask 9\.0; .*upgrade keepmask"):
        read_footer(tmp_path / "f")


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f.parquet")
    (tmp_path / "g.txt").write_text("hello")
    with pytest.raises(MaskError, match=r"f\.parquet: a Parquet file, but not one of rollouts"):
        read_footer(tmp_path / "f.parquet")
    with pytest.raises(MaskError, match=r"g\.txt: damaged, or not a rollout file"):
        read_footer(tmp_path / "g.txt")


def test_a_missing_file_is_reported_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_footer(tmp_path / "absent")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("whole") / "f", made_rollouts(num_requests=2, n=1))
    return path, path.read_bytes()


def test_a_flipped_bit_in_the_data_is_found_by_its_checksum(tmp_path, whole):
    _, data = whole
    damaged = bytearray(data)
    damaged[len(data) // 3] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    with pytest.raises(MaskError, match=r"f: "):
        read(tmp_path / "f")


@settings(max_examples=60)
@given(st.data())
def test_damaged_files_are_read_or_refused_but_never_crash(whole, data):
    path, content = whole
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    other = path.with_name("damaged")
    other.write_bytes(damaged)
    with contextlib.suppress(MaskError):
        read_footer(other)
        assert all(len(rollout.sampling_mask or ()) in (0, 12) for rollout in read(other))


def bomb(path, change, *, rows=1):
    """A rollout file in which one column, made anew, decodes to far more than it takes."""
    table = pa.concat_tables([to_table([made_rollout()])] * rows)
    name, values = change(rows)
    field = table.schema.field(name)
    table = table.set_column(table.schema.get_field_index(name), field, values.cast(field.type))
    with pq.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=True) as writer:
        writer.write_table(table, row_group_size=rows)
        writer.add_key_value_metadata({b"keepmask": json.dumps({"format": 1, "keepmask": "0.1.0", "run": {},
                                                                "token_text": {}}).encode()})  # fmt: skip
    return path


BOMBS = {
    "repeated ids": lambda rows: ("token_ids", pa.array([np.zeros(2**25, np.int32)] * rows)),
    "empty rows of a mask": lambda rows: (
        "sampling_mask",
        pa.ListArray.from_arrays(
            [0, 2**25], pa.ListArray.from_arrays(np.zeros(2**25 + 1, np.int32), pa.array([], "i4"))
        ),
    ),
}


@pytest.mark.parametrize("change", BOMBS.values(), ids=BOMBS)
def test_a_small_file_that_decodes_to_much_is_refused_before_it_is_decoded(tmp_path, change):
    path = bomb(tmp_path / "bomb", change)
    assert path.stat().st_size < 2**18
    pool = pa.default_memory_pool()
    peak = pool.max_memory()
    with pytest.raises(MaskError, match=r"bomb: a row group of \d+ bytes decoded, where at most 268435456 are read"):
        read(path)
    assert pool.max_memory() <= peak + 2**20


def test_one_string_said_many_times_is_refused_by_what_it_means(tmp_path):
    path = bomb(tmp_path / "bomb", lambda rows: ("prompt", pa.array(["x" * 2**18] * rows)), rows=2048)
    assert path.stat().st_size < 2**18
    with pytest.raises(MaskError, match="bytes decoded, where at most 268435456 are read"):
        read(path)


def test_json_nested_deeply_in_the_footer_is_refused(tmp_path):
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([])) as writer:
        writer.add_key_value_metadata({b"keepmask": b"[" * 100_000})
    (tmp_path / "f").write_bytes(sink.getvalue())
    with pytest.raises(MaskError, match=r"f: JSON nested too deeply"):
        read_footer(tmp_path / "f")
