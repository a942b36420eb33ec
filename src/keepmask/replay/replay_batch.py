"""`ReplayBatch`: rollouts as flat tensors, the tokens a model reads and the rows that are scored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from keepmask.errors import MaskError
from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.pack import MissingMask, PackedRollouts, pack_rollouts
from keepmask.replay.replay_processors import ReplayProcessor
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms
from keepmask.replay.turns import LogprobsMode
from keepmask.replay.views import PaddedBatch, boundaries, counts_in, pairs_of, scattered, spans_of

__all__ = ["ReplayBatch", "Shard"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayBatch:
    """S sequences packed one after the other: T tokens for the model, and R rows, one for each token the policy drew.

    Row r scores targets[r], which was drawn from support row r, with the logits the model gives at token
    logit_positions[r], the one before it. Tokens that nobody drew (prompts, tool output, what a framework appended,
    padding) have no row, so nothing about them can enter a loss. Rows come in the order of their tokens.
    """

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in each sequence."""
    lengths: tuple[int, ...]
    """S numbers of tokens."""
    row_lengths: tuple[int, ...]
    """S numbers of rows."""
    logit_positions: Tensor
    """[R] int64, into the T tokens."""
    targets: Tensor
    """[R] int64."""
    loss_mask: Tensor
    """[R] bool: False for drawn tokens that are not trained on."""
    support: Support
    """R rows."""
    transforms: TokenTransforms
    """Of R tokens: temperature, logit bias and penalties, as the requests had them."""
    rollout_logprobs: Tensor | None
    """[R] float32: the engine's, in nats, on the support."""
    rollout_member_logprobs: Tensor | None
    """[N] float32: the engine's log-probability of every member of every row; None where not all rollouts have them."""
    versions: tuple[str, ...]
    """The weight versions that drew tokens of this batch, and maybe others."""
    row_versions: Tensor
    """[R] int64: index into `versions`, -1 where unknown."""
    vocab_size: int
    is_shard: bool = False
    """Whether tokens or rows of the sequences are elsewhere (`shard_contiguous`, `shard_zigzag`)."""

    def __post_init__(self) -> None:
        num_tokens, num_rows = sum(self.lengths), sum(self.row_lengths)
        sizes = {
            "input_ids": (self.input_ids.numel(), num_tokens),
            "position_ids": (self.position_ids.numel(), num_tokens),
            "logit_positions": (self.logit_positions.numel(), num_rows),
            "targets": (self.targets.numel(), num_rows),
            "loss_mask": (self.loss_mask.numel(), num_rows),
            "support": (self.support.num_rows, num_rows),
            "transforms": (self.transforms.num_tokens, num_rows),
            "row_versions": (self.row_versions.numel(), num_rows),
        }
        if self.rollout_logprobs is not None:
            sizes["rollout_logprobs"] = (self.rollout_logprobs.numel(), num_rows)
        if self.rollout_member_logprobs is not None:
            sizes["rollout_member_logprobs"] = (self.rollout_member_logprobs.numel(), self.support.num_pairs)
        wrong = [f"{name} has {size}, not {wanted}" for name, (size, wanted) in sizes.items() if size != wanted]
        if wrong:
            raise MaskError(f"tokens and rows must be sharded, padded and selected together: {'; '.join(wrong)}")

    @classmethod
    def pack(
        cls,
        rollouts: Iterable[Any],
        *,
        vocab_size: int,
        appended_token_ids: Sequence[ArrayLike] | None = None,
        loss_masks: Sequence[ArrayLike] | None = None,
        logprobs_mode: LogprobsMode | None = None,
        missing_mask: MissingMask = "error",
        processors: Sequence[ReplayProcessor] = (),
        pad_to_multiple_of: int = 1,
        pad_token_id: int = 0,
    ) -> ReplayBatch:
        """One sequence for each item of `rollouts`, on the CPU.

        rollouts: `keepmask.outputs.Rollout` objects, or anything with its prompt_token_ids, token_ids, sampling_mask,
        logprobs, sampling_params and weight_versions. A sequence of rollouts is one trajectory of several requests,
        each one's prompt continuing the tokens of those before it: turns of a dialogue, or a partial rollout resumed
        under new weights. Penalties count each request's own output. A RequestOutput stands for all its completions.
        vocab_size: V, the width of the LM head.
        appended_token_ids: S lists of tokens that a framework put after the last output, an EOS that was not sampled
        for one. They are read by the model and have no row.
        loss_masks: S arrays, one value a drawn token (of all turns): 0 keeps a row out of the loss.
        logprobs_mode: what the rollouts' logprobs are; processed ones are the rule with a mask. Raw ones are replaced
        by the mask's own where it has them, and otherwise refused.
        missing_mask: what a rollout without a mask means: an error, or draws from the whole vocabulary.
        processors: the custom logits processors the engine had; see `ReplayProcessor`.
        pad_to_multiple_of: pads each sequence with pad_token_id, for sharding.

        Raises MaskError, naming rollouts and positions: a drawn token outside its row; ids outside [0, V); other
        numbers of rows or log-probabilities than tokens; cut masks; log-probabilities that are not those of the
        support; turns that do not continue each other; version spans with gaps; processors that cannot be replayed.
        """
        packed = pack_rollouts(
            rollouts, vocab_size=vocab_size, appended_token_ids=appended_token_ids, loss_masks=loss_masks,
            logprobs_mode=logprobs_mode, missing_mask=missing_mask, processors=processors,
            pad_to_multiple_of=pad_to_multiple_of, pad_token_id=pad_token_id,
        )  # fmt: skip
        logprobs, member_logprobs = packed.rollout_logprobs, packed.mask.logprobs
        input_ids = torch.from_numpy(packed.input_ids)
        return cls(
            input_ids=input_ids,
            position_ids=torch.from_numpy(packed.position_ids),
            lengths=packed.lengths,
            row_lengths=packed.row_lengths,
            logit_positions=torch.from_numpy(packed.logit_positions),
            targets=torch.from_numpy(packed.targets),
            loss_mask=torch.from_numpy(packed.loss_mask),
            support=Support.from_mask(packed.mask),
            transforms=_transforms(packed, input_ids),
            rollout_logprobs=None if logprobs is None else torch.from_numpy(logprobs),
            rollout_member_logprobs=None if member_logprobs is None else torch.tensor(member_logprobs),
            versions=packed.versions,
            row_versions=torch.from_numpy(packed.row_versions),
            vocab_size=vocab_size,
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.numel()

    @property
    def num_rows(self) -> int:
        """R."""
        return self.targets.numel()

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S+1] int32: tokens of sequence s are [cu_seqlens[s], cu_seqlens[s + 1]), as FlashAttention takes them."""
        return boundaries(self.lengths, self.input_ids.device)

    @cached_property
    def row_cu_seqlens(self) -> Tensor:
        """[S+1] int32: the same for rows, as the objectives and ratios take them."""
        return boundaries(self.row_lengths, self.input_ids.device)

    @cached_property
    def row_sequences(self) -> Tensor:
        """[R] int64: the sequence of each row."""
        return self.expand(torch.arange(self.num_sequences, device=self.input_ids.device))

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[R]: the value of each row's sequence, an advantage for one. per_sequence: [S]."""
        if per_sequence.shape != (self.num_sequences,):
            raise MaskError(f"{list(per_sequence.shape)} values for {self.num_sequences} sequences")
        counts = self.row_cu_seqlens.diff().long()
        return torch.repeat_interleave(per_sequence, counts, output_size=self.num_rows)

    def to_tokens(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[T]: each row's value at the token it scores, `fill` at tokens without a row. values: [R]. Differentiable."""
        return scattered(values, self._label_positions(), self.num_tokens, fill)

    def to(self, device: torch.device | str) -> ReplayBatch:
        """The same batch on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor | Support | TokenTransforms)
        }
        return replace(self, **moved)

    def select_rows(self, keep: Tensor) -> ReplayBatch:
        """The batch with these rows only; its tokens stay. keep: [R] bool. Waits for the device that holds `keep`.

        What is left out costs nothing to score: rows with loss mask 0, rows of sequences whose advantage is 0.
        """
        if keep.dtype != torch.bool or keep.shape != (self.num_rows,):
            raise MaskError(f"select_rows: needs [{self.num_rows}] bool, got {list(keep.shape)} {keep.dtype}")
        kept = torch.zeros(self.num_sequences, dtype=torch.int64, device=keep.device)
        kept.index_add_(0, self.row_sequences, keep.long())
        return self._with_rows(keep.nonzero()[:, 0], tuple(kept.tolist()))

    def select_sequences(self, sequences: Sequence[int]) -> ReplayBatch:
        """The batch of these sequences, in this order, with their rows; one may come more than once."""
        bad = [s for s in sequences if not 0 <= s < self.num_sequences]
        if bad:
            raise MaskError(f"select_sequences: {bad[0]} is not one of the {self.num_sequences} sequences")
        starts, row_starts = [0, *accumulate(self.lengths)], [0, *accumulate(self.row_lengths)]
        tokens = spans_of([(starts[s], self.lengths[s]) for s in sequences], self.input_ids.device)
        rows = spans_of([(row_starts[s], self.row_lengths[s]) for s in sequences], self.input_ids.device)
        begins = accumulate((self.lengths[s] for s in sequences), initial=0)
        moves = [begin - starts[s] for begin, s in zip(begins, sequences, strict=False)]
        counts = torch.tensor([self.row_lengths[s] for s in sequences], dtype=torch.int64)
        by_row = torch.repeat_interleave(torch.tensor(moves, dtype=torch.int64), counts).to(rows.device)
        return self._taken(
            tokens,
            rows,
            self.logit_positions[rows] + by_row,
            lengths=tuple(self.lengths[s] for s in sequences),
            row_lengths=tuple(self.row_lengths[s] for s in sequences),
            is_shard=self.is_shard,
        )

    def split(self, max_tokens: int) -> list[ReplayBatch]:
        """Micro-batches of at most `max_tokens` tokens, of whole sequences in their order."""
        long = [s for s, length in enumerate(self.lengths) if length > max_tokens]
        if long:
            raise MaskError(f"max_tokens={max_tokens}: sequence {long[0]} alone has {self.lengths[long[0]]} tokens")
        groups: list[list[int]] = []
        room = 0
        for s, length in enumerate(self.lengths):
            if not groups or length > room:
                groups.append([])
                room = max_tokens
            groups[-1].append(s)
            room -= length
        return [self.select_sequences(group) for group in groups]

    def packed(self) -> dict[str, Any]:
        """What a model of transformers takes to read all sequences in one row: `model.model(**batch.packed())`.

        input_ids and position_ids [1, T], from which attention tells the sequences apart, and no cache: with one, or
        with an attention mask, tokens would see the sequences before theirs. For models whose layers are attention.
        """
        return {"input_ids": self.input_ids[None], "position_ids": self.position_ids[None], "use_cache": False}

    def padded(self, *, pad_token_id: int = 0) -> PaddedBatch:
        """The tokens as [S, L], a sequence a row, padded on the right; the rows are the same."""
        width = max(self.lengths, default=0)
        sequence = torch.repeat_interleave(
            torch.arange(self.num_sequences, device=self.input_ids.device),
            self.cu_seqlens.diff().long(),
            output_size=self.num_tokens,
        )
        place = sequence * width + torch.arange(self.num_tokens, device=sequence.device) - self.cu_seqlens[sequence]
        shape = (self.num_sequences, width)
        size = self.num_sequences * width
        return PaddedBatch(
            input_ids=scattered(self.input_ids, place, size, pad_token_id).view(shape),
            attention_mask=scattered(torch.ones_like(self.input_ids), place, size, 0).view(shape),
            position_ids=scattered(self.position_ids, place, size, 0).view(shape),
            logit_positions=place[self.logit_positions],
            label_positions=place[self._label_positions()],
        )

    def shard_contiguous(self, rank: int, world_size: int) -> Shard:
        """Rank's part of the tokens, T / world_size in one piece, and the rows whose logits are computed there.

        Needs T to be a multiple of world_size (`pad_to_multiple_of`).
        """
        _check_rank(rank, world_size)
        if self.num_tokens % world_size:
            raise MaskError(f"{self.num_tokens} tokens do not split over {world_size} ranks; use pad_to_multiple_of")
        size = self.num_tokens // world_size
        return self._shard([(rank * size, size)])

    def shard_zigzag(self, rank: int, world_size: int) -> Shard:
        """Rank's part of each sequence, and the rows whose logits are computed there.

        Of the sequence's 2 * world_size pieces it is number `rank` and number 2 * world_size - 1 - rank, so that causal
        attention costs every rank the same.

        Needs each sequence's length to be a multiple of 2 * world_size (`pad_to_multiple_of`).
        """
        _check_rank(rank, world_size)
        pieces = 2 * world_size
        uneven = [s for s, length in enumerate(self.lengths) if length % pieces]
        if uneven:
            raise MaskError(
                f"sequence {uneven[0]} of {self.lengths[uneven[0]]} tokens does not split into {pieces} pieces; use "
                f"pad_to_multiple_of={pieces}"
            )
        spans = []
        for start, length in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False):
            size = length // pieces
            spans += [(start + rank * size, size), (start + (pieces - 1 - rank) * size, size)]
        return self._shard(spans)

    def _shard(self, spans: list[tuple[int, int]]) -> Shard:
        device = self.input_ids.device
        tokens = spans_of(spans, device)
        local = torch.full((self.num_tokens,), -1, dtype=torch.int64, device=device)
        local[tokens] = torch.arange(tokens.numel(), device=device)
        rows = (local[self.logit_positions] >= 0).nonzero()[:, 0]
        ends = list(accumulate(self.lengths))
        batch = self._taken(
            tokens,
            rows,
            local[self.logit_positions[rows]],
            lengths=counts_in(tokens, ends),
            row_lengths=counts_in(rows, list(accumulate(self.row_lengths))),
            is_shard=True,
        )
        return Shard(batch, tokens, rows)

    def _taken(
        self,
        tokens: Tensor,
        rows: Tensor,
        logit_positions: Tensor,
        *,
        lengths: tuple[int, ...],
        row_lengths: tuple[int, ...],
        is_shard: bool,
    ) -> ReplayBatch:
        taken = self._row_fields(rows) | {"logit_positions": logit_positions}
        return replace(
            self,
            input_ids=self.input_ids[tokens],
            position_ids=self.position_ids[tokens],
            lengths=lengths,
            row_lengths=row_lengths,
            is_shard=is_shard,
            **taken,
        )

    def _with_rows(self, rows: Tensor, row_lengths: tuple[int, ...]) -> ReplayBatch:
        return replace(self, row_lengths=row_lengths, **self._row_fields(rows))

    def _row_fields(self, rows: Tensor) -> dict[str, Any]:
        logprobs, members = self.rollout_logprobs, self.rollout_member_logprobs
        return {
            "logit_positions": self.logit_positions[rows],
            "targets": self.targets[rows],
            "loss_mask": self.loss_mask[rows],
            "support": self.support.select(rows),
            "transforms": self.transforms.select(rows),
            "rollout_logprobs": None if logprobs is None else logprobs[rows],
            "rollout_member_logprobs": None if members is None else members[pairs_of(self.support, rows)],
            "row_versions": self.row_versions[rows],
        }

    def _label_positions(self) -> Tensor:
        if self.is_shard:
            raise MaskError(
                "this is one shard: the token a row scores may be on another rank; put the rows of all shards together "
                "first (whole[shard.rows] = values)"
            )
        return self.logit_positions + 1


class Shard(NamedTuple):
    """One rank's part of a batch under context parallelism, and where it comes from."""

    batch: ReplayBatch
    tokens: Tensor
    """[T_local] int64: its tokens among those of the whole batch."""
    rows: Tensor
    """[R_local] int64: its rows among those of the whole batch; `whole[shard.rows] = values` puts them back."""


def _transforms(packed: PackedRollouts, input_ids: Tensor) -> TokenTransforms:
    num_rows = packed.targets.size
    params = {name: torch.from_numpy(values) for name, values in packed.params.items()}
    bias, history = None, None
    if packed.bias is not None:
        ids, values, offsets, requests = (torch.tensor(array) for array in packed.bias)
        bias = LogitBias(ids=ids, values=values, offsets=offsets, requests=requests)
    if params.keys() - {"temperature"}:
        starts = np.concatenate([[0], np.cumsum(packed.lengths)]).astype(np.int64)
        sequences = np.repeat(np.arange(len(packed.lengths)), packed.row_lengths)
        history = TokenHistory(
            ids=input_ids,
            offsets=torch.from_numpy(starts),
            sequences=torch.from_numpy(sequences),
            lengths=torch.from_numpy(packed.logit_positions + 1 - starts[sequences]),
            starts=torch.from_numpy(packed.generation_starts),
        )
    return TokenTransforms(num_tokens=num_rows, logit_bias=bias, history=history, **params)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise MaskError(f"rank={rank}: must be in [0, world_size), world_size={world_size}")
