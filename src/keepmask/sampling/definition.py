"""The sampler by definition: every step over the whole vocabulary, the filters on fully sorted rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keepmask.errors import RequestError
from keepmask.head.sampled_logits import Head
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.noise import gumbel
from keepmask.sampling.processors import process
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.semantics import survivors
from keepmask.sampling.spec import SamplerSpec

__all__ = ["draw_by_definition", "draw_reference", "not_finite_error"]


def draw_reference(head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec) -> Drawn:
    """Draw for every row. All logits are the head's exact ones."""
    raw = head.float32(torch.arange(len(rows), device=head.logits.device))  # [B, V]
    drawn = Drawn.empty(rows)
    for b in (~_finite(raw)).nonzero().squeeze(1).tolist():
        drawn.errors[b] = not_finite_error(rows[b])
        raw[b] = 0
    z = raw.clone()
    drawn.errors = process(z, rows, spec) | drawn.errors
    for b, row in enumerate(rows):
        if b not in drawn.errors:
            draw_by_definition(drawn, b, z[b], raw[b], row, spec)
    return drawn


def draw_by_definition(
    drawn: Drawn, b: int, z: Tensor, raw: Tensor | None, row: SamplingRow, spec: SamplerSpec
) -> None:
    """Put the draw of a row into row b of `drawn`.

    z: [V] float32, its processed logits. raw: [V], its logits before any step; None leaves raw entries out.
    """
    order = _sorted_row(z, row)
    if order is None:
        drawn.errors[b] = not_finite_error(row)
        return
    ids, values, logprobs = (x[order.keep].cpu().numpy() for x in (order.ids, order.z, order.logprobs))
    ascending = np.argsort(ids)
    drawn.put_support(b, ids[ascending], logprobs[ascending], spec.vocab_size)
    drawn.token_ids[b] = order.token_id if ids.size else -1
    if not ids.size or row.params.logprobs is None:
        return
    if spec.logprobs_mode.startswith("raw"):
        if raw is None:
            return
        shown, order_of_raw = torch.sort(raw, descending=True, stable=True)
        if spec.logprobs_mode == "raw_logprobs":
            shown = shown.double().log_softmax(-1).float()
        ids, values = order_of_raw.cpu().numpy(), shown.cpu().numpy()
    elif spec.logprobs_mode == "processed_logprobs":
        values = logprobs
    at = np.flatnonzero(ids == drawn.token_ids[b])
    num_top = np.asarray([min(row.params.logprobs, int((values > -np.inf).sum()))])
    drawn.entries.put(np.asarray([b]), drawn.token_ids[b : b + 1], values[at], at + 1, ids[None], values[None], num_top)


@dataclass(frozen=True, slots=True)
class _SortedRow:
    """A row drawn from. Entries [V] are by (logit descending, id ascending)."""

    token_id: int
    ids: Tensor
    """[V] int64."""
    z: Tensor
    """[V] float32, over the temperature."""
    keep: Tensor
    """[V] bool, in the support."""
    logprobs: Tensor
    """[V] float32, -inf outside the support."""


def _sorted_row(z: Tensor, row: SamplingRow) -> _SortedRow | None:
    """Temperature, filters and draw; None where the row holds NaN or +inf. z: [V] float32, processed logits."""
    if not row.params.greedy:
        z = z / torch.tensor(row.params.temperature, dtype=torch.float32, device=z.device)
    if not _finite(z):
        return None
    values, ids = torch.sort(z, descending=True, stable=True)  # ties by ascending id
    keep = survivors(values, row.params, row.semantics)
    kept = torch.where(keep, values.double(), -torch.inf)
    key = (torch.tensor(x, device=z.device) for x in (row.num_output_tokens, row.completion_index, row.signed_seed))
    scores = torch.empty_like(kept).scatter_(0, ids, kept + gumbel(ids, *key))
    return _SortedRow(int(scores.argmax()), ids, values, keep, kept.log_softmax(-1).float())


def not_finite_error(row: SamplingRow) -> RequestError:
    """The error of a row whose logits hold NaN or +inf."""
    return RequestError(
        f"logits at output position {row.num_output_tokens} hold NaN or +inf: no token can be drawn from them; "
        "check the model's weights, the logits processors, the penalties and the temperature"
    )


def _finite(z: Tensor) -> Tensor:
    """Of rows [..., V], whether each holds neither NaN nor +inf; -inf is legal, it bans an id."""
    return (z < torch.inf).all(-1)
