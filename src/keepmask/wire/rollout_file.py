"""Rollout files: written in parts that survive a crash, merged into one Parquet file at the end."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from keepmask.errors import ConfigError, MaskError
from keepmask.outputs import Rollout
from keepmask.wire.atomic_files import write_atomically
from keepmask.wire.parquet import RowGroup, merge, read_footer, read_table, row_groups, write_table
from keepmask.wire.peer_arrays import brief
from keepmask.wire.rollouts import from_table, to_table

__all__ = ["Found", "RolloutWriter", "TokenText", "read_rollouts", "write_rollouts"]

TokenText = Callable[[Sequence[int]], Sequence[str]]
"""The text of each token id on its own, as a tokenizer decodes it."""

_RUN_FILE = "run.json"
_PART_BYTES = 2**26  # of masks; longer writes make several parts, which readers hold one at a time


_REQUEST_COLUMNS = ["request_id", "completion_index", "seed", "prompt"]


class Found(NamedTuple):
    """What identifies a request that is in the file."""

    seed: int | None
    prompt: str | None


class RolloutWriter:
    """Writes one rollout file, and loses nothing that `write` returned from.

    Each `write` becomes a part file in the folder `<path>.parts` (written beside, synced, renamed); `finish` merges
    the parts into `path`, again atomically, ordered by request id and completion index, and removes the folder. A
    writer of the same path and metadata continues where an earlier one stopped, finished or not: `completed` says what
    is there. With overwrite=True it starts afresh, and the old file stays until `finish` replaces it.

    metadata: what identifies the run, as JSON values (model, tokenizer, sampling parameters, ...).
    token_text: gives the file the text of every id in it, so that a report needs no tokenizer.

    Raises ConfigError when `path` holds another run or another file, or another writer is at work on it; MaskError
    naming a damaged part; OSError, with a message that says what is kept, when the disk is full or not writable.
    """

    def __init__(
        self,
        path: str | Path,
        metadata: Mapping[str, Any],
        *,
        token_text: TokenText | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".parts")
        self._done = self.folder.with_name(f".{self.folder.name}.done")
        self._run: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
        self._token_text = token_text
        self._texts: dict[int, str] = {}
        begun = None if overwrite else _read_run(self.folder)
        self._replaces = overwrite if begun is None else begun.replaces
        if begun is not None:
            self._check_same_run(self.folder, begun.run)
        for part in [] if overwrite else _parts(self.folder):
            self._check_same_run(part, read_footer(part).run)
        if self.path.exists() and not self._replaces:
            self._check_same_run(self.path, _run_of_existing(self.path))
        self._lock = self._open_folder(afresh=overwrite)
        try:
            tables = (read_table(group).select(_REQUEST_COLUMNS) for group in self._groups())
            rows = [row for table in tables for row in table.to_pylist()]
        except BaseException:
            self.close()
            raise
        self._keys = {(row["request_id"], row["completion_index"]) for row in rows}
        self._found = {row["request_id"]: Found(row["seed"] and int(row["seed"]), row["prompt"]) for row in rows}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def completed(self) -> frozenset[str]:
        """Ids of the requests whose rollouts are on the disk."""
        return frozenset(request_id for request_id, _ in self._keys)

    def found(self) -> Mapping[str, Found]:
        """What the file held of each request when the writer began."""
        return self._found

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """Put finished requests, each with all its completions, on the disk.

        Raises MaskError for a rollout that is there already, or whose per-token fields differ in length.
        """
        batch = list(rollouts)
        new = [_key(rollout) for rollout in batch]
        if len(set(new)) < len(new) or not self._keys.isdisjoint(new):
            request_id, index = next(key for i, key in enumerate(new) if key in self._keys or key in new[:i])
            raise MaskError(f"request {request_id!r}, completion {index}: written twice; skip what is completed")
        for part in _chunks(batch):
            buffer = io.BytesIO()
            write_table(buffer, to_table(part), self._run, self._texts_of(part))
            number = 1 + max(map(_part_number, _parts(self.folder)), default=-1)
            with self._writing(self.folder / f"part-{number:06d}.parquet") as stream:
                stream.write(buffer.getbuffer())
            self._keys |= set(map(_key, part))

    def finish(self) -> Path:
        """Merge the parts into the one file, remove them, close the writer, and return the file's path."""
        if self._replaces or _parts(self.folder) or not self.path.exists():
            with self._writing(self.path) as stream:
                merge(self._groups(), stream, self._run)
        self._remove_folder()
        return self.path

    def close(self) -> None:
        """Let another writer continue. Everything written stays."""
        if not self._lock.closed and not _parts(self.folder):
            self._remove_folder()
        self._lock.close()

    def _open_folder(self, *, afresh: bool) -> IO[str]:
        """Make or continue the folder of parts, and hold it against other writers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = _hold(self.folder / "lock", self.path)
        try:
            run_file = self.folder / _RUN_FILE
            for file in [*self.folder.glob(".*.tmp"), *([*_parts(self.folder), run_file] if afresh else [])]:
                file.unlink(missing_ok=True)  # what a kill left half written, and what is to be overwritten
            shutil.rmtree(self._done, ignore_errors=True)
            if not run_file.exists():
                with write_atomically(run_file) as stream:
                    stream.write(json.dumps(_Run(self._run, self._replaces)._asdict()).encode())
        except BaseException:
            lock.close()
            raise
        return lock

    def _remove_folder(self) -> None:
        """Take the parts away in one step: no crash leaves some of them to be taken for all."""
        shutil.rmtree(self._done, ignore_errors=True)
        if sys.platform == "win32":  # where an open file cannot move
            self._lock.close()
        self.folder.rename(self._done)
        self._lock.close()
        shutil.rmtree(self._done, ignore_errors=True)

    def _writing(self, path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
        kept = f"everything written before is kept in {self.folder}: make room there and run the same again to continue"
        return write_atomically(path, kept=kept, scratch=self.folder)

    def _groups(self) -> list[RowGroup]:
        """Everything written so far: the finished file this run adds to, then the parts."""
        finished = [self.path] if self.path.exists() and not self._replaces else []
        return [group for file in [*finished, *_parts(self.folder)] for group in row_groups(file)]

    def _check_same_run(self, where: Path, run: Mapping[str, Any]) -> None:
        differing = [name for name in sorted({*run, *self._run}) if run.get(name) != self._run.get(name)]
        if differing:
            pairs = (f"{name} is {brief(run.get(name))} there, {brief(self._run.get(name))} here" for name in differing)
            raise ConfigError(
                f"{where}: holds another run: {'; '.join(pairs)}; choose another name, or overwrite it (--overwrite)"
            )

    def _texts_of(self, rollouts: Sequence[Rollout]) -> dict[int, str]:
        """The text of every id in the rollouts: prompts, tokens and supports."""
        if self._token_text is None:
            return {}
        arrays = [array for rollout in rollouts for array in (rollout.prompt_token_ids, rollout.token_ids)]
        arrays += [rollout.sampling_mask.ids for rollout in rollouts if rollout.sampling_mask is not None]
        occurring: list[int] = np.unique(np.concatenate(arrays)).tolist()
        new = [token_id for token_id in occurring if token_id not in self._texts]
        if new:
            self._texts |= zip(new, self._token_text(new), strict=True)
        return {token_id: self._texts[token_id] for token_id in occurring}


def write_rollouts(
    path: str | Path,
    rollouts: Iterable[Rollout],
    metadata: Mapping[str, Any],
    *,
    token_text: TokenText | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a whole rollout file at once; see `RolloutWriter` for the arguments and errors."""
    with RolloutWriter(path, metadata, token_text=token_text, overwrite=overwrite) as writer:
        writer.write(rollouts)
        return writer.finish()


