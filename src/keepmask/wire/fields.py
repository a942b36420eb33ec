"""The fields of a response that carry a mask, and the JSON document of a mask alone, in either JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.wire.limits import DEFAULT_LIMITS, Limits
from keepmask.wire.nested import from_lists, logprob_lists
from keepmask.wire.packed import pack, unpack

__all__ = ["JsonForm", "decode_json", "encode_json", "mask_from_fields", "mask_to_fields"]

JsonForm = Literal["json", "base64"]

_MASK, _LOGPROBS = "sampling_mask", "sampling_mask_logprobs"


def mask_to_fields(mask: SamplingMask, form: JsonForm = "json") -> dict[str, Any]:
    """The members a response object carries for the mask, ready for a JSON encoder.

    json: `sampling_mask` as nested lists and, where the mask has log-probabilities, `sampling_mask_logprobs` alike.
    base64: `sampling_mask` as the one object of `packed.pack`.
    """
    if form == "base64":
        return {_MASK: pack(mask)}
    logprobs = logprob_lists(mask)
    return {_MASK: mask.token_ids} if logprobs is None else {_MASK: mask.token_ids, _LOGPROBS: logprobs}


def mask_from_fields(fields: Mapping[str, Any], *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask in a response object, whichever JSON form it has; other members are left alone.

    Raises MaskError when `sampling_mask` is absent or is no valid mask.
    """
    value, logprobs = fields.get(_MASK), fields.get(_LOGPROBS)
    if isinstance(value, list):
        return from_lists(value, logprobs, limits=limits)
    if logprobs is not None:
        raise MaskError(f"{_LOGPROBS}: goes with nested lists; the base64 object has its own member 'logprobs'")
    return unpack(value, limits=limits)


def encode_json(mask: SamplingMask, form: JsonForm = "json") -> bytes:
    """`mask_to_fields` as one compact JSON object, UTF-8."""
    return json.dumps(mask_to_fields(mask, form), separators=(",", ":"), allow_nan=False).encode()


def decode_json(data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> SamplingMask:
    """The mask of a document as `encode_json` makes it, in either form.

    Raises MaskError for any other bytes: not UTF-8 or JSON, unknown members, NaN, or a mask beyond the limits.
    """
    limits.check_bytes(len(data))
    # Every value of a JSON text but the first follows one of these bytes, so they bound what the parser can make.
    num_values = sum(data.count(mark) for mark in (b",", b"[", b"{", b":"))
    if num_values > 2 * (limits.max_ids + 2 * limits.max_rows) + len(_MASK) + len(_LOGPROBS):
        raise MaskError(
            f"JSON with {num_values} values: more than {limits.max_ids} ids in {limits.max_rows} rows have; "
            "raise the Limits"
        )
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise MaskError("JSON nested too deeply for a mask") from None
    except MaskError:
        raise
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a number of too many digits
        raise MaskError(f"not a JSON text: {str(error)[:120]}") from None
    if not isinstance(document, dict):
        raise MaskError(f"JSON: a mask is an object with the member {_MASK!r}, got {type(document).__name__}")
    if unknown := [name for name in document if name not in (_MASK, _LOGPROBS)]:
        raise MaskError(f"JSON: unknown member {unknown[0][:40]!r}; known are {_MASK}, {_LOGPROBS}")
    return mask_from_fields(document, limits=limits)


def _refuse_constant(name: str) -> NoReturn:
    raise MaskError(f"JSON: {name} is not a number; values must be finite")
