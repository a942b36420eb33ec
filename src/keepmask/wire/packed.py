"""The base64 object, `{"ids": ..., "counts": ...}`: little-endian arrays, zlib-compressed when shorter, in base64."""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["pack", "unpack"]

_MEMBERS = ("ids", "counts", "logprobs", "compression")
_ZLIB_LEVEL = 1  # level 6 takes seven times as long for 0 to 8 % fewer bytes of real masks


def pack(mask: SamplingMask) -> dict[str, str]:
    """The mask as one JSON object of base64 strings.

    ids: [N] int32. counts: [T] int32, ids in each row. logprobs: [N] float32, only where the mask has them. All
    little-endian. compression "zlib": `ids` and `counts` were compressed before base64; absent when they were not.
    """
    ids, counts = mask.ids.astype("<i4").tobytes(), mask.counts.astype("<i4").tobytes()
    shorter = zlib.compress(ids, _ZLIB_LEVEL), zlib.compress(counts, _ZLIB_LEVEL)
    compressed = sum(map(len, shorter)) < len(ids) + len(counts)
    if compressed:
        ids, counts = shorter
    packed = {"ids": b64encode(ids).decode(), "counts": b64encode(counts).decode()}
    if mask.logprobs is not None:
        packed["logprobs"] = b64encode(mask.logprobs.astype("<f4").tobytes()).decode()
    if compressed:
        packed["compression"] = "zlib"
    return packed


def unpack(packed: Any, *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask of a parsed JSON object as `pack` makes it.

    Raises MaskError for unknown or missing members, invalid base64 or zlib, partial numbers, counts that do not add up
    to the ids, rows that do not ascend, non-finite logprobs, or a mask beyond the limits; nothing is ever inflated
    beyond them.
    """
    if not isinstance(packed, dict):
        raise MaskError(f"sampling_mask: must be an object of base64 strings, got {type(packed).__name__}")
    if unknown := [name for name in packed if name not in _MEMBERS]:
        raise MaskError(f"sampling_mask: unknown member {str(unknown[0])[:40]!r}; known are {', '.join(_MEMBERS)}")
    compression = packed.get("compression")
    if compression not in (None, "zlib"):
        raise MaskError(f"sampling_mask.compression={str(compression)[:40]!r}: must be 'zlib' or absent")
    inflate = compression is not None
    counts = _array(packed, "counts", "<i4", most=limits.max_rows, limits=limits, inflate=inflate)
    ids = _array(packed, "ids", "<i4", most=limits.max_ids, limits=limits, inflate=inflate)
    if counts.size and counts.min() < 0:
        raise MaskError(f"sampling_mask.counts: must be >= 0, got {counts.min()}")
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    if offsets[-1] != ids.size:
        raise MaskError(f"sampling_mask.counts: add up to {offsets[-1]}, but there are {ids.size} ids")
    if "logprobs" not in packed:
        return SamplingMask(ids, offsets)
    logprobs = _array(packed, "logprobs", "<f4", most=limits.max_ids, limits=limits, inflate=False)
    return SamplingMask(ids, offsets, logprobs)


def _array(
    packed: dict[str, Any], name: str, dtype: str, *, most: int, limits: Limits, inflate: bool
) -> NDArray[np.generic]:
    """The array under `name`, of at most `most` 4-byte numbers."""
    text = packed.get(name)
    if not isinstance(text, str):
        raise MaskError(f"sampling_mask.{name}: must be a base64 string, got {type(text).__name__}")
    limits.check_bytes(len(text))
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MaskError(f"sampling_mask.{name}: not base64: {error}") from None
    if inflate:
        data = _inflated(data, name, most=4 * most)
    if len(data) % 4:
        raise MaskError(f"sampling_mask.{name}: {len(data)} bytes do not make whole 4-byte numbers")
    if len(data) > 4 * most:
        raise MaskError(f"sampling_mask.{name}: more than the {most} values that are decoded; raise the Limits")
    return np.frombuffer(data, dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def _inflated(data: bytes, name: str, *, most: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise MaskError(f"sampling_mask.{name}: not zlib: {error}") from None
    if len(inflated) > most:
        raise MaskError(f"sampling_mask.{name}: inflates beyond the {most // 4} values that are decoded")
    if not stream.eof or stream.unused_data:
        raise MaskError(f"sampling_mask.{name}: the zlib stream is cut off or followed by other bytes")
    return inflated
