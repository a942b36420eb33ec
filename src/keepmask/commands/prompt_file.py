"""Files of prompts as people have them: JSON lines, a JSON array, Parquet, or a saved `datasets` folder."""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from keepmask.commands.prompt_row import PromptRow, parse_row
from keepmask.errors import RequestError
from keepmask.wire.arrow import load_pyarrow

__all__ = ["InvalidRow", "PromptFile", "describe", "read_prompts"]

_MAX_LISTED = 20  # invalid rows named in one error; the rest are counted
_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8",
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it: zstd -d",
    b"BZh": "bzip2-compressed; unpack it: bunzip2",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"ARROW1": "an Arrow file; save it as Parquet, or as a folder with Dataset.save_to_disk",
}
_PARQUET, _GZIP, _BYTE_ORDER_MARK = b"PAR1", b"\x1f\x8b", b"\xef\xbb\xbf"


class InvalidRow(NamedTuple):
    """A row that is no prompt."""

    number: int
    reason: str
    row: Any
    """As it was read: its value, or its text where that is no JSON."""


class PromptFile(NamedTuple):
    """The prompts of a file, in order, and the rows that are none."""

    prompts: list[PromptRow]
    invalid: list[InvalidRow]


def read_prompts(path: Path) -> PromptFile:
    """The prompts of a file or folder.

    JSON lines (UTF-8, also gzip-compressed), one JSON array, Parquet, a folder that `Dataset.save_to_disk` made, or a
    folder of Parquet files; `parse_row` says what a row may be. Raises RequestError, naming file and remedy, for any
    other file and for one without rows; OSError passes through.
    """
    prompts: list[PromptRow] = []
    invalid: list[InvalidRow] = []
    numbers: dict[str, int] = {}
    for number, row in _rows(path):
        if isinstance(row, InvalidRow):
            invalid.append(row)
            continue
        try:
            prompt = parse_row(number, row)
            if (other := numbers.setdefault(prompt.request_id, number)) != number:
                raise RequestError(f"id {prompt.request_id!r} is also that of row {other}")
            prompts.append(prompt)
        except RequestError as error:
            invalid.append(InvalidRow(number, str(error), row))
    if not prompts and not invalid:
        raise RequestError(f"{path}: holds no prompts")
    return PromptFile(prompts, invalid)


def describe(path: Path, invalid: list[InvalidRow]) -> str:
    """All invalid rows in one error message."""
    lines = [f"  {path}, row {each.number}: {each.reason}" for each in invalid[:_MAX_LISTED]]
    more = [f"  and {len(invalid) - _MAX_LISTED} more"] if len(invalid) > _MAX_LISTED else []
    remedy = "correct them, or leave them out with --skip-invalid"
    count = f"{len(invalid)} row{'s' if len(invalid) > 1 else ''} cannot be rolled out; {remedy}:"
    return "\n".join([count, *lines, *more])


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of each row: its line in JSON lines, else its place."""
    if path.is_dir():
        yield from enumerate(_table_rows(*_tables_of(path)), 1)
        return
    with path.open("rb") as stream:
        head = stream.read(6)
        if head.startswith(_PARQUET):
            yield from enumerate(_table_rows([path], []), 1)
            return
        for magic, what in _FOREIGN.items():
            if head.startswith(magic):
                raise RequestError(f"{path}: is {what}")
        stream.seek(0)
        if not head.startswith(_GZIP):
            yield from _text_rows(path, stream)
            return
        with gzip.open(stream) as unpacked:
            try:
                yield from _text_rows(path, unpacked)  # type: ignore[arg-type]
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise RequestError(f"{path}: its gzip stream is damaged; fetch the file again") from error


def _text_rows(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """JSON lines, or the items of one JSON array. Lines end with a line feed alone: text may hold any other break."""
    lines = ((number, line) for number, line in enumerate(stream, 1) if line.strip(_BYTE_ORDER_MARK + b" \t\r\n"))
    first, head = next(lines, (0, b""))
    head = head.removeprefix(_BYTE_ORDER_MARK)
    if head.lstrip().startswith(b"["):  # no row is an array
        items = _parsed(1, head + b"".join(line for _, line in lines))
        if isinstance(items, InvalidRow):
            raise RequestError(f"{path}: begins as a JSON array, but {items.reason}")
        yield from enumerate(items, 1)
        return
    for number, line in chain([(first, head)] if first else [], lines):
        yield number, _parsed(number, line)


def _parsed(number: int, data: bytes) -> Any:
    """The JSON value, or what is wrong with it."""
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); convert the file: iconv -t UTF-8"
        return InvalidRow(number, reason, data.decode(errors="replace"))
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return InvalidRow(number, "is nested too deeply", text)
    except ValueError as error:  # also a number of too many digits
        return InvalidRow(number, f"is not JSON: {str(error)[:120]}", text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _tables_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The Parquet files, and the Arrow files, that a folder holds the rows of one data set in."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise RequestError(f"{folder}: holds several splits; name the folder of one: {splits}")
    state = folder / "state.json"
    if state.is_file():
        try:
            files = [folder / Path(each["filename"]).name for each in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(f"{state}: is not what Dataset.save_to_disk writes ({error})") from None
        return [], files
    found = sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))
    splits = ", ".join(sorted({file.name.split("-")[0] for file in found if "-of-" in file.name}))
    if "," in splits:
        raise RequestError(f"{folder}: holds several splits, {splits}; name the files of one in a folder of their own")
    if not found:
        raise RequestError(f"{folder}: holds no Parquet files and no data set of Dataset.save_to_disk")
    return found, []


def _table_rows(parquet_files: Iterable[Path], arrow_files: Iterable[Path]) -> Iterator[Any]:
    pa, pq = load_pyarrow(), load_pyarrow("pyarrow.parquet")
    for file in [*parquet_files, *arrow_files]:
        try:
            with file.open("rb") as stream:
                arrow = file in arrow_files
                batches = pa.ipc.open_stream(stream) if arrow else pq.ParquetFile(stream).iter_batches(batch_size=1024)
                for batch in batches:
                    yield from map(_json_value, batch.to_pylist())
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise RequestError(f"{file}: damaged, or no table: {str(error)[:200]}") from error


def _json_value(value: Any) -> Any:
    """A table's value as JSON has it: dates and decimals as text, bytes in base64, no number as null."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int) else str(value)
