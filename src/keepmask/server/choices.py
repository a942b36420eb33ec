"""Parts of answers that all routes build alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keepmask.engine.ticket import Ticket
from keepmask.outputs import CompletionOutput
from keepmask.server.json_rows import MaskRows
from keepmask.wire.fields import JsonForm
from keepmask.wire.packed import pack

__all__ = ["Usage", "mask_fields", "present", "version_spans"]


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def mask_fields(output: CompletionOutput, form: JsonForm) -> dict[str, Any]:
    """`sampling_mask` and, in nested lists, `sampling_mask_logprobs`; empty without a mask."""
    mask = output.sampling_mask
    if mask is None:
        return {}
    if form == "base64":
        return {"sampling_mask": pack(mask)}
    logprobs = {} if mask.logprobs is None else {"sampling_mask_logprobs": MaskRows(mask, of_logprobs=True)}
    return {"sampling_mask": MaskRows(mask), **logprobs}


def version_spans(output: CompletionOutput) -> list[dict[str, Any]] | None:
    """Contiguous spans of output tokens and the version of the weights that drew them; None while there are none."""
    return [span._asdict() for span in output.weight_versions] or None


class Usage:
    """Tokens of one answer, counted as they come."""

    def __init__(self, tickets: Iterable[Ticket]) -> None:
        self._tickets = list(tickets)
        self._completion_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._completion_tokens += num_tokens

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt_tokens = sum(len(ticket.order.prompt_token_ids) for ticket in self._tickets)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.num_cached_tokens for ticket in self._tickets)},
        }
