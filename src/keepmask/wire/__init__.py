"""Masks and rollouts as bytes: JSON in two forms, Arrow streams, and rollout files; docs/format.md defines them."""

from keepmask.wire.arrow import decode_arrow, encode_arrow
from keepmask.wire.fields import decode_json, encode_json, mask_from_fields, mask_to_fields
from keepmask.wire.limits import Limits
from keepmask.wire.rollout_file import RolloutWriter, read_rollouts, write_rollouts

__all__ = [
    "Limits",
    "RolloutWriter",
    "decode_arrow",
    "decode_json",
    "encode_arrow",
    "encode_json",
    "mask_from_fields",
    "mask_to_fields",
    "read_rollouts",
    "write_rollouts",
]
