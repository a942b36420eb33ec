"""The sampler by definition: every step over the whole vocabulary, the filters on fully sorted rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.errors import RequestError
from keepmask.kernels.philox import gumbel
from keepmask.sampling.batch import BatchParams
from keepmask.sampling.capture import MAX_COMPACT_IDS
from keepmask.sampling.drawn import Drawn, WideSupport
from keepmask.sampling.head import Head
from keepmask.sampling.logprobs import TokenLogprobs, token_logprobs
from keepmask.sampling.processors import process
from keepmask.sampling.row import SamplingRow
from keepmask.sampling.semantics import survivors
from keepmask.sampling.spec import SamplerSpec

__all__ = ["draw_reference"]


def draw_reference(head: Head, rows: Sequence[SamplingRow], spec: SamplerSpec, params: BatchParams) -> Drawn:
    """Draw for every row. All logits are the head's exact ones."""
    device = head.logits.device
    raw = head.float32(torch.arange(len(rows), device=device))  # [B, V]
    bad_logits = _not_finite(raw)
    raw[bad_logits] = 0
    z = raw.clone()
    errors = process(z, rows, spec)
    z /= params.temperature
    bad_processed = _not_finite(z)
    z[bad_processed] = 0

    values, ids = torch.sort(z, dim=-1, descending=True, stable=True)  # ties by ascending id
    keep = survivors(values, params)
    positions = torch.tensor([[row.num_output_tokens] for row in rows], device=device)
    noise = gumbel(ids, positions, params.completions, params.seeds)
    scores = torch.where(keep, values.double() + noise, -torch.inf)
    token_ids = torch.empty_like(scores).scatter_(-1, ids, scores).argmax(-1)
    exact = torch.where(keep, values.double(), -torch.inf)
    logprobs = (exact - exact.logsumexp(-1, keepdim=True)).float()

    drawn = _empty(len(rows))
    drawn.token_ids[:] = token_ids.cpu().numpy()
    drawn.errors |= errors
    failed = dict.fromkeys(bad_logits.nonzero().squeeze(1).tolist(), "the model's logits")
    failed = dict.fromkeys(bad_processed.nonzero().squeeze(1).tolist(), "the processed logits") | failed
    for b, what in failed.items():
        drawn.errors.setdefault(b, not_finite_error(rows[b], what))
    for b, row in enumerate(rows):
        if b in drawn.errors:
            continue
        kept = keep[b]
        order = Order(ids[b, kept], values[b, kept], logprobs[b, kept])
        _store_support(drawn, b, order, spec.vocab_size)
        if row.params.logprobs is not None and kept.any():
            drawn.entries[b] = _entries(raw[b], order, int(drawn.token_ids[b]), row.params.logprobs, spec)
    return drawn


def not_finite_error(row: SamplingRow, what: str) -> RequestError:
    """The error of a row whose logits hold NaN or +inf."""
    return RequestError(
        f"{what} at output position {row.num_output_tokens} hold NaN or +inf: no token can be drawn from them; "
        "check the weights, the logits processors and the penalties"
    )


class Order:
    """A support as CPU arrays, by (logit descending, id ascending)."""

    __slots__ = ("ids", "logits", "logprobs")

    def __init__(self, ids: Tensor, logits: Tensor, logprobs: Tensor) -> None:
        self.ids: NDArray[np.int64] = ids.cpu().numpy()
        self.logits: NDArray[np.float32] = logits.cpu().numpy()
        self.logprobs: NDArray[np.float32] = logprobs.cpu().numpy()


def _not_finite(z: Tensor) -> Tensor:
    """[B] bool: rows that hold NaN or +inf; -inf is legal, it bans an id."""
    return ~(z < torch.inf).all(-1)


def _empty(B: int) -> Drawn:
    return Drawn(
        np.full(B, -1, np.int64),
        np.zeros(B, np.int64),
        np.full((B, MAX_COMPACT_IDS), -1, np.int32),
        np.zeros((B, MAX_COMPACT_IDS), np.float32),
    )


def _store_support(drawn: Drawn, b: int, order: Order, vocab_size: int) -> None:
    ascending = np.argsort(order.ids)
    ids, logprobs = order.ids[ascending].astype(np.int32), order.logprobs[ascending]
    if not ids.size:
        drawn.token_ids[b] = -1
    elif ids.size == vocab_size:
        drawn.counts[b] = 0
    else:
        drawn.counts[b] = ids.size
        if ids.size > MAX_COMPACT_IDS:
            drawn.wide[b] = WideSupport(ids, logprobs)
        else:
            drawn.ids[b, : ids.size], drawn.logprobs[b, : ids.size] = ids, logprobs


def _entries(raw: Tensor, order: Order, token_id: int, k: int, spec: SamplerSpec) -> TokenLogprobs:
    if spec.logprobs_mode.startswith("raw"):
        values, ids = torch.sort(raw, descending=True, stable=True)
        if spec.logprobs_mode == "raw_logprobs":
            values = (values.double() - raw.double().logsumexp(-1)).float()
        possible = values > -torch.inf
        shown = Order(ids, values, values)
        limit = min(k, int(possible.sum()))
    else:
        shown = order
        limit = k
    values_shown = shown.logits if spec.logprobs_mode.endswith("logits") else shown.logprobs
    at = int(np.flatnonzero(shown.ids == token_id)[0])
    return token_logprobs(token_id, values_shown[at], at + 1, shown.ids[:limit], values_shown[:limit])
