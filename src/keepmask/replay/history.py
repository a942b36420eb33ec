"""`TokenHistory` and `LogitBias`: the per-sequence and per-request tables behind `TokenTransforms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from keepmask.head.pairs import places_in

__all__ = ["LogitBias", "TokenHistory"]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenHistory:
    """The ids that came before each of T tokens. S is the number of sequences, L of ids over all of them.

    A token's history is `ids[offsets[s]:offsets[s] + lengths[t]]` with s = sequences[t]. Ids from `starts[t]` on are
    the output of the request that drew the token; those before it are its prompt. In a dialogue of several requests
    each one counts the earlier turns as prompt, so `starts` moves while the sequence stays the same.
    """

    ids: Tensor
    """[L] int64, the sequences one after the other."""
    offsets: Tensor
    """[S+1] int64."""
    sequences: Tensor
    """[T] int64: the sequence each token belongs to."""
    lengths: Tensor
    """[T] int64: how many ids of its sequence came before the token."""
    starts: Tensor
    """[T] int64, at most `lengths`: the position in its sequence where the output of its request begins."""
    keys: Tensor | None = field(default=None, repr=False)
    """[L] int64, where they are known: `_keys`."""

    def select(self, rows: Tensor) -> TokenHistory:
        """The histories of these tokens; the sequences are shared."""
        return TokenHistory(
            ids=self.ids,
            offsets=self.offsets,
            sequences=self.sequences[rows],
            lengths=self.lengths[rows],
            starts=self.starts[rows],
            keys=vars(self).get("_keys", self.keys),
        )

    def to(self, device: torch.device | str) -> TokenHistory:
        """The same histories on `device`."""
        return TokenHistory(**{name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors().items()})

    @classmethod
    def cat(cls, parts: Sequence[TokenHistory]) -> TokenHistory:
        """The tokens of all parts, one after the other."""
        ids, offsets, sequences = _cat_ragged(
            [part.ids for part in parts], [part.offsets for part in parts], [part.sequences for part in parts]
        )
        lengths = torch.cat([part.lengths for part in parts])
        starts = torch.cat([part.starts for part in parts])
        return cls(ids=ids, offsets=offsets, sequences=sequences, lengths=lengths, starts=starts)

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device) -> TokenHistory:
        """Tokens with nothing before them."""
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(ids=none, offsets=none.new_zeros(2), sequences=zeros, lengths=zeros, starts=zeros)

    def counts(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """How often ids[n] occurs before token rows[n]: (anywhere, in its request's output), both [N] int64."""
        base = self.offsets[:-1][self.sequences]
        ends = base + self.lengths
        keys, wanted = self._keys, ids.to(torch.int64) * (self.ids.numel() + 1)
        if ids.device.type != "cpu":
            first, start, end = (
                torch.searchsorted(keys, wanted + bound[rows]) for bound in (base, base + self.starts, ends)
            )
            return end - first, end - start
        # Few pairs occur before their token at all; on a CPU it pays to search the bounds of those only.
        first = torch.searchsorted(keys, wanted + base[rows])
        last = wanted + ends[rows]
        hits = (torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])[first] < last).nonzero()[:, 0]
        end = torch.searchsorted(keys, last[hits])
        start = torch.searchsorted(keys, wanted[hits] + (base + self.starts)[rows[hits]])
        anywhere, output = torch.zeros_like(first), torch.zeros_like(first)
        anywhere[hits] = end - first[hits]
        output[hits] = end - start
        return anywhere, output

    def dense_counts(self, ids: range) -> tuple[Tensor, Tensor]:
        """The same for each of `ids`: (anywhere, in the request's output), both [T, len(ids)] int32."""
        base = self.offsets[:-1][self.sequences]
        rows, places = _expand(self.lengths, base)
        columns, inside = places_in(self.ids[places], ids)
        rows, columns, places = rows[inside], columns[inside], places[inside]
        in_output = (places - base[rows] >= self.starts[rows]).to(torch.int32)
        anywhere = torch.zeros(self.lengths.numel(), len(ids), dtype=torch.int32, device=self.ids.device)
        output = torch.zeros_like(anywhere)
        anywhere.index_put_((rows, columns), torch.ones_like(in_output), accumulate=True)
        output.index_put_((rows, columns), in_output, accumulate=True)
        return anywhere, output

    @cached_property
    def _keys(self) -> Tensor:
        """[L] int64, ascending: (id, place in `ids`) of every id, in one number. Places tell the sequences apart."""
        if self.keys is not None:
            return self.keys
        places = torch.arange(self.ids.numel(), device=self.ids.device)
        return torch.sort(self.ids.to(torch.int64) * (self.ids.numel() + 1) + places).values

    def _tensors(self) -> dict[str, Tensor]:
        names = ("ids", "offsets", "sequences", "lengths", "starts")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitBias:
    """Values added to the logits of some ids. Request r biases `ids[offsets[r]:offsets[r + 1]]`, distinct ids."""

    ids: Tensor
    """[M] int64."""
    values: Tensor
    """[M] float32."""
    offsets: Tensor
    """[R+1] int64."""
    requests: Tensor
    """[T] int64: the request that drew each token."""

    def select(self, rows: Tensor) -> LogitBias:
        """The biases of these tokens; the requests are shared."""
        return LogitBias(ids=self.ids, values=self.values, offsets=self.offsets, requests=self.requests[rows])

    def to(self, device: torch.device | str) -> LogitBias:
        """The same biases on `device`."""
        ids, values, offsets, requests = (
            tensor.to(device, non_blocking=True) for tensor in (self.ids, self.values, self.offsets, self.requests)
        )
        return LogitBias(ids=ids, values=values, offsets=offsets, requests=requests)

    @classmethod
    def cat(cls, parts: Sequence[LogitBias]) -> LogitBias:
        """The tokens of all parts, one after the other."""
        ids, offsets, requests = _cat_ragged(
            [part.ids for part in parts], [part.offsets for part in parts], [part.requests for part in parts]
        )
        return cls(ids=ids, values=torch.cat([part.values for part in parts]), offsets=offsets, requests=requests)

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device) -> LogitBias:
        """Tokens of one request without any bias."""
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(ids=none, values=none.float(), offsets=none.new_zeros(2), requests=zeros)

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """[N] float32: what is added to the logit of ids[n] for token rows[n]."""
        if not self.ids.numel():
            return torch.zeros(ids.shape, dtype=self.values.dtype, device=ids.device)
        keys, values = self._sorted
        wanted = (self.requests << 32)[rows] + ids
        place = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
        return torch.where(keys[place] == wanted, values[place], 0.0)

    def dense(self, ids: range) -> Tensor:
        """[T, len(ids)] float32: what is added to the logit of each of `ids`."""
        rows, places = _expand(self.offsets.diff()[self.requests], self.offsets[:-1][self.requests])
        columns, inside = places_in(self.ids[places], ids)
        bias = torch.zeros(self.requests.numel(), len(ids), dtype=self.values.dtype, device=self.ids.device)
        return bias.index_put_((rows[inside], columns[inside]), self.values[places[inside]])

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """Keys (request, id) in one number, ascending, and the value of each."""
        requests = torch.arange(self.offsets.numel() - 1, device=self.ids.device)
        keys = (torch.repeat_interleave(requests, self.offsets.diff()) << 32) + self.ids
        keys, order = torch.sort(keys)
        return keys, self.values[order]


def _expand(counts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Row t repeated counts[t] times, and the places starts[t], starts[t] + 1, ... that go with it."""
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    within = torch.arange(rows.numel(), device=counts.device) - (counts.cumsum(0) - counts)[rows]
    return rows, starts[rows] + within


def _cat_ragged(values: list[Tensor], offsets: list[Tensor], owners: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """CSR tables one after the other, and the row numbers that point into them."""
    all_offsets, all_owners = [offsets[0][:1]], []
    num_values, num_rows = 0, 0
    for value, offset, owner in zip(values, offsets, owners, strict=True):
        all_offsets.append(offset[1:] + num_values)
        all_owners.append(owner + num_rows)
        num_values += value.numel()
        num_rows += offset.numel() - 1
    return torch.cat(values), torch.cat(all_offsets), torch.cat(all_owners)
