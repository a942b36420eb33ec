"""`Entries`: what logprobs entries are made of, over the support or over the whole vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepmask.config import LogprobsMode
from keepmask.sampling.cpu.groups import Group
from keepmask.sampling.cpu.search import Found, Search
from keepmask.sampling.records import OK, TOO_MANY, Ints
from keepmask.sampling.token_logprobs import BatchLogprobs, finite

__all__ = ["Entries", "entries_over_all", "put_entries"]

NUM_RESCORED = 64
"""Ids whose exact logits correct a sum over the rounded logits of a whole row."""


class Entries(NamedTuple):
    """Of M rows, each drawn token's entry and those of the best T ids, of which the first num_top[m] count."""

    s: NDArray[np.float32]
    """[M], the logit over the temperature."""
    logprobs: NDArray[np.float32]
    """[M]."""
    ranks: Ints
    """[M]."""
    top_ids: NDArray[np.int32]
    """[M, T], by (logit descending, id ascending)."""
    top_s: NDArray[np.float32]
    """[M, T]."""
    top_logprobs: NDArray[np.float32]
    """[M, T]."""
    num_top: Ints
    """[M]."""


def put_entries(target: BatchLogprobs, items: Ints, token_ids: Ints, entries: Entries, mode: LogprobsMode) -> None:
    """Set rows `items` [M] of target, as the mode wants them."""
    logits = mode.endswith("logits")
    target.put(
        items,
        token_ids,
        entries.s if logits else entries.logprobs,
        entries.ranks,
        entries.top_ids,
        entries.top_s if logits else entries.top_logprobs,
        entries.num_top,
    )


def entries_over_all(
    search: Search, group: Group, token_ids: Ints, token_s: NDArray[np.float32]
) -> tuple[Entries, NDArray[np.float64]]:
    """Entries over the whole vocabulary, and [M] log sum exp(z / temperature).

    token_ids: [M]. token_s: [M], their exact logits over the temperature.

    Where the group's logits are rounded, the sum takes the highest ones exactly and the others as they are, and an id
    that is not among the highest has its rank among the rounded ones.
    """
    asked, temperature = group.records["num_logprobs"], group.records["temperature"].astype(np.float32)
    with np.errstate(over="ignore"):
        stored = token_s if group.exact else group.stored(token_ids) / temperature
    k = np.clip(asked, 1 if group.exact else NUM_RESCORED, search.V)
    found = search.best(group, k, token_ids, stored)
    for m in np.flatnonzero(found.rows["status"] == TOO_MANY).tolist():
        _sort_whole(search, group.one(m), found, m, int(k[m]))
    counts, ranks = found.rows["count"], found.rows["rank"]
    keys = search.sorted_keys(found, group.records)
    inside = np.arange(keys.shape[1]) < counts[:, None]
    if not group.exact:
        here = ((keys & 0xFFFFFFFF) == token_ids[:, None]) & inside
        ranks = np.where(here.any(1), 1 + here.argmax(1), ranks)
    top_s = np.where(inside, key_values(keys), np.float32(-np.inf))
    highest = top_s[:, 0].astype(np.float64)
    # Where rounding has moved the highest logit by hundreds of nats, the sum is one of rounding errors.
    outside = found.rows["outside"] * np.exp(np.minimum(found.rows["shift"] - highest, 700.0))
    log_totals = np.log(np.exp(top_s - highest[:, None]).sum(1) + outside)
    num_top = np.minimum(asked, counts)
    T = max(0, int(num_top.max()))
    top_s = top_s[:, :T]
    # Subtracted one after the other: the highest logit's log-prob keeps all its digits.
    logprobs = finite((token_s - highest) - log_totals)
    top_logprobs = finite((top_s - highest[:, None]) - log_totals[:, None])
    top_ids = (keys[:, :T] & 0xFFFFFFFF).astype(np.int32)
    return Entries(token_s, logprobs, ranks, top_ids, top_s, top_logprobs, num_top), highest + log_totals


def key_values(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """The scaled logits of keys, as `draw_numba.key_value` of one."""
    order = ~(keys >> 32).astype(np.int32)
    return (order ^ ((order >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


def _sort_whole(search: Search, group: Group, found: Found, m: int, k: int) -> None:
    """Find the k best of a row that holds more equal logits than there is room for."""
    exact = search.exact_rows(group)[0].numpy()
    with np.errstate(over="ignore"):
        s = (exact / np.float32(group.records["temperature"][0])).astype(np.float64)
    n = min(k, int((s > -np.inf).sum()))
    best = np.argsort(-s, kind="stable")[:n]
    weights = np.exp(s - s[best[0]])
    found.z[m, :n], found.ids[m, :n] = exact[best], best
    row = found.rows[m : m + 1]
    row["count"], row["outside"], row["shift"] = n, max(weights.sum() - weights[best].sum(), 0.0), s[best[0]]
    row["status"] = OK
