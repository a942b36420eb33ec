"""`measure_mismatch`: how far the trainer's log-probabilities are from the engine's, with and without replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.errors import MaskError
from keepmask.outputs import Rollout

__all__ = ["Mismatch", "TokenMismatch", "measure_mismatch"]

_MAX_LISTED = 8
_OUTSIDE = 0.1  # a ratio below 1 - 0.1 or above 1 + 0.1 counts as outside

Floats = NDArray[np.float64]


class TokenMismatch(NamedTuple):
    """One token of a `Mismatch`: where it is, and its log-probabilities in nats."""

    rollout: int
    """Index of its rollout in the sequence that was measured."""
    position: int
    """Output position within the rollout."""
    token_id: int
    rollout_logprob: float
    policy_logprob: float
    policy_full_logprob: float | None
    support_size: int | None
    """Ids in its row; None where the rollout has no mask, or where the width of a whole-vocabulary row is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Flat arrays over the T measured tokens of all rollouts. Ratios are policy / rollout, in float64.

    ratio_replayed = exp(policy_logprobs - rollout_logprobs): both normalised over the support.
    ratio_full = exp(policy_full_logprobs - rollout_logprobs): the policy over the whole vocabulary, which is what a
    trainer without the mask computes. With the engine's weights the first is 1 and the second is the kept mass.
    """

    rollout: NDArray[np.int64]
    """[T], index of the rollout each token is from."""
    position: NDArray[np.int64]
    """[T], output position within the rollout."""
    token_ids: NDArray[np.int64]
    rollout_logprobs: Floats
    policy_logprobs: Floats
    """[T], on the support (replayed)."""
    policy_full_logprobs: Floats | None
    """[T], over the whole vocabulary, temperature applied; None where not scored."""
    kept_mass: Floats | None
    """[T], the policy's probability of the support, exp(log-normaliser on the support - log-normaliser over V)."""
    support_sizes: NDArray[np.int64] | None
    """[T], ids in each row; -1 for a whole-vocabulary row of unknown width; None without masks."""

    def __len__(self) -> int:
        """Number of measured tokens."""
        return self.token_ids.size

    @property
    def log_ratio_replayed(self) -> Floats:
        """[T], policy_logprobs - rollout_logprobs, in nats."""
        return self.policy_logprobs - self.rollout_logprobs

    @property
    def log_ratio_full(self) -> Floats | None:
        """[T], policy_full_logprobs - rollout_logprobs, in nats; None where the full scores are absent."""
        return None if self.policy_full_logprobs is None else self.policy_full_logprobs - self.rollout_logprobs

    @property
    def ratio_replayed(self) -> Floats:
        """[T], exp(log_ratio_replayed)."""
        return np.exp(self.log_ratio_replayed)

    @property
    def ratio_full(self) -> Floats | None:
        """[T], exp(log_ratio_full); None where the full scores are absent."""
        log_ratio = self.log_ratio_full
        return None if log_ratio is None else np.exp(log_ratio)

    @property
    def logprob_diff(self) -> Floats:
        """[T], |policy_logprobs - rollout_logprobs|, in nats."""
        return np.abs(self.log_ratio_replayed)

    def table(self) -> dict[str, float]:
        """The numbers of a report by name. What could not be measured (full scores, masks) has no entry.

        *_outside_0.1: share of tokens whose ratio is outside [0.9, 1.1]. logprob_diff_*: |replayed - rollout|, nats.
        support_size_*: over the rows of known width. support_singleton_share: share of rows with one id.
        kept_mass_mean: mean probability the policy gives to the support; mass_outside_mean is its complement.
        """
        if not len(self):
            return {"num_tokens": 0}
        table = _ratio_entries("replayed", self.log_ratio_replayed)
        if (log_ratio_full := self.log_ratio_full) is not None:
            table = _ratio_entries("full", log_ratio_full) | table
        diff = self.logprob_diff
        table |= {"logprob_diff_max": float(diff.max()), "logprob_diff_mean": float(diff.mean())}
        if self.kept_mass is not None:
            kept = float(self.kept_mass.mean())
            table |= {"kept_mass_mean": kept, "mass_outside_mean": 1 - kept}
        return table | self._size_entries() | {"num_tokens": len(self)}

    def worst(self, num_tokens: int = 20) -> list[TokenMismatch]:
        """The tokens with the largest |policy_logprobs - rollout_logprobs|, largest first."""
        order = np.argsort(-self.logprob_diff, kind="stable")[:num_tokens]
        return [self._token(t) for t in order.tolist()]

    def _token(self, t: int) -> TokenMismatch:
        size = None if self.support_sizes is None else int(self.support_sizes[t])
        return TokenMismatch(
            rollout=int(self.rollout[t]),
            position=int(self.position[t]),
            token_id=int(self.token_ids[t]),
            rollout_logprob=float(self.rollout_logprobs[t]),
            policy_logprob=float(self.policy_logprobs[t]),
            policy_full_logprob=None if self.policy_full_logprobs is None else float(self.policy_full_logprobs[t]),
            support_size=None if size == -1 else size,
        )

    def _size_entries(self) -> dict[str, float]:
        if self.support_sizes is None:
            return {}
        known = self.support_sizes[self.support_sizes >= 0]
        entries: dict[str, float] = {"num_rows_of_unknown_width": int(self.support_sizes.size - known.size)}
        if known.size:
            entries |= {
                "support_size_mean": float(known.mean()),
                "support_size_median": float(np.median(known)),
                "support_size_p99": float(np.percentile(known, 99)),
                "support_singleton_share": float((known == 1).mean()),
            }
        return entries


