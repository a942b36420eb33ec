"""What the Triton kernels of the sampler must do, row by row in PyTorch: functions of their names and signatures."""

from typing import NamedTuple

import torch

from keepmask.sampling.cuda.draw_records import DRAW, REACHED, Best, Candidates, column
from keepmask.sampling.noise import gumbel
from keepmask.sampling.records import (
    BAND,
    EMPTY,
    HF,
    NEAR,
    NOT_FINITE,
    OK,
    RELATIVELY_NEAR,
    SGLANG,
    SGLANG_TORCH,
    TOO_MANY,
    UNCERTAIN,
    VLLM,
)

LAST_ID = 2**31 - 1


class Rows:
    """Words by field, as views: of `RECORD`, or of `DRAW`."""

    def __init__(self, words, **dtype):
        self.words, self.dtype = words, dtype

    def __getitem__(self, name):
        return column(self.words, name, **self.dtype)


def draws_of(found):
    return Rows(found.draws, dtype=DRAW)


def select(logits, records, *, capacity):
    rows = Rows(records)
    found = Candidates.empty(len(records), capacity, logits.device)
    draws = draws_of(found)
    for m in range(len(records)):
        z = logits[rows["source"][m]]
        s = z / rows["temperature"][m].float()
        draws["num_possible"][m] = (s > -torch.inf).sum()
        draws["status"][m] = NOT_FINITE if not (s < torch.inf).all() else OK if (s > -torch.inf).any() else EMPTY
        draws["highest"][m] = s.max()
        if draws["status"][m] != OK:
            continue
        weights = torch.exp(s.double() - s.max().double())
        ids = _chosen(s, weights, rows, m).nonzero().squeeze(1)
        draws["total"][m] = weights.sum() if rows["weighs"][m] else 0
        draws["weight"][m] = weights[ids].sum()
        if ids.numel() > capacity:
            draws["status"][m] = TOO_MANY
            continue
        draws["num_candidates"][m] = ids.numel()
        found.z[m, : ids.numel()], found.ids[m, : ids.numel()] = z[ids], ids.int()
    return found


def decide(found, records, V):
    rows, draws = Rows(records), draws_of(found)
    for m in range(len(records)):
        draws["token_id"][m], draws["count"][m], draws["over_all"][m] = -1, 0, 0
        if draws["status"][m] != OK:
            continue
        n = int(draws["num_candidates"][m])
        ids, s = found.ids[m, :n], found.z[m, :n] / rows["temperature"][m].float()
        outside = float((draws["total"][m] - draws["weight"][m]).clamp_min(0))
        row = _decide_row(s, ids, rows, m, outside)
        draws["status"][m] = TOO_MANY if row.short else UNCERTAIN if row.close else OK
        _put_draw(row, s, ids, m, V, draws)
        if rows["whole"][m]:
            draws["count"][m] = draws["num_possible"][m] % V
            draws["over_all"][m] = draws["count"][m] != 0
            draws["bound"][m], draws["first"][m], draws["last"][m] = -torch.inf, 1, 0
            draws["log_weight"][m] = draws["total"][m].log()
            draws["token_logprob"][m] = draws["token_s"][m] - draws["highest"][m] - draws["log_weight"][m]


def decide_all(logits, found, records):
    rows, draws = Rows(records), draws_of(found)
    for m in (draws["status"] == TOO_MANY).nonzero().squeeze(1).tolist():
        s = logits[rows["source"][m]] / rows["temperature"][m].float()
        ids = (s > -torch.inf).nonzero().squeeze(1)
        row = _decide_row(s[ids], ids, rows, m, 0.0)
        draws["status"][m] = UNCERTAIN if row.close else OK
        _put_draw(row, s[ids], ids, m, logits.shape[1], draws)
        draws["over_all"][m] = 1


def capture(logits, found, records, offsets, out, *, over_all):
    rows, draws = Rows(records), draws_of(found)
    for m, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start == end or bool(draws["over_all"][m]) != over_all:
            continue
        s, ids = _kept(logits, found, rows, draws, m)
        out[0][start:end] = ids
        if rows["returns_mask_logprobs"][m]:
            lowest = torch.finfo(torch.float32).min
            logprobs = s.double() - draws["highest"][m] - draws["log_weight"][m]
            out[1][start:end] = logprobs.float().clamp_min(lowest)


def best(logits, found, records, *, max_top):
    rows, draws = Rows(records), draws_of(found)
    out = Best.none(len(records), max_top, logits.device)
    for m in ((draws["status"] == OK) & (rows["whole"] == 0)).nonzero().squeeze(1).tolist():
        s, ids = _kept(logits, found, rows, draws, m)
        order = s.sort(descending=True, stable=True).indices[: max(0, int(rows["num_logprobs"][m]))]
        n = order.numel()
        out.num[m], out.ids[m, :n], out.s[m, :n] = n, ids[order].int(), s[order]
        out.logprobs[m, :n] = (s[order].double() - draws["highest"][m] - draws["log_weight"][m]).float()
    return out


