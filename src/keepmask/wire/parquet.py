"""Parquet: how rollout tables lie in a file, how a file is read without trusting it, how files are merged."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

from keepmask.errors import MaskError
from keepmask.wire.arrow import load_pyarrow
from keepmask.wire.rollouts import conform, schema

__all__ = ["Footer", "RowGroup", "keys", "merge", "read_footer", "read_table", "row_groups", "write_table"]

FORMAT = 1
"""Version of the layout in docs/format.md; a reader refuses a newer one."""

_KEY = b"keepmask"
_STRINGS = ["request_id", "prompt", "text", "sampling_params", "finish_reason", "stop_reason", "extra"]
_ZSTD_LEVEL = 3
_ROW_GROUP_BYTES = 2**26  # uncompressed; what a reader holds at a time
_LEVEL_BYTES = 16  # a value read takes at most: itself, its offset, and its levels
_MIN_DECODED_BYTES, _MAX_EXPANSION = 2**28, 256
"""A row group may take so much memory: 256 MiB, or so many times its file; real ones take 2 to 20 times."""

_CACHED_ROW_GROUPS = 64  # requests finish nearly in order, so merging them in order reads few parts at a time


class Footer(NamedTuple):
    """What a rollout file says about itself."""

    run: dict[str, Any]
    """What the writer was told about the run."""
    token_text: dict[int, str]
    """Text of each token id in the file; empty where the writer had no tokenizer."""
    keepmask: str
    """Version that wrote the file."""


class RowGroup(NamedTuple):
    """One row group of a file."""

    file: Path
    number: int


def write_table(stream: IO[bytes], table: Any, run: Mapping[str, Any], token_text: Mapping[int, str]) -> None:
    """Write one table as a file of one row group."""
    with _writer(stream, run, token_text) as writer:
        writer.write_table(table)


def read_footer(file: Path) -> Footer:
    """Raises MaskError when the file is no rollout file, or of a newer format."""
    with _opened(file) as parquet:
        value = (parquet.metadata.metadata or {}).get(_KEY)
        if value is None:
            raise MaskError(f"{file}: a Parquet file, but not one of rollouts")
        document = json.loads(value)
        if document["format"] > FORMAT:
            raise MaskError(
                f"{file}: has format {document['format']}, written by keepmask {document['keepmask']}; "
                f"this version reads format {FORMAT}: upgrade keepmask"
            )
        texts = {int(token_id): str(text) for token_id, text in document["token_text"].items()}
        return Footer(dict(document["run"]), texts, str(document["keepmask"]))


def row_groups(file: Path) -> list[RowGroup]:
    """The row groups of a file, in order."""
    with _opened(file) as parquet:
        return [RowGroup(file, number) for number in range(parquet.num_row_groups)]


def read_table(group: RowGroup) -> Any:
    """The rows of a row group; raises MaskError naming the file when checksums, types or sizes are wrong."""
    with _opened(group.file) as parquet:
        names = schema().names
        found = [name for name in parquet.schema_arrow.names if name in names]
        most = max(_MIN_DECODED_BYTES, _MAX_EXPANSION * group.file.stat().st_size)
        _check_size(group.file, parquet.metadata.row_group(group.number), set(found), most)
        table = parquet.read_row_group(group.number, columns=found, use_threads=False)
        if (size := sum(map(_plain_bytes, table.columns))) > most:
            raise _too_large(group.file, size, most)
    try:
        return conform(table)
    except MaskError as error:
        raise MaskError(f"{group.file}: {error}") from error


def _check_size(file: Path, row_group: Any, names: set[str], most: int) -> None:
    """Refuse, by what the footer declares, a row group that would take more than `most` bytes."""
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.split(".")[0] in names]
    size = sum(column.total_uncompressed_size + _LEVEL_BYTES * column.num_values for column in columns)
    if size > most or any(min(column.total_uncompressed_size, column.num_values) < 0 for column in columns):
        raise _too_large(file, size, most)


def _plain_bytes(column: Any) -> int:
    """Bytes of a column whose strings are read as dictionaries, which may say little and mean much, once plain."""
    pa = load_pyarrow()
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    compute = load_pyarrow("pyarrow.compute")
    lengths = (compute.binary_length(part.dictionary).take(part.indices) for part in column.chunks)
    return sum(compute.sum(each.cast(pa.int64())).as_py() or 0 for each in lengths)


def _too_large(file: Path, size: int, most: int) -> MaskError:
    return MaskError(
        f"{file}: a row group of {size} bytes decoded, where at most {most} are read; write smaller row groups"
    )


def keys(table: Any) -> list[tuple[str, int]]:
    """Request id and completion index of each row."""
    return list(zip(table["request_id"].to_pylist(), table["completion_index"].to_pylist(), strict=True))


def merge(groups: Sequence[RowGroup], stream: IO[bytes], run: Mapping[str, Any]) -> None:
    """Write the rows of all groups as one file, each once, ordered by request id and completion index."""
    texts: dict[int, str] = {}
    for file in dict.fromkeys(group.file for group in groups):
        texts |= read_footer(file).token_text
    places: dict[tuple[str, int], tuple[RowGroup, int]] = {}
    for group in groups:
        for row, key in enumerate(keys(read_table(group))):
            places.setdefault(key, (group, row))
    table_of = lru_cache(_CACHED_ROW_GROUPS)(read_table)
    pa = load_pyarrow()
    with _writer(stream, run, texts) as writer:
        for rows in _runs([places[key] for key in sorted(places, key=_natural)], table_of):
            writer.write_table(pa.concat_tables(rows))


def _runs(places: Sequence[tuple[RowGroup, int]], table_of: Callable[[RowGroup], Any]) -> Iterator[list[Any]]:
    """The rows at these places as one-row tables, in lists of at most a row group's bytes (or one row)."""
    rows: list[Any] = []
    num_bytes = 0
    for group, row in places:
        table = table_of(group).slice(row, 1)
        num_bytes += table.nbytes
        if rows and num_bytes > _ROW_GROUP_BYTES:
            yield rows
            rows, num_bytes = [], table.nbytes
        rows.append(table)
    if rows:
        yield rows


