"""`measure`: every implementation on every workload, in turn, again and again until the time is up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from keepmask.bench.engines import PEERS, Peer
from keepmask.bench.ours import VARIANTS, Ours, Timing
from keepmask.bench.workload import Workload

__all__ = ["Measured", "measure"]

_TRANSFORMERS_AT = 64  # requests: the one size plain `generate` is measured at


@dataclass(slots=True)
class Measured:
    """What the rounds gave for one workload. Entry i of each list is round i."""

    ours: dict[str, list[Timing]] = field(default_factory=lambda: defaultdict(list))
    """By variant."""
    peers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds, by the peer's variant."""
    last_s: float = 0.0
    """How long the latest round took."""


def measure(
    ours: Ours,
    peers: Sequence[Peer],
    workloads: Sequence[Workload],
    *,
    seconds: float,
    rounds: int,
    on_progress: Callable[[str], None] = lambda _what: None,
) -> dict[Workload, Measured]:
    """At least one round over all workloads, then as many of their measurements as fit.

    In a round the implementations take turns at each workload, on the same prompts, which are new in every round.
    """
    found = {workload: Measured() for workload in workloads}
    start = time.perf_counter()
    warm = Workload(requests=2, prompt=workloads[0].prompt, output=min(8, workloads[0].output))
    for run in _runs(ours, peers, warm, 0, Measured()):
        run()
    for number in range(rounds):
        for workload, measured in found.items():
            begin = time.perf_counter()
            if number and begin - start + measured.last_s > seconds:
                continue
            on_progress(f"round {number + 1}: {workload.label}")
            for run in _runs(ours, peers, workload, number + 1, measured):
                run()
            measured.last_s = time.perf_counter() - begin
    return found


def _runs(
    ours: Ours, peers: Sequence[Peer], workload: Workload, seed: int, measured: Measured
) -> Iterator[Callable[[], None]]:
    """One run of each implementation."""
    prompts = workload.prompts(ours.vocab_size, seed=seed)
    for variant, asks in VARIANTS.items():
        yield lambda: measured.ours[variant].append(ours.run(workload, prompts, asks))  # noqa: B023
    for peer in peers:
        if peer.name == "transformers" and workload.requests != _TRANSFORMERS_AT:
            continue
        for variant, sampling in PEERS[peer.name].items():
            yield lambda: measured.peers[variant].append(peer.run(workload, prompts, sampling))  # noqa: B023
