"""`DeviceEntries`: what logprobs entries are made of, computed on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.config import LogprobsMode
from keepmask.sampling.cuda import entries_triton, select_triton
from keepmask.sampling.cuda.draw_records import Candidates, column, words_of
from keepmask.sampling.records import OK, Ints, Records
from keepmask.sampling.token_logprobs import BatchLogprobs
from keepmask.sampling.transfer import to_device

__all__ = ["DeviceEntries", "entries_of_supports", "entries_over_all"]


class DeviceEntries(NamedTuple):
    """Entries of N rows of a batch. What they are of: the support of each row, or the whole vocabulary."""

    items: Ints
    """[N], the rows in the batch."""
    tensors: list[Tensor]
    """status, s, log-prob and rank of the token [N]; how many of the best [N]; their ids, s and log-probs [N, T]."""

    def unknown(self, arrays: list[NDArray[Any]], token_ids: Ints) -> Ints:
        """Rows of the batch that have a token, but whose entries could not be made. Arguments as for `put`."""
        unknown: Ints = self.items[(token_ids[self.items] >= 0) & (arrays[0] != OK)]
        return unknown

    def put(self, target: BatchLogprobs, token_ids: Ints, arrays: list[NDArray[Any]], mode: LogprobsMode) -> None:
        """Set the entries of the rows that have a token.

        token_ids: [B], -1 for none. arrays: what `tensors` became on the host.
        """
        chosen = (token_ids[self.items] >= 0) & (arrays[0] == OK)
        _, s, logprobs, ranks, num_top, top_ids, top_s, top_logprobs = (array[chosen] for array in arrays)
        items, logits = self.items[chosen], mode.endswith("logits")
        values, top_values = (s, top_s) if logits else (logprobs, top_logprobs)
        target.put(items, token_ids[items], values, ranks.astype(np.int64), top_ids, top_values, num_top)


def entries_of_supports(
    items: Ints, m: Ints, logits: Tensor, records: Records, words: Tensor, found: Candidates
) -> DeviceEntries:
    """Entries of rows m [N] of the records, which are rows `items` of the batch and have their supports cut out."""
    max_top = max(0, int(records["num_logprobs"][m].max()))
    top = entries_triton.best(logits, found, words, max_top=max_top)
    own = [found.field(name) for name in ("status", "token_s", "token_logprob", "rank")]
    index = to_device(m, logits.device)
    return DeviceEntries(items, [tensor.index_select(0, index) for tensor in (*own, *top)])


def entries_over_all(
    items: Ints, logits: Tensor, records: Records, token_ids: Tensor, *, capacity: int
) -> DeviceEntries:
    """Entries over the whole vocabulary of rows `items` [N] of the batch.

    records: [N], of which source, temperature and num_logprobs matter. token_ids: [N].
    """
    records = records.copy()
    records["whole"], records["weighs"], records["select_top_p"], records["select_log_min_p"] = 0, 1, 1, -np.inf
    records["select_k"] = np.clip(records["num_logprobs"], 1, logits.shape[1])
    words = to_device(words_of(records), logits.device)
    found = select_triton.select(logits, words, capacity=capacity)
    log_weight = found.field("total").log()
    found.field("bound").fill_(-torch.inf)
    found.field("first").fill_(1)
    found.field("last").fill_(0)
    found.field("log_weight").copy_(log_weight)
    top = entries_triton.best(logits, found, words, max_top=max(0, int(records["num_logprobs"].max())))
    ranks = entries_triton.ranks(logits, words, token_ids)
    s = logits[column(words, "source"), token_ids.clamp_min(0)] / column(words, "temperature").float()
    logprobs = s.double() - found.field("highest") - log_weight
    return DeviceEntries(items, [found.field("status"), s, logprobs, ranks, *top])
