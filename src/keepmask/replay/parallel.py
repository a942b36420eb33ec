"""`VocabParallel`: a head whose rows are spread over the processes of a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.replay.row_scores import RowStats, merge

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from keepmask.head.pairs import Pairs

__all__ = ["VocabParallel", "local_tensors"]


@dataclass(frozen=True, kw_only=True)
class VocabParallel:
    """This process holds some rows of a head of `vocab_size` rows; every process of `group` scores the same tokens.

    layout: "contiguous" gives process r of n the ids [r * c, (r + 1) * c) with c = ceil(vocab_size / n), as
    `torch.chunk` and DTensor do; "strided" gives it the ids r, r + n, r + 2n, ... Ids of most tokenizers are ordered
    by frequency, so that of n contiguous shares the first has most of the pairs; strided shares are even.

    Four floats a row are exchanged. reduce_hidden: add up the gradient of the hidden states over the group, in the
    backward pass; False leaves each process its part, for callers whose own layer adds them up.
    """

    group: ProcessGroup
    vocab_size: int
    layout: Literal["contiguous", "strided"] = "contiguous"
    reduce_hidden: bool = True

    def __post_init__(self) -> None:
        if self.layout not in ("contiguous", "strided"):
            raise ValueError(f"layout={self.layout!r}: must be contiguous or strided")

    @cached_property
    def ids(self) -> range:
        """The ids whose head rows this process holds, in their order."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        everything = range(self.vocab_size)
        if self.layout == "strided":
            return everything[rank::size]
        width = -(-self.vocab_size // size)
        return everything[rank * width : (rank + 1) * width]

    def merge(self, stats: RowStats) -> RowStats:
        """The statistics of all processes' shares together, the same bits on each of them."""
        own = torch.stack([values.to(stats.peak.dtype) for values in stats], dim=1)  # [A, 4]
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(shares, own, group=self.group)
        merged, *others = (_unstacked(share) for share in shares)
        for other in others:
            merged = merge(merged, other)
        return merged

    def check_tokens(self, targets: Tensor, pairs: Pairs) -> None:
        """Raise MaskError unless all processes score the same tokens on the same rows: a head that is sharded for
        data parallelism, whose processes have a batch each, would give numbers that mean nothing.

        targets: of the rows that are scored. pairs: the active ones. Sums of both are exchanged.
        """
        places = torch.arange(1, targets.numel() + 1, device=targets.device)
        sizes = [targets.new_tensor(targets.numel()), targets.new_tensor(pairs.num_pairs)]
        own = torch.stack([*sizes, (targets * places).sum(), pairs.ids.sum(dtype=torch.int64)])
        others = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(others, own, group=self.group)
        if any(not torch.equal(other, own) for other in others):
            raise MaskError(
                f"vocab_parallel: the processes of the group score other tokens ({own[0]} rows and {own[1]} ids here); "
                "each must have the whole batch. Gather a weight that is sharded over data-parallel processes first"
            )

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over the processes, in place."""
        dist.all_reduce(values, group=self.group)
        return values


def local_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_parallel: VocabParallel | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabParallel | None]:
    """This process's part of tensors that may be DTensors, and how the head is spread."""
    if not any(hasattr(tensor, "device_mesh") for tensor in (hidden, weight, bias)):
        return hidden, weight, bias, vocab_parallel
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if isinstance(hidden, DTensor):
        if not all(isinstance(placement, Replicate) for placement in hidden.placements):
            raise ValueError(f"hidden: must be whole on every process, got a DTensor placed as {hidden.placements}")
        hidden = hidden.to_local()
    if not isinstance(weight, DTensor):
        return hidden, weight, bias, vocab_parallel
    if vocab_parallel is not None:
        raise ValueError("vocab_parallel: the weight is a DTensor, which says itself how it is spread; leave it out")
    placements, mesh, vocab_size = weight.placements, weight.device_mesh, weight.shape[0]
    if isinstance(bias, DTensor):
        if bias.placements != placements:
            raise ValueError(f"bias: placed as {bias.placements}, the weight as {placements}; spread both alike")
        bias = bias.to_local()
    local: Tensor = weight.to_local()
    if all(isinstance(placement, Replicate) for placement in placements):
        return hidden, local, bias, None
    if mesh.ndim != 1 or placements != (Shard(0),):
        raise ValueError(f"weight: must be sharded by rows over a mesh of one dimension, got {placements} over {mesh}")
    return hidden, local, bias, VocabParallel(group=mesh.get_group(), vocab_size=vocab_size)


def _unstacked(share: Tensor) -> RowStats:
    peak, total, weighted, target = share.unbind(1)
    return RowStats(peak, total.double(), weighted.double(), target)
