"""From the support of each row, as a bound on its logits, to compact ids or packed bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.sampling.cuda.draw_table import DrawTable, Impl, use_triton

__all__ = ["Cut", "Supports", "compact", "kept", "logprobs_of", "put_row", "wide_logprobs"]


class Cut(NamedTuple):
    """Which entries of M rows are their supports, in terms of s = float32(z / temperature)."""

    bound: Tensor
    """[M] float32: numbers above it stay; NaN and +inf never do. -inf keeps all that are above -inf."""
    first: Tensor
    """[M] int32: entries at the bound stay if their id is in [first, last]."""
    last: Tensor
    """[M] int32."""
    highest: Tensor
    """[M] float64, the highest s of the row."""
    log_weight: Tensor
    """[M] float64, log of the sum of exp(s - highest) over the support: a log-prob is s - highest - log_weight."""

    @classmethod
    def empty(cls, M: int, device: torch.device) -> Cut:
        """Room for them."""
        types = (torch.float32, torch.int32, torch.int32, torch.float64, torch.float64)
        return cls(*(torch.empty(M, dtype=dtype, device=device) for dtype in types))


class Supports(NamedTuple):
    """Room for supports: up to K ids go to `ids`, ascending, and to `logprobs`; more go to `bits` alone.

    The rows of these are the slots of `DrawTable`. What a support does not use is left as it was.
    """

    ids: Tensor
    """[R1, K] int32."""
    logprobs: Tensor
    """[R2, K] float32."""
    bits: Tensor
    """[R1, ceil(V / 32)] int32: bit i % 32 of word i // 32 says whether id i is there."""

    @classmethod
    def empty(cls, num_rows: int, num_with_logprobs: int, K: int, V: int, device: torch.device) -> Supports:
        """Room for them."""
        return cls(
            torch.empty((num_rows, K), dtype=torch.int32, device=device),
            torch.empty((num_with_logprobs, K), dtype=torch.float32, device=device),
            torch.empty((num_rows, -(-V // 32)), dtype=torch.int32, device=device),
        )


def compact(
    logits: Tensor, table: DrawTable, cut: Cut, wanted: Tensor, counts: Tensor, out: Supports, *, impl: Impl = "auto"
) -> None:
    """Write the supports of rows of logits, and how many ids each holds.

    Equals, for each row m with wanted[m] != 0: `s = logits[source[m]] / temperature[m]`;
    `ids = kept(s, arange(V), cut).nonzero()`; `counts[m] = ids.numel() % V`, so 0 for the whole vocabulary; and unless
    that is 0 or the row has no slot, `ids` and `s[ids] - highest[m] - log_weight[m]` as `Supports` holds them.

    logits: [R, V] float32, columns adjacent. wanted, counts: [M] int32. Of the table it reads source, temperature and
    the slots.
    """
    if use_triton(impl, logits):
        from keepmask.sampling.cuda import compaction_triton

        return compaction_triton.compact(logits, table, cut, wanted, counts, out)
    all_ids = torch.arange(logits.shape[1], device=logits.device)
    for m in wanted.nonzero().squeeze(1).tolist():
        s = logits[table["source"][m]] / table["temperature"][m].float()
        ids = kept(s, all_ids, cut, m).nonzero().squeeze(1)
        counts[m] = ids.numel() % logits.shape[1]
        if counts[m]:
            put_row(ids, s[ids], table, cut, m, out)
    return None


def kept(s: Tensor, ids: Tensor, cut: Cut, m: int) -> Tensor:
    """[N] bool: which of these entries are in the support of row m. s: [N] float32. ids: [N]."""
    above = (s > cut.bound[m]) & (s < torch.inf)
    return above | ((s == cut.bound[m]) & (ids >= cut.first[m]) & (ids <= cut.last[m]))


def logprobs_of(s: Tensor, cut: Cut, m: int) -> Tensor:
    """Log-probabilities of entries of row m, float32 and finite."""
    return (s.double() - cut.highest[m] - cut.log_weight[m]).float().clamp_min(torch.finfo(torch.float32).min)


def wide_logprobs(z: Tensor, table: DrawTable, cut: Cut, m: int, count: int) -> Tensor:
    """[count] float32: the log-probabilities of row m's support, ids ascending. z: [V], its logits.

    Nothing is read back from the device, so the number of ids must be known.
    """
    s = z / table["temperature"][m].float()
    keep = kept(s, torch.arange(z.numel(), device=z.device), cut, m)
    place = torch.where(keep, keep.cumsum(0) - 1, count)
    return s.new_empty(count + 1).scatter_(0, place, logprobs_of(s, cut, m))[:count]


def put_row(ids: Tensor, s: Tensor, table: DrawTable, cut: Cut, m: int, out: Supports) -> None:
    """Write the support of row m, ids [N] ascending with their s [N], into its slots."""
    slot, logprobs_slot = int(table["mask_slot"][m]), int(table["logprobs_slot"][m])
    if slot < 0:
        return
    if ids.numel() > out.ids.shape[1]:
        words = torch.zeros(out.bits.shape[1], dtype=torch.int64, device=ids.device)
        out.bits[slot] = words.index_add_(0, ids.long() // 32, 1 << (ids.long() % 32)).to(torch.int32)
        return
    out.ids[slot, : ids.numel()] = ids.int()
    if logprobs_slot >= 0:
        out.logprobs[logprobs_slot, : ids.numel()] = logprobs_of(s, cut, m)