def measure_mismatch(
    rollouts: Sequence[Rollout],
    policy_logprobs: Sequence[ArrayLike] | None = None,
    policy_full_logprobs: Sequence[ArrayLike] | None = None,
    *,
    kept_mass: Sequence[ArrayLike] | None = None,
    loss_masks: Sequence[ArrayLike] | None = None,
    vocab_size: int | None = None,
) -> Mismatch:
    """Compare the engine's log-probabilities with a policy's, token by token. R rollouts, of T_i tokens each.

    policy_logprobs: R arrays [T_i], nats, on the support; by default each rollout's own `policy_logprobs`.
    policy_full_logprobs: the same over the whole vocabulary, under the same temperature, bias and penalties; by default
    each rollout's own `policy_full_logprobs`, left out of the result unless every rollout has it.
    kept_mass: R arrays [T_i], the policy's probability of each support; by default exp(full - replayed), which equals
    it exactly, since both score the same token and differ by their log-normalisers alone.
    loss_masks: R arrays [T_i]; tokens where it is 0 are left out. vocab_size: the width of a whole-vocabulary row.

    Raises MaskError when a rollout has no `logprobs`, when lengths differ, or when a measured value is not finite.
    """
    turns = [index for index, rollout in enumerate(rollouts) if isinstance(rollout, Sequence)]
    _refuse("rollouts: give the turns of a dialogue one by one; a list stands in place of", turns, str)
    kept = [np.ones(len(rollout.token_ids), np.bool_) for rollout in rollouts]
    if loss_masks is not None:
        kept = [part != 0 for part in _per_token("loss_masks", rollouts, loss_masks, kept)]
    if policy_logprobs is None:
        replayed = _flat("policy_logprobs", rollouts, [rollout.policy_logprobs for rollout in rollouts], kept)
    else:
        replayed = _flat("policy_logprobs", rollouts, policy_logprobs, kept)
    full_scores = _full_scores(rollouts, policy_full_logprobs)
    full = None if full_scores is None else _flat("policy_full_logprobs", rollouts, full_scores, kept)
    mass = None if kept_mass is None else _flat("kept_mass", rollouts, kept_mass, kept)
    if mass is None and full is not None:
        mass = np.exp(full - replayed)  # log p_V(a) - log p_S(a) = lse_S - lse_V, whatever the drawn token a
    rows = [np.flatnonzero(part) for part in kept]
    tokens = [rollout.token_ids[row] for rollout, row in zip(rollouts, rows, strict=True)]
    return Mismatch(
        rollout=np.repeat(np.arange(len(rollouts)), [row.size for row in rows]),
        position=_joined(rows, np.int64),
        token_ids=_joined(tokens, np.int64),
        rollout_logprobs=_flat("logprobs", rollouts, [rollout.logprobs for rollout in rollouts], kept),
        policy_logprobs=replayed,
        policy_full_logprobs=full,
        kept_mass=mass,
        support_sizes=_support_sizes(rollouts, kept, vocab_size),
    )


