"""What every benchmark shares: runs that take turns, quantiles of their times, and rows as lines or JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Row", "arguments", "in_turn", "quantiles", "report"]

Row = dict[str, Any]
"""One measurement: op, implementation, shape, p20, p50, p80, unit, what belongs to the op, and `machine_facts`."""


def in_turn(
    runs: Mapping[str, Callable[[], object]], *, seconds: float, rounds: int = 7, most: int = 30
) -> dict[str, list[float]]:
    """Milliseconds of each run's calls, after one that does not count.

    The runs take turns, `rounds` times; in a turn each is called until its share of `seconds` is spent, at most `most`
    times and at least once.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            end = time.perf_counter() + seconds / rounds
            for _ in range(most):
                begin = time.perf_counter()
                run()
                now = time.perf_counter()
                times[name].append(1e3 * (now - begin))
                if now > end:
                    break
    return times


def quantiles(values: Sequence[float] | NDArray[Any]) -> dict[str, float]:
    """p20, p50 and p80."""
    return dict(zip(("p20", "p50", "p80"), np.quantile(values, (0.2, 0.5, 0.8)).tolist(), strict=True))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON row a measurement, in place of a table")
    return parser


def report(rows: Iterable[Row], facts: Row, line: Callable[[Row], str] | None) -> None:
    """Print each row as soon as it is there: as a line for people, or, where `line` is None, as JSON with `facts`."""
    for row in rows:
        if line is None:
            whole = row | facts
            text = json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in whole.items()})
        else:
            text = line(row)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
