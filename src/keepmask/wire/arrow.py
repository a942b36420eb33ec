"""Arrow: a mask as an IPC stream with one list<int32> row a generated token. The one place that loads pyarrow."""

from __future__ import annotations

import struct
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import ConfigError, MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["MEDIA_TYPE", "decode_arrow", "encode_arrow", "load_pyarrow"]

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

_MASK, _LOGPROBS = "sampling_mask", "sampling_mask_logprobs"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_MAX_METADATA = 2**16  # bytes of one message's header; ours take under 500
_ZSTD_LEVEL = 3  # real masks: 5 % fewer bytes than level 1; level 9 takes three times as long for 7 % more


def load_pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its modules; raises ConfigError naming what to install when it is absent."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            "Arrow and Parquet need pyarrow, which is not installed; run: pip install 'keepmask[report]'"
        ) from error


def encode_arrow(mask: SamplingMask) -> bytes:
    """The mask as an Arrow IPC stream of one batch, bodies compressed with zstd.

    Columns: sampling_mask list<int32>, and sampling_mask_logprobs list<float32> where the mask has them; nothing null.
    """
    pa = load_pyarrow()
    columns, fields = [], []
    offsets = mask.offsets.astype(np.int32)
    for name, values in ((_MASK, mask.ids), (_LOGPROBS, mask.logprobs)):
        if values is not None:
            item = pa.field("item", pa.from_numpy_dtype(values.dtype), nullable=False)
            fields.append(pa.field(name, pa.list_(item), nullable=False))
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=fields[-1].type))
    batch = pa.record_batch(columns, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    # No threads: two buffers are sooner done than handed over.
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", _ZSTD_LEVEL), use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def decode_arrow(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask of an Arrow IPC stream with the columns of `encode_arrow`, in one batch or several, compressed or not.

    Raises MaskError for any other bytes: damaged or cut off, other columns or types, nulls, bytes after the end, rows
    that do not ascend, non-finite logprobs, or a mask beyond the limits; nothing is ever decompressed beyond them.
    """
    pa = load_pyarrow()
    limits.check_bytes(len(data))
    try:
        _check_messages(pa, data, limits)
        with pa.ipc.open_stream(data, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            names = _checked_names(pa, reader.schema)
            batches = [_checked_batch(batch, limits) for batch in reader if batch.num_rows]
    except MaskError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, struct.error) as error:
        raise MaskError(f"not a whole Arrow stream: {str(error)[:120]}") from None
    parts = [_csr(batch, names) for batch in batches]
    return SamplingMask.concat(parts) if parts else SamplingMask([], [0], [] if _LOGPROBS in names else None)


def _csr(batch: Any, names: list[str]) -> SamplingMask:
    lists = batch.column(_MASK)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    if _LOGPROBS not in names:
        return SamplingMask(lists.flatten().to_numpy(), offsets - offsets[0])
    logprobs = batch.column(_LOGPROBS)
    if not np.array_equal(np.diff(logprobs.offsets.to_numpy()), np.diff(offsets)):
        raise MaskError(f"{_LOGPROBS}: needs one value for each id of each row of {_MASK}")
    values = logprobs.flatten().to_numpy()
    return SamplingMask(lists.flatten().to_numpy(), offsets - offsets[0], values)


def _checked_names(pa: Any, schema: Any) -> list[str]:
    legal = {_MASK: pa.int32(), _LOGPROBS: pa.float32()}
    names: list[str] = schema.names
    if sorted(names) not in ([_MASK], [_MASK, _LOGPROBS]):
        raise MaskError(f"Arrow columns {str(names)[:120]}: must be {_MASK} and, optionally, {_LOGPROBS}")
    for field in schema:
        if not pa.types.is_list(field.type) or field.type.value_type != legal[field.name]:
            raise MaskError(f"Arrow column {field.name}: must be list<{legal[field.name]}>, got {str(field.type)[:80]}")
    return names


def _checked_batch(batch: Any, limits: Limits) -> Any:
    batch.validate(full=True)
    limits.check(num_rows=batch.num_rows, num_ids=len(batch.column(_MASK).values))
    for column in batch.columns:
        if column.null_count or column.values.null_count:
            raise MaskError("Arrow columns: must hold no nulls; an empty list is the whole vocabulary")
    return batch


def _check_messages(pa: Any, data: bytes, limits: Limits) -> None:
    """Hold the stream against the limits by its headers alone, before any body is decompressed."""
    source = pa.BufferReader(data)
    end = num_rows = num_bytes = 0
    for message in pa.ipc.MessageReader.open_stream(source):  # stops alike at the end marker and at the end of the data
        if message.metadata.size > _MAX_METADATA:
            raise MaskError(
                f"Arrow message with a header of {message.metadata.size} bytes: no mask needs one that long"
            )
        if message.metadata_version != pa.MetadataVersion.V5:  # older ones declare compression elsewhere
            raise MaskError("Arrow message of a format version before 1.0")
        if message.type not in ("schema", "record batch"):
            raise MaskError(f"Arrow message of type {message.type}: a mask is a schema and record batches")
        if message.type == "record batch":
            rows, size = _declared_size(message)
            num_rows, num_bytes = num_rows + rows, num_bytes + size
            limits.check(num_rows=num_rows, num_ids=0)
        end = source.tell()
    if data[end:] != _END_OF_STREAM:
        raise MaskError("not a whole Arrow stream: it must end with its end-of-stream marker and nothing after it")
    most = 8 * limits.max_ids + 16 * limits.max_rows + 4096  # ids and logprobs, two offsets, and their padding
    if num_bytes > most:
        raise MaskError(
            f"Arrow stream of {num_bytes} bytes decompressed: more than {limits.max_ids} ids and {limits.max_rows} "
            "rows take; raise the Limits"
        )


def _declared_size(message: Any) -> tuple[int, int]:
    """Rows of a record batch, and bytes its buffers take once decompressed, read from the message's header.

    The header is a flatbuffer (Message.header: RecordBatch{length, nodes, buffers, compression}); a compressed buffer
    starts with its decompressed length, -1 meaning it is stored as it is (Arrow columnar format, IPC).
    """
    header = _Flatbuffer(message.metadata.to_pybytes())
    batch = header.table(header.root, 2)
    compressed = header.field(batch, 3) != 0
    body = memoryview(message.body if message.body is not None else b"")
    total = 0
    for offset, length in header.pairs(batch, 2):
        declared = struct.unpack_from("<q", body, offset)[0] if compressed and length else -1
        if offset < 0 or length < 0 or declared < -1:
            raise MaskError("Arrow buffer with a negative offset or length")
        total += length if declared == -1 else declared
    return header.int64(batch, 0), total


class _Flatbuffer:
    """Just enough of the flatbuffer encoding to read tables, integers and vectors of pairs of int64."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.root: int = struct.unpack_from("<I", data, 0)[0]

    def field(self, table: int, slot: int) -> int:
        """Position of a table's field; 0 where it has its default."""
        vtable = table - struct.unpack_from("<i", self.data, table)[0]
        if 4 + 2 * slot >= struct.unpack_from("<H", self.data, vtable)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self.data, vtable + 4 + 2 * slot)[0]
        return table + offset if offset else 0

    def table(self, table: int, slot: int) -> int:
        """Position of the table, or vector, that a field points to."""
        at = self.field(table, slot)
        if not at:
            raise struct.error("a required field is absent")
        target: int = at + struct.unpack_from("<I", self.data, at)[0]
        return target

    def int64(self, table: int, slot: int) -> int:
        """An int64 field; 0 where absent."""
        at = self.field(table, slot)
        return int(struct.unpack_from("<q", self.data, at)[0]) if at else 0

    def pairs(self, table: int, slot: int) -> list[tuple[int, int]]:
        """A vector of pairs of int64."""
        vector = self.table(table, slot)
        (length,) = struct.unpack_from("<I", self.data, vector)
        numbers: NDArray[np.int64] = np.frombuffer(self.data, "<i8", 2 * length, vector + 4).reshape(-1, 2)
        return [(int(offset), int(size)) for offset, size in numbers]
