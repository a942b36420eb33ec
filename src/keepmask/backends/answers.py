"""Rollouts as an Arrow IPC stream: the body of an answer to `Accept: application/vnd.apache.arrow.stream`."""

from __future__ import annotations

from collections.abc import Sequence

from keepmask.outputs import Rollout
from keepmask.wire.arrow import MEDIA_TYPE, load_pyarrow
from keepmask.wire.rollouts import to_table

__all__ = ["MEDIA_TYPE", "encode_rollouts"]

_ZSTD_LEVEL = 3


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """One row a completion with the columns of a rollout file (docs/format.md), bodies compressed with zstd."""
    pa = load_pyarrow()
    ipc = load_pyarrow("pyarrow.ipc")
    table = to_table(rollouts)
    sink = pa.BufferOutputStream()
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", _ZSTD_LEVEL))
    with ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded
