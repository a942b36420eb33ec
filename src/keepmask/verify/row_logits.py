"""`RowLogits`: a model's logits at the rows of a rollout, enough to recompute its log-probabilities under any rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams, SamplingSemantics
from keepmask.replay.policy_head import Head
from keepmask.replay.replay_batch import ReplayBatch
from keepmask.sampling.semantics import survivors

__all__ = ["PROFILES", "RowLogits", "RuleRows", "bare", "row_logits"]

Floats = NDArray[np.float64]
PROFILES: tuple[SamplingSemantics, ...] = get_args(SamplingSemantics)

_BANS = ("allowed_token_ids", "bad_words", "min_tokens", "thinking_token_budget")
_TIE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""How far apart, relatively, logits may be that a kernel of this type can take for equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRows:
    """What a profile's rules keep of the model's own distribution, at the checked positions."""

    equal: NDArray[np.bool_]
    """Whether the rows are the same."""
    tied: NDArray[np.bool_]
    """Whether they differ by ids that are tied with the last one kept, and by nothing else."""
    logprobs: Floats
    """Of the drawn tokens on the profile's rows; -inf outside."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowLogits:
    """One rollout's T rows, N stored ids, under one model. Rows of the whole vocabulary are left out of `rows`."""

    rollout: Rollout
    logprobs: Floats
    """[T], the engine's."""
    rows: NDArray[np.int64]
    """Positions whose rows hold ids."""
    z: Floats
    """[N], raw logits of the stored ids."""
    raw_logprobs: Floats
    """[T], of the drawn tokens over the whole vocabulary, before any step."""
    full_logprobs: Floats
    """[T], the same after bias, penalties and temperature."""
    rules: Mapping[str, RuleRows]
    """By profile, at `checked`."""
    checked: NDArray[np.int64]

    @cached_property
    def _history(self) -> tuple[Floats, NDArray[np.bool_]]:
        """[N]: how often each stored id is in the output before its row, and whether in prompt or output."""
        rollout, mask = self.rollout, self.rollout.sampling_mask
        assert mask is not None
        seen: dict[int, int] = {}
        prompt = set(rollout.prompt_token_ids.tolist())
        counts, bounds = np.zeros(mask.ids.size), mask.offsets.tolist()
        for t, token_id in enumerate(rollout.token_ids.tolist()):
            for n in range(bounds[t], bounds[t + 1]) if seen else ():
                counts[n] = seen.get(int(mask.ids[n]), 0)
            seen[token_id] = seen.get(token_id, 0) + 1
        inside = np.fromiter((token_id in prompt for token_id in mask.ids.tolist()), np.bool_, mask.ids.size)
        return counts, inside | (counts > 0)

    def predict(self, params: Mapping[str, Any]) -> Floats:
        """[T], log-probabilities of the drawn tokens on their rows, were these the parameters; NaN without a row."""
        mask = self.rollout.sampling_mask
        assert mask is not None
        z = self.z.copy()
        for token_id, bias in (params.get("logit_bias") or {}).items():
            z[mask.ids == int(token_id)] += bias
        penalties = [params.get(f"{name}_penalty") or 0.0 for name in ("repetition", "frequency", "presence")]
        repetition, frequency, presence = penalties[0] or 1.0, penalties[1], penalties[2]
        if repetition != 1 or frequency or presence:
            counts, seen = self._history
            z = np.where(seen, np.where(z > 0, z / repetition, z * repetition), z)
            z -= frequency * counts + presence * (counts > 0)
        temperature = params.get("temperature")
        z /= 1.0 if temperature is None else max(temperature, 1e-5)
        found = np.full(len(mask), np.nan)
        if self.rows.size:
            starts = mask.offsets[:-1][self.rows]
            total = np.logaddexp.reduceat(z, starts)
            row_of = np.repeat(np.arange(len(mask)), mask.counts)
            drawn = np.flatnonzero(mask.ids == self.rollout.token_ids[row_of])
            found[row_of[drawn]] = z[drawn]
            found[self.rows] -= total
        return found


def bare(rollout: Rollout) -> Rollout:
    """The rollout without the engine's numbers, which packing would hold against the mask."""
    mask = rollout.sampling_mask
    plain = None if mask is None else SamplingMask.adopt(mask.ids, mask.offsets)
    return dataclasses.replace(rollout, sampling_mask=plain, logprobs=None)


