"""`InProcessTarget`: the sampler of this package, on rows of logits made for each probe."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from keepmask.conform.outcome import Observation, observed
from keepmask.conform.probes import Probe
from keepmask.params import SamplingParams, SamplingSemantics
from keepmask.sampling import DenseHead, Sampler, SamplerSpec, SamplingRow

__all__ = ["InProcessTarget"]

_VOCAB_SIZE = 96
_PROMPT_ID, _FIRST_ID, _STRIDE = 1, 5, 7  # slots are ids 5, 12, 19, ...
_LEVEL = 30.0  # the slots' logits are about this far from zero; all others are twice as much lower, e**-60 of the mass


class InProcessTarget:
    """`keepmask.sampling.Sampler` under one profile. impl: which of its implementations."""

    def __init__(
        self, semantics: SamplingSemantics = "vllm", *, impl: Literal["auto", "reference", "fast"] = "auto"
    ) -> None:
        self._semantics = semantics
        self._impl: Literal["auto", "reference", "fast"] = impl

    @property
    def name(self) -> str:
        """The profile and implementation."""
        return f"the sampler in this process, profile {self._semantics}"

    def observe(self, probe: Probe) -> Observation:
        """Draw from the probe's row."""
        ids = [_FIRST_ID + _STRIDE * slot for slot in range(len(probe.wanted))]
        spec = SamplerSpec(
            vocab_size=_VOCAB_SIZE,
            eos_token_ids=() if probe.eos is None else (ids[probe.eos],),
            logprobs_mode="processed_logprobs",
            semantics=self._semantics,
            return_sampling_mask=True,
        )
        sampler = Sampler(spec, impl=self._impl)
        rows = [_open_row(sampler, probe, ids, index) for index in range(probe.num_completions)]
        batch = sampler.sample(DenseHead(_logits(probe, ids)), rows)
        if batch.errors:
            return Observation(status="failed", note=str(next(iter(batch.errors.values()))))
        assert batch.mask is not None
        mask = batch.mask.wait()
        supports = [mask.row(b)[0].tolist() or None for b in range(len(rows))]  # no ids: the whole vocabulary
        return observed(supports, batch.token_ids.tolist(), ids)


def _open_row(sampler: Sampler, probe: Probe, ids: list[int], completion_index: int) -> SamplingRow:
    row = sampler.open_row(
        SamplingParams(**probe.params_for(ids)),
        prompt_token_ids=[_PROMPT_ID, *(ids[slot] for slot in probe.prompt)],
        seed=0,
        completion_index=completion_index,
        bad_words_token_ids=probe.words_for(ids),
    )
    for slot in probe.output:
        row.append(ids[slot])
    return row


def _logits(probe: Probe, ids: list[int]) -> Tensor:
    """[num_completions, V] float32: equal rows."""
    level = -_LEVEL if probe.negative else _LEVEL
    row = np.full(_VOCAB_SIZE, level - 2 * _LEVEL, np.float32)
    row[ids] = level + np.log(probe.wanted)
    return torch.from_numpy(np.tile(row, (probe.num_completions, 1)))