def read_rollouts(path: str | Path) -> tuple[list[Rollout], dict[str, Any]]:
    """The rollouts of a file, or of the folder of parts of an unfinished run, and the metadata.

    metadata: what the writer was given, and `keepmask`, the version that wrote it, and `token_text`, from token id to
    text, of the ids that occur. Raises MaskError naming the file when it is damaged or no rollout file.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + ".parts")
    if not path.exists() and unfinished.is_dir():
        raise MaskError(f"{path}: its run is not finished; run it again to finish it, or read {unfinished} as it is")
    files = _parts(path) if path.is_dir() else [path]
    if not files:
        raise MaskError(f"{path}: no parts of a rollout file in this folder")
    rollouts: list[Rollout] = []
    texts: dict[int, str] = {}
    seen: set[tuple[str, int]] = set()
    for file in files:
        footer = read_footer(file)
        texts |= footer.token_text
        for group in row_groups(file):
            table = read_table(group)
            try:
                for rollout in from_table(table):
                    if (key := _key(rollout)) in seen:
                        raise MaskError(f"request {key[0]!r}, completion {key[1]}: is there twice")
                    seen.add(key)
                    rollouts.append(rollout)
            except MaskError as error:
                raise MaskError(f"{file}: {error}") from error
    return rollouts, {**footer.run, "keepmask": footer.keepmask, "token_text": texts}


class _Run(NamedTuple):
    """Contents of the file that says whose parts a folder holds."""

    run: dict[str, Any]
    replaces: bool
    """Whether the finished file, if there is one, is of another run and to be replaced."""


def _read_run(folder: Path) -> _Run | None:
    file = folder / _RUN_FILE
    try:
        return _Run(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise MaskError(f"{file}: damaged; start afresh (--overwrite) or remove {folder}") from error


def _run_of_existing(path: Path) -> dict[str, Any]:
    try:
        return read_footer(path).run
    except (MaskError, IsADirectoryError) as error:
        raise ConfigError(
            f"{path}: exists and is no rollout file; choose another name, or overwrite it (--overwrite)"
        ) from error


def _hold(file: Path, path: Path) -> IO[str]:
    """Open the lock file and hold it, so that two writers of one file never mix their parts."""
    lock = file.open("w")
    if sys.platform != "win32":
        import fcntl  # not on Windows

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"{path}: another process is writing it; wait for it or choose another name") from None
    return lock


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"), key=_part_number)


def _part_number(part: Path) -> int:
    digits = part.stem.removeprefix("part-")
    return int(digits) if digits.isdecimal() else 0


def _chunks(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    """The rollouts in lists of at most _PART_BYTES of masks (or one rollout)."""
    chunk: list[Rollout] = []
    num_bytes = 0
    for rollout in rollouts:
        own = 0 if rollout.sampling_mask is None else rollout.sampling_mask.nbytes
        if chunk and num_bytes + own > _PART_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(rollout)
        num_bytes += own
    if chunk:
        yield chunk


def _key(rollout: Rollout) -> tuple[str, int]:
    return rollout.request_id, rollout.completion_index
