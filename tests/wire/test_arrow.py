import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_masks import CORNERS, masks

from keepmask.errors import ConfigError, MaskError
from keepmask.mask import SamplingMask
from keepmask.wire import arrow
from keepmask.wire.arrow import decode_arrow, encode_arrow
from keepmask.wire.limits import Limits

LIMITS = Limits(max_ids=1000, max_rows=100, max_bytes=10**6)
MASK = SamplingMask.from_lists([[187, 326], [], [42]], [[-0.7, -0.7], [], [0.0]])


def stream(table, *, compression=None, chunk=None, metadata_version=None):
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    if metadata_version is not None:
        options.metadata_version = metadata_version
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return sink.getvalue().to_pybytes()


def table(rows, kind=None, name="sampling_mask", **others):
    return pa.table({name: pa.array(rows, kind or pa.list_(pa.int32())), **others})


@given(masks())
def test_decode_inverts_encode(mask):
    assert decode_arrow(encode_arrow(mask)) == mask


@pytest.mark.parametrize("mask", CORNERS.values(), ids=CORNERS)
def test_corner_cases_round_trip(mask):
    assert decode_arrow(encode_arrow(mask)) == mask


def test_a_reader_with_pyarrow_alone_gets_the_lists():
    read = pa.ipc.open_stream(encode_arrow(MASK)).read_all()
    assert read["sampling_mask"].to_pylist() == [[187, 326], [], [42]]
    assert read.schema.field("sampling_mask").type.value_type == pa.int32()
    assert read.schema.field("sampling_mask_logprobs").type.value_type == pa.float32()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_streams_of_other_writers_are_read(compression, chunk):
    data = stream(
        table([[187, 326], [], [42]], sampling_mask_logprobs=pa.array([[-0.7, -0.7], [], [0]], pa.list_(pa.float32()))),
        compression=compression,
        chunk=chunk,
    )
    assert decode_arrow(data) == MASK


def test_batches_cut_from_a_longer_table_are_read():
    part = table([[1], [2, 3], [], [4]]).slice(1, 2)
    assert decode_arrow(stream(part)) == SamplingMask.from_lists([[2, 3], []])


ATTACKS = {
    "nothing": (b"", "whole Arrow stream"),
    "other bytes": (b"ARROW1\0\0 and more", "whole Arrow stream"),
    "without its end": (encode_arrow(MASK)[:-8], "end-of-stream marker"),
    "cut in its body": (encode_arrow(MASK)[:-40], "whole Arrow stream"),
    "cut in its header": (encode_arrow(MASK)[:100], "whole Arrow stream"),
    "followed by bytes": (encode_arrow(MASK) + b"\0", "nothing after it"),
    "followed by a stream": (encode_arrow(MASK) * 2, "nothing after it"),
    "huge header length": (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "whole Arrow stream"),
    "negative header length": (b"\xff\xff\xff\xff\xff\xff\xff\xff", "whole Arrow stream"),
    "another column": (stream(table([[1]], name="mask")), "columns .*mask.*: must be sampling_mask"),
    "a column more": (stream(table([[1]], token_ids=pa.array([1]))), "must be sampling_mask and, optionally"),
    "a column twice": (
        stream(pa.table([pa.array([[1]], pa.list_(pa.int32()))] * 2, ["sampling_mask"] * 2)),
        "must be sampling_mask",
    ),
    "64-bit ids": (stream(table([[1]], pa.list_(pa.int64()))), r"must be list<int32>, got list<.*int64"),
    "64-bit offsets": (stream(table([[1]], pa.large_list(pa.int32()))), "must be list<int32>"),
    "flat ids": (stream(table([1, 2], pa.int32())), "must be list<int32>, got int32"),
    "lists of lists": (stream(table([[[1]]], pa.list_(pa.list_(pa.int32())))), "must be list<int32>"),
    "dictionary ids": (
        stream(table([[1]], pa.list_(pa.dictionary(pa.int8(), pa.int32())))),
        "must be list<int32>|a schema and record batches",
    ),
    "a null row": (stream(table([[1], None])), "must hold no nulls"),
    "a null id": (stream(table([[1, None]])), "must hold no nulls"),
    "a negative id": (stream(table([[1], [-5]])), "row 1"),
    "a falling row": (stream(table([[2, 1]])), "row 0"),
    "a repeated id": (stream(table([[2, 2]])), "row 0"),
    "NaN logprobs": (
        stream(table([[2]], sampling_mask_logprobs=pa.array([[float("nan")]], pa.list_(pa.float32())))),
        "finite",
    ),
    "logprobs of other rows": (
        stream(table([[2], [3, 4]], sampling_mask_logprobs=pa.array([[0, 0], [0]], pa.list_(pa.float32())))),
        "one value for each id",
    ),
    "too many rows": (stream(table([[]] * 101)), "Limits.max_rows"),
    "too many rows in many batches": (stream(table([[]] * 101), chunk=10), "Limits.max_rows"),
    "too many ids": (stream(table([list(range(1001))])), "Limits.max_ids"),
    "too many bytes": (bytes(1_000_001), "Limits.max_bytes"),
    "a long header": (
        stream(table([[1]]).replace_schema_metadata({"a": "b" * 70_000})),
        "header of .* bytes: no mask needs one that long",
    ),
    "an old version": (stream(table([[1]]), metadata_version=pa.MetadataVersion.V4), "before 1.0"),
}


@pytest.mark.parametrize(("data", "message"), ATTACKS.values(), ids=ATTACKS)
def test_attack_is_refused(data, message):
    with pytest.raises(MaskError, match=message):
        decode_arrow(data, limits=LIMITS)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_decompression_bomb_is_refused_without_inflating_it(compression):
    ids = np.zeros(40_000_000, np.int32)
    offsets = pa.array([0, ids.size], pa.int32())
    bomb = stream(
        pa.table({"sampling_mask": pa.ListArray.from_arrays(offsets, pa.array(ids))}), compression=compression
    )
    assert len(bomb) < 1_000_000
    before = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(MaskError, match="bytes decompressed: more than 1000 ids"):
        decode_arrow(bomb, limits=LIMITS)
    assert pa.total_allocated_bytes() <= before
    assert pa.default_memory_pool().max_memory() == peak


def test_a_buffer_that_declares_a_huge_length_is_refused():
    data = bytearray(encode_arrow(CORNERS["wide"]))
    declared = (60_000 * 4).to_bytes(8, "little")
    at = data.index(declared)
    data[at : at + 8] = (2**62).to_bytes(8, "little")
    with pytest.raises(MaskError, match="decompressed: more than"):
        decode_arrow(bytes(data))


@settings(max_examples=400)
@given(st.sampled_from(["one", "stored"]), st.data())
def test_damaged_streams_make_a_mask_or_a_mask_error(kind, data):
    damaged = bytearray(encode_arrow(MASK) if kind == "one" else stream(table([[187, 326], [], [42]]), chunk=2))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        mask = decode_arrow(bytes(damaged), limits=LIMITS)
    except MaskError:
        return
    assert SamplingMask(mask.ids, mask.offsets, mask.logprobs) == mask


def test_pyarrow_loads_on_first_use_only():
    code = "import keepmask.wire, sys, json; print(json.dumps([m for m in ('pyarrow', 'torch') if m in sys.modules]))"
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == []


def test_without_pyarrow_the_error_names_what_to_install(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(arrow, "import_module", import_module)
    with pytest.raises(ConfigError, match=r"pip install 'keepmask\[report\]'"):
        encode_arrow(MASK)
