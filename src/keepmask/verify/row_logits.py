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
_POSITIONS = 32  # whose logits over the whole vocabulary are held at a time
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

    @classmethod
    def of(cls, rows: Sequence[tuple[bool, bool, float]]) -> RuleRows:
        """From one entry a position."""
        equal, tied, logprobs = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(equal=np.array(equal, bool), tied=np.array(tied, bool), logprobs=np.array(logprobs, float))


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
    head, mask, params = Head.of(model), rollout.sampling_mask, _known_params(rollout)
    assert mask is not None
    assert rollout.logprobs is not None
    batch = ReplayBatch.pack([bare(rollout)], vocab_size=head.vocab_size)
    padded = batch.padded()
    hidden = model.base_model(**padded.inputs()).last_hidden_state.flatten(0, 1)[padded.logit_positions]
    rows = np.flatnonzero(mask.counts)
    checked = rows[: 0 if any(rollout.sampling_params.get(name) for name in _BANS) else max_checked]
    z, raw, full = np.zeros(mask.ids.size), np.zeros(len(mask)), np.zeros(len(mask))
    entries: dict[SamplingSemantics, list[tuple[bool, bool, float]]] = {profile: [] for profile in PROFILES}
    for start in range(0, len(mask), _POSITIONS):
        for t, logits in enumerate(head.logits(hidden[start : start + _POSITIONS]).float(), start):
            low, high, token_id = int(mask.offsets[t]), int(mask.offsets[t + 1]), int(rollout.token_ids[t])
            z[low:high] = logits[torch.from_numpy(mask.ids[low:high].astype(np.int64))].numpy()
            raw[t] = logits[token_id].double() - logits.double().logsumexp(0)
            processed = _processed(logits, rollout, t, params)
            full[t] = processed[token_id].double() - processed.double().logsumexp(0)
            if t in checked:
                for profile, row in _rules(processed, mask.ids[low:high], token_id, params, _TIE[model.dtype]).items():
                    entries[profile].append(row)
    return RowLogits(
        rollout=rollout,
        logprobs=rollout.logprobs.astype(np.float64),
        rows=rows,
        z=z,
        raw_logprobs=raw,
        full_logprobs=full,
        rules={profile: RuleRows.of(found) for profile, found in entries.items()},
        checked=checked,
    )


def _known_params(rollout: Rollout) -> SamplingParams:
    given = rollout.sampling_params
    return SamplingParams(**{name: value for name, value in given.items() if name in SamplingParams.model_fields})


def _rules(
    processed: Tensor, given: NDArray[np.int32], token_id: int, params: SamplingParams, tie: float
) -> dict[SamplingSemantics, tuple[bool, bool, float]]:
    """Each profile's row of processed logits [V], against the given one: same, same but for ties, and log-prob."""
    z, ids = torch.sort(processed, descending=True, stable=True)
    found: dict[SamplingSemantics, tuple[bool, bool, float]] = {}
    for profile in PROFILES:
        keep = survivors(z, params, profile)
        differing = torch.from_numpy(np.setxor1d(given, ids[keep].numpy()).astype(np.int64))
        cut = float(z[keep][-1])
        tied = bool(((processed[differing] - cut).abs() <= tie * max(1.0, abs(cut))).all())
        logprobs = z[keep].double().log_softmax(0)[ids[keep] == token_id]
        same = not differing.numel()
        found[profile] = same, tied and not same, float(logprobs[0]) if logprobs.numel() else -np.inf
    return found


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
