"""The rows of a run: plain dictionaries, one measurement each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from keepmask.bench.floor import Floor
from keepmask.bench.ours import VARIANTS
from keepmask.bench.peak_memory import Memory
from keepmask.bench.rounds import Measured
from keepmask.bench.timing import Row, quantiles
from keepmask.bench.workload import Workload

__all__ = ["memory_row", "phase_rows", "timing_rows"]

_OURS = next(iter(VARIANTS))


def timing_rows(workload: Workload, measured: Measured, floor: Floor) -> Iterator[Row]:
    """Throughput of all implementations; first token and step time of ours, the step also over its floor.

    Peers' rows carry `keepmask_over`: the median, over rounds, of our tokens per second with masks over theirs.
    """
    least_ms = 1e3 * floor.step_s(workload.num_sequences, workload.prompt + 0.75 * workload.output)
    for variant, timings in measured.ours.items():
        totals = [timing.total for timing in timings]
        yield _row("throughput", variant, workload, workload.num_tokens / np.array(totals), "tokens/s")
        steps = 1e3 * np.concatenate([timing.steps for timing in timings])
        yield _row("step", variant, workload, steps, "ms") | {
            "floor_ms": least_ms,
            "over_floor": float(np.median(steps)) / least_ms,
        }
        first = 1e3 * np.concatenate([timing.first_tokens for timing in timings])
        yield _row("first token", variant, workload, first, "ms")
    masked = np.array([timing.total for timing in measured.ours[_OURS]])
    for variant, seconds in measured.peers.items():
        yield _row("throughput", variant, workload, workload.num_tokens / np.array(seconds), "tokens/s") | {
            "keepmask_over": float(np.median(np.array(seconds) / masked))
        }


def phase_rows(workload: Workload, phases: Mapping[str, float]) -> Iterator[Row]:
    """Milliseconds a step spends in each phase, prompts included: the mean over a run, which is all three quantiles."""
    for phase, ms in phases.items():
        yield _row(f"phase {phase}", _OURS, workload, [ms], "ms a step")


def memory_row(variant: str, workload: Workload, memory: Memory) -> Row:
    """Peak resident memory, and what of it is neither weights nor the cache's budget."""
    row = _row("peak memory", variant, workload, [memory.peak / 1e6], "MB")
    return row | {
        "weights_mb": memory.weights / 1e6,
        "kv_cache_mb": memory.kv_cache / 1e6,
        "over_weights_and_cache_mb": memory.over / 1e6,
        "after_mb": memory.after / 1e6,
    }


def _row(op: str, implementation: str, workload: Workload, values: Sequence[float] | Any, unit: str) -> Row:
    row: Row = {"op": op, "implementation": implementation, "shape": asdict(workload)}
    return row | quantiles(values) | {"unit": unit, "samples": len(values)}