@torch.inference_mode()
def row_logits(model: Any, rollout: Rollout, *, max_checked: int = 32) -> RowLogits:
    """One forward over the rollout. max_checked: positions whose rows are compared with the profiles' rules."""
    head, mask = Head.of(model), rollout.sampling_mask
    assert mask is not None
    assert rollout.logprobs is not None
    batch = ReplayBatch.pack([bare(rollout)], vocab_size=head.vocab_size)
    padded = batch.padded()
    hidden = model.base_model(**padded.inputs()).last_hidden_state.flatten(0, 1)[padded.logit_positions]
    logits = head.logits(hidden).float()  # [T, V]
    targets = torch.from_numpy(rollout.token_ids.astype(np.int64))
    raw = logits.gather(1, targets[:, None])[:, 0].double() - logits.double().logsumexp(1)
    row_of = np.repeat(np.arange(len(mask)), mask.counts)
    rows = np.flatnonzero(mask.counts)
    params = _known_params(rollout)
    processed = [_processed(logits[t], rollout, t, params) for t in range(len(mask))]
    full = [z[target].double() - z.double().logsumexp(0) for z, target in zip(processed, targets, strict=True)]
    checked = rows[: 0 if any(rollout.sampling_params.get(name) for name in _BANS) else max_checked]
    return RowLogits(
        rollout=rollout,
        logprobs=rollout.logprobs.astype(np.float64),
        rows=rows,
        z=logits[torch.from_numpy(row_of), torch.from_numpy(mask.ids.astype(np.int64))].double().numpy(),
        raw_logprobs=raw.numpy(),
        full_logprobs=torch.stack(full).numpy(),
        rules=_rules(processed, rollout, checked, _TIE[model.dtype]),
        checked=checked,
    )


def _known_params(rollout: Rollout) -> SamplingParams:
    given = rollout.sampling_params
    return SamplingParams(**{name: value for name, value in given.items() if name in SamplingParams.model_fields})


def _rules(
    processed: Sequence[Tensor], rollout: Rollout, checked: NDArray[np.int64], tie: float
) -> dict[str, RuleRows]:
    mask, params = rollout.sampling_mask, _known_params(rollout)
    assert mask is not None
    found: dict[SamplingSemantics, list[tuple[bool, bool, float]]] = {profile: [] for profile in PROFILES}
    for t in checked.tolist():
        z, ids = torch.sort(processed[t], descending=True, stable=True)
        given = set(mask.ids[mask.offsets[t] : mask.offsets[t + 1]].tolist())
        for profile, entries in found.items():
            keep = survivors(z, params, profile)
            kept = ids[keep].tolist()
            cut = float(z[keep][-1])
            differing = torch.isin(ids, torch.tensor(sorted(given.symmetric_difference(kept)), dtype=ids.dtype))
            tied = bool(((z[differing] - cut).abs() <= tie * max(1.0, abs(cut))).all())
            drawn = (ids[keep] == int(rollout.token_ids[t])).nonzero()
            value = float(z[keep].double().log_softmax(0)[drawn[0, 0]]) if len(drawn) else -np.inf
            same = not differing.any()
            entries.append((same, tied and not same, value))
    columns = {profile: tuple(zip(*entries, strict=True)) or ((), (), ()) for profile, entries in found.items()}
    return {
        profile: RuleRows(equal=np.array(equal, bool), tied=np.array(tied, bool), logprobs=np.array(values, float))
        for profile, (equal, tied, values) in columns.items()
    }


def _processed(logits: Tensor, rollout: Rollout, t: int, params: SamplingParams) -> Tensor:
    """[V]: the logits of one position after bias, penalties and temperature."""
    z = logits.clone()
    for token_id, bias in params.logit_bias.items():
        z[token_id] += bias
    output = torch.from_numpy(rollout.token_ids[:t].astype(np.int64))
    prompt = torch.from_numpy(rollout.prompt_token_ids.astype(np.int64))
    seen = torch.unique(torch.cat([prompt, output]))
    z[seen] = torch.where(z[seen] > 0, z[seen] / params.repetition_penalty, z[seen] * params.repetition_penalty)
    ids, counts = torch.unique(output, return_counts=True)
    z[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return z if params.greedy else z / params.temperature
