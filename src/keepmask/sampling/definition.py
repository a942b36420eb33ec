"""The sampler by definition: every step over the whole vocabulary, the filters on fully sorted rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keepmask.errors import RequestError
from keepmask.head.sampled_logits import Head
from keepmask.sampling.batch_params import BatchParams
from keepmask.sampling.drawn import Drawn
from keepmask.sampling.noise import gumbel
from keepmask.sampling.processors import process
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.semantics import survivors
from keepmask.sampling.spec import SamplerSpec

__all__ = ["draw_reference", "draw_sorted", "not_finite_error", "put_reference"]


def draw_reference(head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec, params: BatchParams) -> Drawn:
    """Draw for every row. All logits are the head's exact ones."""
    device = head.logits.device
    raw = head.float32(torch.arange(len(rows), device=device))  # [B, V]
    drawn = Drawn.empty(rows)
    for b in (~_finite(raw)).nonzero().squeeze(1).tolist():
        drawn.errors[b] = not_finite_error(rows[b])
        raw[b] = 0
    z = raw.clone()
    drawn.errors = process(z, rows, spec) | drawn.errors
    order = draw_sorted(z, rows, params)
    for b in range(len(rows)):
        if b not in drawn.errors:
            put_reference(drawn, b, order, b, raw[b], rows[b], spec)
    return drawn


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows drawn from. Entries [M, V] are by (logit descending, id ascending)."""

    token_ids: Tensor
    """[M] int64."""
    finite: Tensor
    """[M] bool: the row held neither NaN nor +inf."""
    ids: Tensor
    """[M, V] int64."""
    z: Tensor
    """[M, V] float32, over the temperature."""
    keep: Tensor
    """[M, V] bool, in the support."""
    logprobs: Tensor
    """[M, V] float32, -inf outside the support."""


def draw_sorted(z: Tensor, rows: Sequence[SamplingRow], params: BatchParams) -> SortedRows:
    """Temperature, filters and draw. z: [M, V] float32, processed logits, overwritten. rows, params: M of them."""
    z /= params.temperature
    ok = _finite(z)
    z[~ok] = 0
    values, ids = torch.sort(z, dim=-1, descending=True, stable=True)  # ties by ascending id
    keep = survivors(values, params)
    positions = torch.tensor([[row.num_output_tokens] for row in rows], device=z.device)
    noise = gumbel(ids, positions, params.completions, params.seeds)
    scores = torch.where(keep, values.double() + noise, -torch.inf)
    token_ids = torch.empty_like(scores).scatter_(-1, ids, scores).argmax(-1)
    kept = torch.where(keep, values.double(), -torch.inf)
    logprobs = kept.log_softmax(-1).float()
    return SortedRows(token_ids, ok, ids, values, keep, logprobs)


def put_reference(
    drawn: Drawn, b: int, order: SortedRows, m: int, raw: Tensor | None, row: SamplingRow, spec: SamplerSpec
) -> None:
    """Put row m of `order` into row b of `drawn`. raw: [V], its logits before any step; None leaves raw entries out."""
    if not order.finite[m]:
        drawn.errors[b] = not_finite_error(row)
        return
    keep = order.keep[m]
    ids, z, logprobs = (x[m, keep].cpu().numpy() for x in (order.ids, order.z, order.logprobs))
    ascending = np.argsort(ids)
    drawn.put_support(b, ids[ascending].astype(np.int32), logprobs[ascending], spec.vocab_size)
    if not ids.size:
        drawn.token_ids[b] = -1
        return
    drawn.token_ids[b] = int(order.token_ids[m])
    if row.params.logprobs is None:
        return
    if spec.logprobs_mode.startswith("raw"):
        if raw is None:
            return
        values, sorted_ids = torch.sort(raw, descending=True, stable=True)
        if spec.logprobs_mode == "raw_logprobs":
            values = values.double().log_softmax(-1).float()
        ids, shown = sorted_ids.cpu().numpy(), values.cpu().numpy()
    else:
        shown = z if spec.logprobs_mode == "processed_logits" else logprobs
    at = np.flatnonzero(ids == drawn.token_ids[b])
    num_top = np.asarray([min(row.params.logprobs, int((shown > -np.inf).sum()))])
    drawn.entries.put(np.asarray([b]), drawn.token_ids[b : b + 1], shown[at], at + 1, ids[None], shown[None], num_top)


def not_finite_error(row: SamplingRow) -> RequestError:
    """The error of a row whose logits hold NaN or +inf."""
    return RequestError(
        f"logits at output position {row.num_output_tokens} hold NaN or +inf: no token can be drawn from them; "
        "check the model's weights, the logits processors, the penalties and the temperature"
    )


def _finite(z: Tensor) -> Tensor:
    """[M] bool: rows without NaN and +inf; -inf is legal, it bans an id."""
    return (z < torch.inf).all(-1)
