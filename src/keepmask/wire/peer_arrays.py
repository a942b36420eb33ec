"""`read_array`: arrays as other programs hold and pack them, read within limits."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import MaskError
from keepmask.wire.limits import Limits

__all__ = ["FLOAT32", "INT32", "brief", "field", "read_array", "read_flags"]

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "int64", "float32")}
INT32, FLOAT32 = _DTYPES["int32"], _DTYPES["float32"]


def read_array(name: str, value: object, dtype: np.dtype[Any], limits: Limits, *, ndim: int = 1) -> NDArray[Any]:
    """`value` as a NumPy array of `ndim` dimensions: int64 where `dtype` is an integer, else floats.

    Takes arrays, lists and CPU tensors as they are; bytes as little-endian `dtype`; text as base64 of the same; and
    packed arrays, `{data, shape, dtype}`, with data in base64 (SkyRL) or, marked `__nd__`, in bytes (verifiers).
    Raises MaskError naming `name`: absent, not such an array, or beyond the limits; rows are counted where ndim is 2.
    """
    if value is None:
        raise MaskError(f"{name}: absent")
    if isinstance(value, Mapping):
        array = _envelope(name, value, dtype, limits, ndim)
    elif isinstance(value, str | bytes | bytearray | memoryview):
        data = _raw(name, value, limits, is_text=isinstance(value, str))
        if ndim != 1 or len(data) % dtype.itemsize:
            raise MaskError(f"{name}: {len(data)} bytes are not a flat array of {dtype.name}")
        array = np.frombuffer(data, dtype)
    else:
        if isinstance(value, Sequence):
            limits.check(num_rows=len(value) if ndim > 1 else 0, num_ids=len(value))
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of a device
            raise MaskError(f"{name}: not a regular array of numbers ({error})") from None
    if array.size and array.dtype.kind not in ("iu" if dtype.kind == "i" else "iuf"):
        raise MaskError(f"{name}: must hold {dtype.name}, got {array.dtype}")
    if array.ndim != ndim:
        raise MaskError(f"{name}: must have {ndim} dimension{'s' if ndim > 1 else ''}, got shape {list(array.shape)}")
    limits.check(num_rows=array.shape[0] if ndim > 1 else 0, num_ids=max(array.size, *array.shape))
    if dtype.kind != "i":
        return array if array.size else array.astype(dtype)
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise MaskError(f"{name}: must hold {dtype.name}, got {array.max()}")
    return array.astype(np.int64, copy=False)


def read_flags(name: str, values: object, num_rows: int) -> NDArray[np.bool_]:
    """[num_rows] bool: one flag (or 0 and 1) a row. Raises MaskError naming `name`."""
    flags = np.asarray(values)
    if flags.shape != (num_rows,) or (flags.size and flags.dtype.kind not in "biuf"):
        raise MaskError(f"{name}: {list(flags.shape)} flags for {num_rows} rows; each row has its flag")
    return flags.astype(np.bool_)


def field(holder: object, name: str) -> Any:
    """A member of a mapping or an attribute of an object; None where it has none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def brief(value: object) -> str:
    """The value's repr, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _envelope(name: str, value: Mapping[Any, Any], dtype: np.dtype[Any], limits: Limits, ndim: int) -> NDArray[Any]:
    try:
        data, shape, kind = value["data"], list(value["shape"]), value["dtype"]
    except (KeyError, TypeError) as error:
        raise MaskError(f"{name}: a packed array has data, shape and dtype; {error} is missing or unusable") from None
    legal = [known for known, known_dtype in _DTYPES.items() if known_dtype.kind == dtype.kind]
    if kind not in legal:
        raise MaskError(f"{name}: dtype {brief(kind)}; legal are {', '.join(legal)}")
    if len(shape) != ndim or not all(type(size) is int and size >= 0 for size in shape):
        raise MaskError(f"{name}: shape {brief(shape)} is not {ndim} non-negative dimension{'s' if ndim > 1 else ''}")
    raw = _raw(name, data, limits, is_text=not value.get("__nd__"))
    if len(raw) != math.prod(shape) * _DTYPES[kind].itemsize:
        raise MaskError(f"{name}: {len(raw)} bytes for {kind} of shape {brief(shape)}")
    limits.check(num_rows=0, num_ids=max(shape))  # of no bytes, where another dimension is 0
    return np.frombuffer(raw, _DTYPES[kind]).reshape(shape)


def _raw(name: str, data: object, limits: Limits, *, is_text: bool) -> bytes:
    if not isinstance(data, str | bytes | bytearray | memoryview):
        raise MaskError(f"{name}: packed data must be base64 or bytes, got {brief(data)}")
    limits.check_bytes(len(data))
    if is_text or isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MaskError(f"{name}: not base64 ({error})") from None
    limits.check(num_rows=0, num_ids=len(data) // 4)
    return bytes(data)