def ranks(logits, records, token_ids):
    rows = Rows(records)
    s = logits[rows["source"]] / rows["temperature"].float().unsqueeze(1)
    tokens = token_ids.clamp_min(0).unsqueeze(1)
    own, all_ids = s.gather(1, tokens), torch.arange(s.shape[1], device=s.device)
    return 1 + ((s > own) | ((s == own) & (all_ids < tokens))).sum(1)


def _kept(logits, found, rows, draws, m):
    """s and ids of the support of row m, ids ascending."""
    if draws["over_all"][m]:
        z, ids = logits[rows["source"][m]], torch.arange(logits.shape[1], device=logits.device)
    else:
        n = int(draws["num_candidates"][m])
        z, ids = found.z[m, :n], found.ids[m, :n]
    s, bound = z / rows["temperature"][m].float(), draws["bound"][m].float()
    tied = (s == bound) & (ids >= draws["first"][m]) & (ids <= draws["last"][m])
    keep = ((s > bound) & (s < torch.inf)) | tied
    return s[keep], ids[keep]


def _put_draw(row, s, ids, m, V, draws):
    """Record the draw and the cut of row m."""
    bound = s[row.keep].min()
    tied = ids[row.keep & (s == bound)]
    all_tied = tied.numel() == (s == bound).sum()
    draws["bound"][m] = bound
    draws["first"][m], draws["last"][m] = (0, LAST_ID) if all_tied else (tied.min(), tied.max())
    draws["log_weight"][m] = torch.exp(s[row.keep].double() - draws["highest"][m]).sum().log()
    own, token_id = s[row.token], ids[row.token]
    draws["token_id"][m], draws["count"][m] = token_id, row.keep.sum() % V
    draws["token_s"][m] = own
    draws["token_logprob"][m] = own.double() - draws["highest"][m] - draws["log_weight"][m]
    draws["rank"][m] = 1 + (row.keep & ((s > own) | ((s == own) & (ids < token_id)))).sum()


class _Row(NamedTuple):
    """The draw of one row. keep: [N] bool."""

    keep: torch.Tensor
    token: int
    """Index of the drawn entry."""
    close: bool
    short: bool


def _chosen(s: torch.Tensor, weights: torch.Tensor, rows: Rows, m: int) -> torch.Tensor:
    """[V] bool: the candidates of a row. s, weights: [V]."""
    if rows["whole"][m]:
        scores = s.double() + _noise(torch.arange(s.numel(), device=s.device), rows, m)
        return scores >= scores.max() - NEAR - scores.max().abs() * RELATIVELY_NEAR
    chosen = s > -torch.inf
    k, log_min_p, top_p = int(rows["select_k"][m]), rows["select_log_min_p"][m], rows["select_top_p"][m]
    if k:
        chosen &= s >= s.topk(min(k, s.numel())).values[-1]
    chosen &= s.double() >= s.max().double() + log_min_p
    if not k and log_min_p == -torch.inf and top_p < 1:
        order = s.sort(descending=True).indices
        short = weights[order].cumsum(0) < top_p * weights.sum() * REACHED
        chosen &= s >= s[order[min(int(short.sum()), s.numel() - 1)]]
    return chosen


def _decide_row(s: torch.Tensor, ids: torch.Tensor, rows: Rows, m: int, outside: float) -> _Row:
    """Filters and draw over entries s, ids [N], ids ascending, and a weight outside of them."""
    keep, close, short = _survivors(s, rows, m, outside)
    scores = torch.where(keep, s.double() + _noise(ids.long(), rows, m), -torch.inf)
    first_two = scores.topk(min(2, scores.numel())).values
    margin = NEAR + float(first_two[0].abs()) * RELATIVELY_NEAR
    close |= first_two.numel() == 2 and bool(first_two[0] - first_two[1] < margin)
    return _Row(keep, int(scores.argmax()), close, short)


def _survivors(s: torch.Tensor, rows: Rows, m: int, outside: float) -> tuple[torch.Tensor, bool, bool]:
    """[N] bool, whether the mass cut came too close to tell, and whether it lies beyond the entries."""
    profile, k, top_p = int(rows["profile"][m]), int(rows["top_k"][m]), rows["top_p"][m]
    if rows["greedy"][m]:
        return torch.arange(s.numel(), device=s.device) == s.argmax(), False, False
    if rows["whole"][m]:
        return torch.ones_like(s, dtype=torch.bool), False, False
    in_top_k = s >= s.topk(min(k, s.numel())).values[-1]
    if profile in (VLLM, SGLANG_TORCH):
        in_top_k = torch.zeros_like(in_top_k).index_fill_(0, s.argsort(descending=True, stable=True)[:k], True)
    likely = s.double() >= s.max().double() + rows["log_min_p"][m]
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
    return mass & in_top_k & likely, close, beyond and not bool(rows["by_rank"][m])


def _noise(ids: torch.Tensor, rows: Rows, m: int) -> torch.Tensor:
    """[N] float64. ids: [N] int64."""
    return gumbel(ids, rows["position"][m], rows["completion"][m], rows["seed"][m])
