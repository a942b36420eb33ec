"""`DeviceEntries`: what logprobs entries are made of, computed on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.config import LogprobsMode
from keepmask.sampling.cuda import candidates, draw_table
from keepmask.sampling.cuda.compaction import Cut
from keepmask.sampling.cuda.draw_table import Candidates, Draws, DrawTable, Impl
from keepmask.sampling.token_logprobs import BatchLogprobs
from keepmask.sampling.transfer import to_device

__all__ = ["DeviceEntries", "entries_of_supports", "entries_over_all"]

Columns = dict[str, NDArray[Any]]
Ints = NDArray[np.int64]


class DeviceEntries(NamedTuple):
    """Entries of N rows of a batch. What they are of: the support of each row, or the whole vocabulary."""

    items: Ints
    """[N], the rows in the batch."""
    tensors: list[Tensor]
    """status, s, log-prob and rank of the token [N]; how many of the best [N]; their ids, s and log-probs [N, T]."""

    def unknown(self, arrays: list[NDArray[Any]], token_ids: Ints) -> Ints:
        """Rows of the batch that have a token, but whose entries could not be made. Arguments as for `put`."""
        unknown: Ints = self.items[(token_ids[self.items] >= 0) & (arrays[0] != draw_table.OK)]
        return unknown

    def put(self, target: BatchLogprobs, token_ids: Ints, arrays: list[NDArray[Any]], mode: LogprobsMode) -> None:
        """Set the entries of the rows that have a token.

        token_ids: [B], -1 for none. arrays: what `tensors` became on the host.
        """
        chosen = (token_ids[self.items] >= 0) & (arrays[0] == draw_table.OK)
        _, s, logprobs, ranks, num_top, top_ids, top_s, top_logprobs = (array[chosen] for array in arrays)
        items, logits = self.items[chosen], mode.endswith("logits")
        values, top_values = (s, top_s) if logits else (logprobs, top_logprobs)
        target.put(items, token_ids[items], values, ranks.astype(np.int64), top_ids, top_values, num_top)


def entries_of_supports(
    items: Ints,
    m: Ints,
    logits: Tensor,
    columns: Columns,
    table: DrawTable,
    found: Candidates,
    draws: Draws,
    cut: Cut,
    *,
    impl: Impl,
) -> DeviceEntries:
    """Entries of rows m [N] of a table, which are rows `items` of the batch and have their supports cut out."""
    max_top = max(0, int(columns["num_top"][m].max()))
    drawn = (found.status == draw_table.OK) & (table["whole"] == 0)
    wanted = (drawn & (draws.over_all == 0)).int()
    best = candidates.best(found.z, found.ids, found.counts, table, cut, wanted, max_top=max_top, impl=impl)
    wanted = (drawn & (draws.over_all != 0)).int()
    over_all = candidates.best(logits, None, None, table, cut, wanted, max_top=max_top, impl=impl)
    # Each wrote the rows it was to; the others are 0.
    tensors = [found.status, draws.token_s, draws.token_logprobs, draws.ranks]
    tensors += [a + b for a, b in zip(best, over_all, strict=True)]
    index = to_device(m, logits.device)
    return DeviceEntries(items, [tensor.index_select(0, index) for tensor in tensors])


def entries_over_all(
    items: Ints, logits: Tensor, columns: Columns, token_ids: Tensor, *, capacity: int, impl: Impl
) -> DeviceEntries:
    """Entries over the whole vocabulary of rows `items` [N] of the batch.

    columns: of N rows, of which source, temperature and num_top matter. token_ids: [N].
    """
    N = items.size
    changes = {"whole": np.zeros(N), "weighs": np.ones(N), "select_top_p": np.ones(N)}
    changes |= {"select_k": np.clip(columns["num_top"], 1, logits.shape[1]), "select_log_min_p": np.full(N, -np.inf)}
    table = DrawTable(to_device(DrawTable.pack(columns | changes), logits.device))
    found = candidates.select(logits, table, capacity=capacity, impl=impl)
    nothing = torch.zeros_like(found.status)
    cut = Cut((nothing - torch.inf).float(), nothing + 1, nothing, found.sums[0], found.sums[1].log())
    max_top = max(0, int(columns["num_top"].max()))
    best = candidates.best(found.z, found.ids, found.counts, table, cut, nothing + 1, max_top=max_top, impl=impl)
    ranks = candidates.ranks(logits, table, token_ids, impl=impl)
    s = logits[table["source"], token_ids.clamp_min(0)] / table["temperature"].float()
    logprobs = (s.double() - cut.highest - cut.log_weight).float()
    return DeviceEntries(items, [found.status, s, logprobs, ranks, *best])
