"""Random questions about supports, put to a server by `keepmask.conform`'s way of forcing a distribution on it.

The right answer is the oracle's. Without ties no answer changes while each logit is off by `MARGIN` nats; with ties
none while ids that are tied are off together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import oracle
from keepmask.conform.json_client import JsonClient
from keepmask.conform.mask_routes import SglangRoute, VllmRoute
from keepmask.conform.outcome import Observation
from keepmask.conform.over_http import PROMPT, HttpTarget
from keepmask.conform.probes import MARGIN, Probe, Support
from keepmask.params import SamplingParams

__all__ = ["PROFILE", "forced", "seen_on"]

PROFILE = {"vllm": "vllm", "sglang": "sglang-torch"}
_ROUTE = {"vllm": VllmRoute, "sglang": SglangRoute}
_VOCAB_SIZE = 64
_LEVEL = 70.0
_NUM_SHIFTS = 64


def forced(peer: str, number: int, *, seed: int = 0) -> Iterator[Probe]:
    """So many probes: filters alone and together, with and without ties, after bans, biases and penalties.

    They expect the same under every profile, which is what the peer's own says.
    """
    rng = np.random.default_rng(seed)
    while number:
        probe = _random(rng, peer, number)
        expected = _answer(probe, PROFILE[peer])
        if peer == "vllm" and _lost_by_vllm(probe, expected):
            continue
        if expected != "all" and all(_answer(probe, PROFILE[peer], off) == expected for off in _shifts(rng, probe)):
            yield replace(probe, vllm=expected)
            number -= 1


def seen_on(peer: str, url: str, probes: Iterable[Probe]) -> list[Observation]:
    """What the server at this address answers to each."""
    with JsonClient(url, timeout_s=300) as client:
        target = HttpTarget(url, _ROUTE[peer](client, PROMPT))
        return [target.observe(probe) for probe in probes]


def _random(rng: np.random.Generator, peer: str, number: int) -> Probe:
    size = int(rng.integers(3, 9))
    exact = number % 2 == 0
    weights = np.sort(rng.exponential(size=size) + 0.05)[::-1]
    if exact:
        start = int(rng.integers(0, size - 1))
        weights[start : start + int(rng.integers(2, 5))] = weights[start]
    weights = np.sort(weights)[::-1]
    params: dict[str, Any] = {}
    if rng.random() < 0.6:
        params["top_k"] = int(rng.integers(1, size + 2))
    if rng.random() < 0.6:
        params["top_p"] = round(float(rng.uniform(0.2, 0.97)), 3)
    if rng.random() < 0.4:
        params["min_p"] = round(float(rng.uniform(0.05, 0.9)), 3)
    if rng.random() < 0.4:
        params["temperature"] = round(float(rng.uniform(0.5, 2)), 2)
    change, prompt = _change(rng, peer, size)
    return Probe(
        name=f"forced_{number}",
        rule="",
        wanted=tuple((weights / weights.sum()).tolist()),
        params=params | change,
        vllm=(),
        prompt=prompt,
        exact=exact,
    )


def _change(rng: np.random.Generator, peer: str, size: int) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """A ban, bias or penalty, and the slots in the prompt; one in two questions has one."""
    slot = int(rng.integers(0, size))
    others = tuple(sorted(rng.permutation(size)[: max(1, size - 1)].tolist()))
    choices: list[tuple[Mapping[str, Any], tuple[int, ...]]] = [
        ({"logit_bias": {slot: round(float(rng.uniform(-2, 2)), 2)}}, ()),
        ({"stop_token_ids": (slot,), "min_tokens": 1}, ()),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, (slot,)),  # of a prompt, which does not count
    ]
    if peer == "vllm":  # SGLang has no such list, and its repetition penalty does not see the prompt
        choices += [({"allowed_token_ids": others}, ()), ({"repetition_penalty": 1.01}, (slot,))]
    return choices[int(rng.integers(len(choices)))] if rng.random() < 0.5 else ({}, ())


def _shifts(rng: np.random.Generator, probe: Probe) -> Iterator[np.ndarray]:
    """What each logit is off by: tied ones by the same where the question hangs on ties."""
    _, group = np.unique(probe.wanted, return_inverse=True)
    for _ in range(_NUM_SHIFTS):
        signs = rng.choice((-MARGIN, MARGIN), size=len(probe.wanted))
        yield signs[group] if probe.exact else signs


def _lost_by_vllm(probe: Probe, expected: Support) -> bool:
    """Whether vLLM 0.32 is known to answer otherwise (docs/conform.md): where bans or min-p leave a few ids, its top-k
    and top-p lose the least likely of them."""
    cuts = {"top_k", "top_p"} & set(probe.params)
    params = {name: value for name, value in probe.params.items() if name not in cuts} | {"top_k": 0}
    left = _step(replace(probe, params=params), "vllm")
    if not cuts or left.support is None or expected == "all":
        return False
    z = left.logits[left.ids]
    lowest = _slots(probe, left.ids[z == z.min()].tolist())
    return bool(set(lowest) & set(expected))


def _answer(probe: Probe, profile: str, off: float | np.ndarray = 0.0) -> Support:
    step = _step(probe, profile, off)
    return "all" if step.support is None else _slots(probe, step.support.tolist())


def _step(probe: Probe, profile: str, off: float | np.ndarray = 0.0) -> oracle.Step:
    ids = _ids(probe)
    row = np.full(_VOCAB_SIZE, 0, np.float32)
    logits = np.log(np.asarray(probe.wanted)) + off
    row[ids] = _LEVEL + logits - logits.max()  # the largest bias is the level; repetition penalties depend on it
    return oracle.step(
        row,
        SamplingParams(**probe.params_for(ids)),
        [1, *(ids[slot] for slot in probe.prompt)],
        [],
        seed=0,
        semantics=profile,
        eos_token_ids=[],
    )


def _ids(probe: Probe) -> list[int]:
    return [3 + 2 * slot for slot in range(len(probe.wanted))]


def _slots(probe: Probe, token_ids: list[int]) -> tuple[int, ...]:
    return tuple(slot for slot, token_id in enumerate(_ids(probe)) if token_id in token_ids)