def _natural(key: tuple[str, int]) -> tuple[list[Any], str, int]:
    """Orders request ids with the numbers in them by value: req-2 before req-10."""
    request_id, completion_index = key
    parts = re.split(r"(\d{1,18})", request_id)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], request_id, completion_index


@contextlib.contextmanager
def _writer(stream: IO[bytes], run: Mapping[str, Any], token_text: Mapping[int, str]) -> Iterator[Any]:
    document = {"format": FORMAT, "keepmask": version("keepmask"), "run": dict(run), "token_text": dict(token_text)}
    with load_pyarrow("pyarrow.parquet").ParquetWriter(
        stream,
        schema(),
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        # Ids are plain: zstd makes them smaller than a dictionary or deltas do. Floats: their bytes compress apart.
        use_dictionary=["finish_reason", "sampling_params"],
        column_encoding={"sampling_mask_logprobs.list.element.list.element": "BYTE_STREAM_SPLIT"},
        write_page_checksum=True,
        store_schema=False,  # the types are Parquet's own
    ) as writer:
        yield writer
        writer.add_key_value_metadata({_KEY: json.dumps(document).encode()})


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A Parquet file open for reading; whatever is wrong with its bytes becomes a MaskError that names it."""
    pa, pq = load_pyarrow(), load_pyarrow("pyarrow.parquet")
    with file.open("rb") as stream:
        try:
            metadata = pq.read_metadata(stream)
            strings = [name for name in metadata.schema.to_arrow_schema().names if name in _STRINGS]
            yield pq.ParquetFile(stream, metadata=metadata, page_checksum_verification=True, read_dictionary=strings)
        except MaskError:
            raise
        except RecursionError:
            raise MaskError(f"{file}: JSON nested too deeply in its metadata") from None
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MaskError(f"{file}: damaged, or not a rollout file: {str(error)[:200]}") from error