def _ratio_entries(name: str, log_ratio: Floats) -> dict[str, float]:
    ratio = np.exp(log_ratio)
    return {
        f"ratio_{name}_mean": float(ratio.mean()),
        f"ratio_{name}_median": float(np.median(ratio)),
        f"ratio_{name}_outside_0.1": float(((ratio < 1 - _OUTSIDE) | (ratio > 1 + _OUTSIDE)).mean()),
        f"log_ratio_{name}_mean": float(log_ratio.mean()),
    }


def _full_scores(
    rollouts: Sequence[Rollout], policy_full_logprobs: Sequence[ArrayLike] | None
) -> Sequence[ArrayLike] | None:
    if policy_full_logprobs is not None:
        return policy_full_logprobs
    own = [rollout.policy_full_logprobs for rollout in rollouts]
    present = [scores for scores in own if scores is not None]
    return present if present and len(present) == len(own) else None


def _per_token(
    name: str, rollouts: Sequence[Rollout], values: Sequence[Any], kept: list[NDArray[np.bool_]]
) -> list[Floats]:
    """One float64 array [T_i] a rollout; refuses missing arrays, other lengths, and non-finite values where kept."""
    if len(values) != len(rollouts):
        raise MaskError(f"{name}: {len(values)} arrays for {len(rollouts)} rollouts; each rollout has its own")
    absent = [index for index, value in enumerate(values) if value is None]
    _refuse(f"{name}: needed for every rollout, absent in", absent, str)
    parts = [_float64(name, index, value) for index, value in enumerate(values)]
    wrong = [index for index, part in enumerate(parts) if part.shape != rollouts[index].token_ids.shape]
    _refuse(
        f"{name}: needs one value a generated token; other shapes in",
        wrong,
        lambda index: f"{index} ({list(parts[index].shape)} for {list(rollouts[index].token_ids.shape)})",
    )
    bad = [index for index, part in enumerate(parts) if not np.isfinite(part[kept[index]]).all()]
    _refuse(
        f"{name}: must be finite; not so in",
        bad,
        lambda index: f"{index} (position {np.flatnonzero(~np.isfinite(parts[index]) & kept[index])[0]})",
    )
    return parts


def _float64(name: str, rollout: int, value: Any) -> Floats:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, with a gradient, or of bfloat16
        raise MaskError(
            f"{name}: those of rollout {rollout} cannot be read as an array ({error}); tensors "
            "need .detach().float().cpu()"
        ) from None


def _flat(name: str, rollouts: Sequence[Rollout], values: Sequence[Any], kept: list[NDArray[np.bool_]]) -> Floats:
    parts = _per_token(name, rollouts, values, kept)
    return _joined([part[keep] for part, keep in zip(parts, kept, strict=True)], np.float64)


def _support_sizes(
    rollouts: Sequence[Rollout], kept: list[NDArray[np.bool_]], vocab_size: int | None
) -> NDArray[np.int64] | None:
    masks = [rollout.sampling_mask for rollout in rollouts]
    present = [mask for mask in masks if mask is not None]
    if not present or len(present) != len(masks):
        return None
    wrong = [index for index, mask in enumerate(present) if len(mask) != rollouts[index].token_ids.size]
    _refuse(
        "sampling_mask: needs one row a generated token; other counts in",
        wrong,
        lambda index: f"{index} ({len(present[index])} rows for {rollouts[index].token_ids.size} tokens)",
    )
    sizes = _joined([mask.counts[keep] for mask, keep in zip(present, kept, strict=True)], np.int64)
    return np.where(sizes == 0, -1 if vocab_size is None else vocab_size, sizes)


def _refuse(problem: str, rollouts: list[int], describe: Callable[[int], str]) -> None:
    if rollouts:
        named = ", ".join(describe(index) for index in rollouts[:_MAX_LISTED])
        more = f" and {len(rollouts) - _MAX_LISTED} more" if len(rollouts) > _MAX_LISTED else ""
        raise MaskError(f"{problem} rollout{'s' if len(rollouts) > 1 else ''} {named}{more}")


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
