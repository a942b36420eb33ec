"""`Limits`: how much a decoder may be made to hold."""

from __future__ import annotations

from dataclasses import dataclass

from keepmask.errors import MaskError

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a decoder accepts, checked before memory is taken. Beyond a limit it raises MaskError.

    Peak memory beside the input: at most 32 bytes an id, row and input byte for base64 and Arrow, and 160 bytes an id
    and row for JSON, whose parser makes an object of every number.
    """

    max_bytes: int = 2**28
    """Most encoded bytes."""
    max_ids: int = 2**24
    """Most ids in all rows together."""
    max_rows: int = 2**20
    """Most rows, one a generated token."""

    def check_bytes(self, num_bytes: int) -> None:
        """Raise MaskError when the encoded mask is too long."""
        if num_bytes > self.max_bytes:
            raise MaskError(f"mask of {num_bytes} bytes: at most {self.max_bytes} are decoded; raise Limits.max_bytes")

    def check(self, *, num_rows: int, num_ids: int) -> None:
        """Raise MaskError when the mask has too many rows or ids."""
        if num_rows > self.max_rows:
            raise MaskError(f"mask of {num_rows} rows: at most {self.max_rows} are decoded; raise Limits.max_rows")
        if num_ids > self.max_ids:
            raise MaskError(f"mask of {num_ids} ids: at most {self.max_ids} are decoded; raise Limits.max_ids")


DEFAULT_LIMITS = Limits()
