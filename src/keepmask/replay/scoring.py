"""Scores out of logits and gradients back to them, for the rows of a `Plan`, wherever the logits come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keepmask.head.form import PairTransforms
from keepmask.head.pair_rows import member_logprobs, pair_gradient, row_sums
from keepmask.head.pairs import places_in
from keepmask.replay.full import full_backward, full_stats
from keepmask.replay.parallel import VocabParallel
from keepmask.replay.plan import Plan
from keepmask.replay.row_scores import RowStats, divergence, divergence_gradient, finish, members_gradient
from keepmask.replay.scores import RowStatus
from keepmask.replay.source import LogitSource
from keepmask.replay.support import Active, Support
from keepmask.replay.transforms import TokenTransforms

__all__ = ["Entropy", "Job", "ScoreGradients", "ScoreTensors", "score", "send_back"]

Entropy = Literal["none", "value", "grad"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """What to score: T tokens, N pairs, of which A rows and M pairs are active."""

    support: Support
    targets: Tensor
    """[T] int64."""
    plan: Plan
    transforms: TokenTransforms | None = None
    entropy: Entropy = "none"
    ref_member_logprobs: Tensor | None = None
    """[N]."""
    members: bool = True
    jacobian: bool = False
    """Whether the derivative of the log-probabilities by the hidden states will be of use."""
    full_log_normalizer: bool = False
    vocab_parallel: VocabParallel | None = None

    def share(self) -> tuple[Active, Tensor]:
        """The active pairs that this process holds the head rows of, and [A] the pair of each target, -1 where it is
        not among them; found once for all passes over a batch."""
        active, parallel = self.plan.active, self.vocab_parallel
        if parallel is None:
            return active, self.plan.positions

        def restricted() -> tuple[Active, Tensor]:
            targets = self.targets[active.pairs.rows]
            parallel.check_tokens(torch.cat([targets, self.targets[self.plan.full_rows]]), active.pairs)
            pairs, numbers = active.pairs.restrict(parallel.ids)
            places, inside = places_in(targets, parallel.ids)
            return Active(pairs, active.numbers[numbers]), pairs.positions(torch.where(inside, places, -1))

        return self.support.remember("share", (self.plan, parallel.ids), restricted)

    def pair_transforms(self, share: Active) -> PairTransforms:
        """The transforms of the pairs of `share`; found once for all passes over a batch."""
        transforms, rows = self.transforms, self.plan.active.pairs.rows
        if transforms is None:
            return PairTransforms()

        def found() -> PairTransforms:
            transforms.check(torch.cat([rows, self.plan.full_rows]))
            return transforms.select(rows).at(share.pairs.index, self.support.ids[share.numbers])

        ids = None if self.vocab_parallel is None else self.vocab_parallel.ids
        return self.support.remember("pair_transforms", (self.plan, ids, transforms, *transforms.tensors), found)


class ScoreTensors(NamedTuple):
    """What `SupportScores` holds, by the same names, except for the row status."""

    logprobs: Tensor
    entropy: Tensor | None
    kl: Tensor | None
    member_logprobs: Tensor | None
    log_normalizer: Tensor
    full_log_normalizer: Tensor | None


class Kept(NamedTuple):
    """What `send_back` needs of the forward pass."""

    logits: Tensor
    """[M], raw."""
    logprobs: Tensor
    """[M], of the members."""
    entropy: Tensor
    """[A]."""
    kl: Tensor | None
    """[A]."""
    full_entropy: Tensor
    """[F]."""
    full_log_normalizer: Tensor
    """[F], of the rows scored on the whole vocabulary."""
    jacobian: Tensor | None
    """[A, E], of the targets' log-probabilities by the hidden states, where it came with the forward pass."""


class ScoreGradients(NamedTuple):
    """Gradients of the differentiable scores; None where there is none."""

    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None
    member_logprobs: Tensor | None


