"""Scores on the whole vocabulary, for the few rows that need them: block by block, never [T, V]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from keepmask.head.pair_rows import NEGLIGIBLE, probabilities
from keepmask.head.pairs import places_in
from keepmask.replay.row_scores import RowStats, merge
from keepmask.replay.source import BLOCK_FLOATS, Block, LogitSource
from keepmask.replay.transforms import TokenTransforms

__all__ = ["full_backward", "full_stats"]


def full_stats(source: LogitSource, rows: Tensor, targets: Tensor, transforms: TokenTransforms | None) -> RowStats:
    """What the ids of `source` say about R rows whose support is the whole vocabulary.

    rows: [R] int64, numbers of tokens. targets: [R] int64, the target of each of these rows. transforms: of all tokens.
    """
    peak = torch.full(rows.shape, -torch.inf, dtype=source.dtype, device=rows.device)
    target = torch.zeros_like(peak)
    total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    weighted = torch.zeros_like(total)
    for block in source.blocks():
        for part in _parts(rows.numel(), block):
            z = _transformed(block, rows[part], transforms)[1]
            new = _block_stats(z, block.ids, targets[part])
            old = RowStats(peak[part], total[part], weighted[part], target[part])
            peak[part], total[part], weighted[part], target[part] = merge(old, new)
    return RowStats(peak, total, weighted, target)


def full_backward(
    source: LogitSource,
    rows: Tensor,
    targets: Tensor,
    transforms: TokenTransforms | None,
    *,
    log_normalizer: Tensor,
    for_targets: Tensor | None,
    for_entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Send the gradient of the scores of these rows back to `source`, forming its logits once more.

    log_normalizer: [R]. for_targets: [R] weights of the targets' log-probabilities. for_entropy: [R] weights and
    values of the entropies.
    """
    for block in source.blocks():
        for part in _parts(rows.numel(), block):
            chosen = rows[part]
            logits, z = _transformed(block, chosen, transforms)
            logprobs = z - log_normalizer[part, None]
            grad = torch.zeros_like(z)
            if for_targets is not None:
                grad -= for_targets[part, None]
            if for_entropy is not None:
                weights, values = for_entropy
                # A logit of -inf has p = 0 and contributes nothing; 0 * inf must not be formed.
                grad -= weights[part, None] * (logprobs.clamp(min=NEGLIGIBLE) + values[part, None])
            grad *= probabilities(logprobs)
            if for_targets is not None:
                columns, inside = places_in(targets[part], block.ids)
                hit = torch.where(inside, for_targets[part], 0.0)
                grad.scatter_add_(1, columns[:, None], hit[:, None])
            slope = None
            if transforms is not None:
                slope = transforms.select(chosen).dense(block.ids).slope(logits)
            block.backward(chosen, logits, grad if slope is None else grad * slope)


def _transformed(block: Block, rows: Tensor, transforms: TokenTransforms | None) -> tuple[Tensor, Tensor]:
    logits = block.logits(rows)
    if transforms is None:
        return logits, logits
    return logits, transforms.select(rows).dense(block.ids).apply(logits)


def _block_stats(z: Tensor, ids: range, targets: Tensor) -> RowStats:
    peak = z.amax(1)
    centred = (z - torch.where(peak > -torch.inf, peak, 0.0)[:, None]).clamp_(min=NEGLIGIBLE)
    weights = probabilities(centred)
    columns, inside = places_in(targets, ids)
    weighted = weights * centred
    return RowStats(
        peak=peak,
        total=weights.sum(1, dtype=torch.float64),
        weighted=weighted.sum(1, dtype=torch.float64),
        target=torch.where(inside, z.gather(1, columns[:, None])[:, 0], 0.0),
    )


def _parts(num_rows: int, block: Block) -> Iterator[slice]:
    """Slices of the rows, few enough at a time for the memory of their logits in this block."""
    step = max(1, BLOCK_FLOATS // max(1, len(block.ids)))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
