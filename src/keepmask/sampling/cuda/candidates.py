"""Drawing among candidates on the device of the logits: which ids may survive the filters, which do, which is drawn.

Each op works on M rows, whose parameters are a `DrawTable`, and says in a status what it could not do; nothing is
raised. The Triton forms do not wait for the device. The definitions in PyTorch go row by row and read values back.

s is float32(z / temperature), of logits z. The noise of an id is `noise.gumbel`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepmask.sampling.cuda.compaction import Cut, Supports, kept, logprobs_of, put_row
from keepmask.sampling.cuda.draw_table import (
    BAND,
    EMPTY,
    HF,
    NEAR,
    NOT_FINITE,
    OK,
    REACHED,
    RELATIVELY_NEAR,
    SGLANG,
    SGLANG_TORCH,
    TOO_MANY,
    UNCERTAIN,
    VLLM,
    Best,
    Candidates,
    Draws,
    DrawTable,
    Impl,
    use_triton,
)
from keepmask.sampling.noise import gumbel

__all__ = ["best", "decide", "decide_all", "ranks", "select"]

LAST_ID = 2**31 - 1


def select(logits: Tensor, table: DrawTable, *, capacity: int, impl: Impl = "auto") -> Candidates:
    """Candidates: every id that may be drawn from row source[m] of the logits, and perhaps some more.

    In a whole row those are the ids with the highest s + noise, in any other the ids that all of these hold:
    s >= the select_k-th highest s; s >= the highest + select_log_min_p; and, where neither bounds them and
    select_top_p < 1, the highest s, ties included, whose weights exceed that share of the weight of all by a billionth.
    TOO_MANY where there are more than `capacity`. logits: [R, V] float32, columns adjacent.
    """
    if use_triton(impl, logits):
        from keepmask.sampling.cuda import select_triton

        return select_triton.select(logits, table, capacity=capacity)
    found = Candidates.empty(table.num_rows, capacity, logits.device)
    for m in range(table.num_rows):
        z = logits[table["source"][m]]
        s = z / table["temperature"][m].float()
        found.counts[m], found.num_possible[m] = 0, (s > -torch.inf).sum()
        found.sums[:, m] = 0
        found.status[m] = NOT_FINITE if not (s < torch.inf).all() else OK if (s > -torch.inf).any() else EMPTY
        if found.status[m] != OK:
            continue
        weights = torch.exp(s.double() - s.max().double())
        ids = _chosen(s, weights, table, m).nonzero().squeeze(1)
        total = weights.sum() if table["weighs"][m] else torch.zeros_like(weights[0])
        found.sums[:, m] = torch.stack([s.max().double(), total, weights[ids].sum()])
        if ids.numel() > capacity:
            found.status[m] = TOO_MANY
            continue
        found.counts[m] = ids.numel()
        found.z[m, : ids.numel()], found.ids[m, : ids.numel()] = z[ids], ids.int()
    return found


def decide(found: Candidates, table: DrawTable, V: int, out: Supports, *, impl: Impl = "auto") -> tuple[Draws, Cut]:
    """Filter the candidates of each row by its profile, draw one, and write the support, unless the row is whole.

    For rows whose status is OK, with the filters of `keepmask.sampling.semantics` over all ids, of which the weight
    that is not among the candidates lies below them: token = argmax of s + noise over the support, ties to the lowest
    id; log-probabilities are a log-softmax of s over the support. Changes the status: TOO_MANY where the candidates do
    not reach the mass cut, or the support does not fit `out`; UNCERTAIN where sums or scores are too close to tell.
    """
    if use_triton(impl, found.z):
        from keepmask.sampling.cuda import candidates_triton

        return candidates_triton.decide(found, table, V, out)
    draws, cut = Draws.empty(table.num_rows, found.z.device), Cut.empty(table.num_rows, found.z.device)
    for m in range(table.num_rows):
        draws.token_ids[m], draws.counts[m], draws.over_all[m] = -1, 0, 0
        if found.status[m] != OK:
            continue
        n = int(found.counts[m])
        ids, s = found.ids[m, :n], found.z[m, :n] / table["temperature"][m].float()
        outside = float((found.sums[1, m] - found.sums[2, m]).clamp_min(0))
        row = _decide_row(s, ids, table, m, outside)
        whole = bool(table["whole"][m])
        too_many = not whole and row.keep.sum() > out.ids.shape[1]
        found.status[m] = TOO_MANY if row.short or too_many else UNCERTAIN if row.close else OK
        _put_draw(row, s, ids, table, m, V, draws, cut)
        if whole:
            draws.counts[m] = found.num_possible[m] % V
            draws.over_all[m] = draws.counts[m] != 0
            cut.bound[m], cut.first[m], cut.last[m] = -torch.inf, 1, 0
            cut.highest[m], cut.log_weight[m] = found.sums[0, m], found.sums[1, m].log()
            draws.token_logprobs[m] = logprobs_of(draws.token_s[m], cut, m)
        elif found.status[m] == OK:
            put_row(ids[row.keep], s[row.keep], table, cut, m, out)
    return draws, cut


def decide_all(
    logits: Tensor,
    found: Candidates,
    table: DrawTable,
    draws: Draws,
    cut: Cut,
    out: Supports,
    *,
    impl: Impl = "auto",
) -> None:
    """`decide` for the rows whose status is TOO_MANY, with all ids as their candidates; leaves writing the support."""
    if use_triton(impl, logits):
        from keepmask.sampling.cuda import candidates_triton

        return candidates_triton.decide_all(logits, found, table, draws, cut, out)
    V = logits.shape[1]
    for m in (found.status == TOO_MANY).nonzero().squeeze(1).tolist():
        s = logits[table["source"][m]] / table["temperature"][m].float()
        ids = (s > -torch.inf).nonzero().squeeze(1)
        row = _decide_row(s[ids], ids, table, m, 0.0)
        found.status[m] = UNCERTAIN if row.close else OK
        _put_draw(row, s[ids], ids, table, m, V, draws, cut)
        draws.over_all[m] = 1
    return None


def best(
    z: Tensor,
    ids: Tensor | None,
    num: Tensor | None,
    table: DrawTable,
    cut: Cut,
    wanted: Tensor,
    *,
    max_top: int,
    impl: Impl = "auto",
) -> Best:
    """The first num_top[m] of each support by (s descending, id ascending), for rows with wanted[m] != 0.

    z, ids, num: candidates [M, C], their ids, and how many count in each row [M]; or logits [R, V], None and None.
    Of num_top of the table, `max_top` is the highest.
    """
    M, device = table.num_rows, z.device
    types, shape = (torch.int32, torch.float32, torch.float32), (M, max_top)
    out = Best(
        torch.zeros(M, dtype=torch.int32, device=device), *(torch.zeros(shape, dtype=t, device=device) for t in types)
    )
    if use_triton(impl, z):
        from keepmask.sampling.cuda import entries_triton

        entries_triton.best(z, ids, num, table, cut, wanted, out)
        return out
    for m in wanted.nonzero().squeeze(1).tolist():
        source = m if ids is not None else int(table["source"][m])
        n = z.shape[1] if num is None else int(num[m])
        row_ids = torch.arange(n, device=device) if ids is None else ids[m, :n]
        s = z[source, :n] / table["temperature"][m].float()
        keep = kept(s, row_ids, cut, m)
        order = s[keep].sort(descending=True, stable=True).indices[: max(0, int(table["num_top"][m]))]
        top = s[keep][order]
        out.num[m], out.ids[m, : top.numel()], out.s[m, : top.numel()] = top.numel(), row_ids[keep][order].int(), top
        out.logprobs[m, : top.numel()] = logprobs_of(top, cut, m)
    return out


def ranks(logits: Tensor, table: DrawTable, token_ids: Tensor, *, impl: Impl = "auto") -> Tensor:
    """[M] int64: the rank of each token, from 1, by (s descending, id ascending) over all ids. token_ids: [M] int64."""
    if use_triton(impl, logits):
        from keepmask.sampling.cuda import entries_triton

        return entries_triton.ranks(logits, table, token_ids)
    s = logits[table["source"]] / table["temperature"].float().unsqueeze(1)
    tokens = token_ids.clamp_min(0).unsqueeze(1)
    own, all_ids = s.gather(1, tokens), torch.arange(s.shape[1], device=s.device)
    return 1 + ((s > own) | ((s == own) & (all_ids < tokens))).sum(1)


class _Row(NamedTuple):
    """The draw of one row. keep: [N] bool."""

    keep: Tensor
    token: int
    """Index of the drawn entry."""
    close: bool
    short: bool


def _chosen(s: Tensor, weights: Tensor, table: DrawTable, m: int) -> Tensor:
    """[V] bool: the candidates of a row. s, weights: [V]."""
    if table["whole"][m]:
        scores = s.double() + _noise(torch.arange(s.numel(), device=s.device), table, m)
        return scores >= scores.max() - NEAR - scores.max().abs() * RELATIVELY_NEAR
    chosen = s > -torch.inf
    k, log_min_p, top_p = int(table["select_k"][m]), table["select_log_min_p"][m], table["select_top_p"][m]
    if k:
        chosen &= s >= s.topk(min(k, s.numel())).values[-1]
    chosen &= s.double() >= s.max().double() + log_min_p
    if not k and log_min_p == -torch.inf and top_p < 1:
        order = s.sort(descending=True).indices
        short = weights[order].cumsum(0) < top_p * weights.sum() * REACHED
        chosen &= s >= s[order[min(int(short.sum()), s.numel() - 1)]]
    return chosen


def _decide_row(s: Tensor, ids: Tensor, table: DrawTable, m: int, outside: float) -> _Row:
    """Filters and draw over entries s, ids [N], ids ascending, and a weight outside of them."""
    keep, close, short = _survivors(s, table, m, outside)
    scores = torch.where(keep, s.double() + _noise(ids.long(), table, m), -torch.inf)
    first_two = scores.topk(min(2, scores.numel())).values
    margin = NEAR + float(first_two[0].abs()) * RELATIVELY_NEAR
    close |= first_two.numel() == 2 and bool(first_two[0] - first_two[1] < margin)
    return _Row(keep, int(scores.argmax()), close, short)


def _survivors(s: Tensor, table: DrawTable, m: int, outside: float) -> tuple[Tensor, bool, bool]:
    """[N] bool, whether the mass cut came too close to tell, and whether it lies beyond the entries."""
    profile, k, top_p = int(table["profile"][m]), int(table["top_k"][m]), table["top_p"][m]
    if table["greedy"][m]:
        return torch.arange(s.numel(), device=s.device) == s.argmax(), False, False
    if table["whole"][m]:
        return torch.ones_like(s, dtype=torch.bool), False, False
    in_top_k = s >= s.topk(min(k, s.numel())).values[-1]
    if profile in (VLLM, SGLANG_TORCH):
        in_top_k = torch.zeros_like(in_top_k).index_fill_(0, s.argsort(descending=True, stable=True)[:k], True)
    likely = s.double() >= s.max().double() + table["log_min_p"][m]
    if top_p >= 1:
        return in_top_k & likely, False, False
    inclusive = profile in (SGLANG, SGLANG_TORCH)
    considered = torch.ones_like(in_top_k) if inclusive else in_top_k if profile == HF else in_top_k & likely
    # By (s descending, id ascending); hf has tied ids the other way round.
    order = (
        s.flip(0).argsort(descending=True, stable=True) if profile == HF else s.argsort(descending=True, stable=True)
    )
    order = s.numel() - 1 - order if profile == HF else order
    order = order[considered[order]]
    weights = torch.exp(s[order].double() - s.max().double())
    before = weights.cumsum(0).roll(1)
    inside = float(before[0])
    before[0] = 0
    total = inside + outside
    stays = before <= top_p * total if inclusive else before < top_p * total
    if profile == HF:  # counts from the low end
        stays = outside + weights.flip(0).cumsum(0).flip(0) > (1 - top_p) * total
        stays[0] = True
    close = bool((before[1:] - top_p * total).abs().le(BAND * total).any()) and not bool((weights == 1).all())
    beyond = outside > 0 and bool(stays.all()) and inside < float(top_p) * total
    mass = torch.zeros_like(in_top_k)
    mass[order] = stays
    if profile == SGLANG:
        mass |= considered & (s >= s[mass].min())
    return mass & in_top_k & likely, close, beyond and not bool(table["by_rank"][m])


def _put_draw(row: _Row, s: Tensor, ids: Tensor, table: DrawTable, m: int, V: int, draws: Draws, cut: Cut) -> None:
    """Record the draw and the cut of row m."""
    bound = s[row.keep].min()
    tied = ids[row.keep & (s == bound)]
    all_tied = tied.numel() == (s == bound).sum()
    cut.bound[m] = bound
    cut.first[m], cut.last[m] = (0, LAST_ID) if all_tied else (tied.min(), tied.max())
    cut.highest[m] = s.max()
    cut.log_weight[m] = torch.exp(s[row.keep].double() - s.max().double()).sum().log()
    own, token_id = s[row.token], ids[row.token]
    draws.token_ids[m], draws.counts[m] = token_id, row.keep.sum() % V
    draws.token_s[m], draws.token_logprobs[m] = own, logprobs_of(own, cut, m)
    draws.ranks[m] = 1 + (row.keep & ((s > own) | ((s == own) & (ids < token_id)))).sum()


def _noise(ids: Tensor, table: DrawTable, m: int) -> Tensor:
    """[N] float64. ids: [N] int64."""
    return gumbel(ids, table["position"][m], table["completion"][m], table["seed"][m])