def score(source: LogitSource, job: Job) -> tuple[ScoreTensors, Kept]:
    """Score the rows of the plan."""
    plan, (share, positions) = job.plan, job.share()
    pairs, numbers = share
    rows, index, offsets = pairs.rows, pairs.index, pairs.offsets
    logits, z, own, jacobian = source.score_pairs(pairs, positions, job.pair_transforms(share), jacobian=job.jacobian)
    stats = _merged(RowStats(*own), job)
    scores = finish(stats)
    logprobs = member_logprobs(z, index, offsets, stats.peak, scores.log_total, impl=source.row_impl)
    kl = None
    if job.ref_member_logprobs is not None:
        reference = job.ref_member_logprobs[numbers]
        kl = _summed(row_sums(divergence(logprobs, reference), offsets), job).to(source.dtype)
    full = finish(_full_stats(source, job, plan.full_rows))

    num_rows = job.targets.numel()
    full_rows = plan.full_rows
    tensors = ScoreTensors(
        logprobs=_spread(num_rows, 0.0, (rows, scores.logprobs), (full_rows, full.logprobs)),
        entropy=None
        if job.entropy == "none"
        else _spread(num_rows, 0.0, (rows, scores.entropy), (full_rows, full.entropy)),
        kl=None if kl is None else _spread(num_rows, 0.0, (rows, kl)),
        member_logprobs=_summed(_spread(job.support.num_pairs, 0.0, (numbers, logprobs)), job) if job.members else None,
        log_normalizer=_spread(num_rows, torch.nan, (rows, scores.log_normalizer), (full_rows, full.log_normalizer)),
        full_log_normalizer=None,
    )
    if job.full_log_normalizer:
        tensors = _with_full_log_normalizer(tensors, source, job)
    kept = Kept(logits, logprobs, scores.entropy, kl, full.entropy, full.log_normalizer, jacobian)
    return tensors, kept


def send_back(source: LogitSource, job: Job, kept: Kept, gradients: ScoreGradients) -> None:
    """Send the gradients of the scores back to the logits of `source`."""
    plan, (share, positions) = job.plan, job.share()
    pairs, numbers = share
    rows, index = pairs.rows, pairs.index
    grad = pair_gradient(
        kept.logprobs,
        index,
        pairs.offsets,
        positions,
        None if gradients.logprobs is None else gradients.logprobs[rows],
        None if gradients.entropy is None else (gradients.entropy[rows], kept.entropy),
        impl=source.row_impl,
    )
    if gradients.kl is not None and kept.kl is not None and job.ref_member_logprobs is not None:
        weights, reference = gradients.kl[rows], job.ref_member_logprobs[numbers]
        grad += divergence_gradient(kept.logprobs, reference, weights[index], kept.kl[index])
    if gradients.member_logprobs is not None:
        weights = gradients.member_logprobs[numbers]
        sums = _summed(row_sums(weights, pairs.offsets), job).to(grad.dtype)
        grad += members_gradient(kept.logprobs, weights, sums[index])
    slope = job.pair_transforms(share).slope(kept.logits)
    grad = grad if slope is None else (grad * slope).to(source.dtype)
    by_row = None
    if kept.jacobian is not None and gradients.logprobs is not None and not any(g is not None for g in gradients[1:]):
        by_row = (gradients.logprobs[rows], kept.jacobian)
    source.backward_pairs(pairs, kept.logits, grad, by_row)
    full_rows = plan.full_rows
    if full_rows.numel() and (gradients.logprobs is not None or gradients.entropy is not None):
        full_backward(
            source,
            full_rows,
            job.targets[full_rows],
            job.transforms,
            log_normalizer=kept.full_log_normalizer,
            for_targets=None if gradients.logprobs is None else gradients.logprobs[full_rows],
            for_entropy=None if gradients.entropy is None else (gradients.entropy[full_rows], kept.full_entropy),
        )


def _full_stats(source: LogitSource, job: Job, rows: Tensor) -> RowStats:
    if not rows.numel():
        nothing = torch.zeros(0, dtype=source.dtype, device=rows.device)
        return RowStats(nothing, nothing, nothing, nothing)
    return _merged(full_stats(source, rows, job.targets[rows], job.transforms), job)


def _with_full_log_normalizer(tensors: ScoreTensors, source: LogitSource, job: Job) -> ScoreTensors:
    status = job.plan.status
    scored = (status == RowStatus.SUPPORT) | (status == RowStatus.SINGLETON) | (status == RowStatus.FULL)
    rows = scored.nonzero()[:, 0]
    stats = _full_stats(source, job, rows)
    full = _spread(job.targets.numel(), torch.nan, (rows, finish(stats).log_normalizer))
    target = _spread(job.targets.numel(), torch.nan, (rows, stats.target))
    # The normaliser of a row of one id is the logit of that id, which the pass over the vocabulary has just met.
    own = torch.where(status == RowStatus.SINGLETON, target, tensors.log_normalizer)
    return tensors._replace(log_normalizer=own, full_log_normalizer=full)


def _merged(stats: RowStats, job: Job) -> RowStats:
    return stats if job.vocab_parallel is None else job.vocab_parallel.merge(stats)


def _summed(values: Tensor, job: Job) -> Tensor:
    return values if job.vocab_parallel is None else job.vocab_parallel.sum(values)


def _spread(size: int, default: float, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """[size]: `values` at `places` for each part, `default` elsewhere."""
    values = parts[0][1]
    result = torch.full((size,), default, dtype=values.dtype, device=values.device)
    for places, values in parts:
        result[places] = values
    return result
