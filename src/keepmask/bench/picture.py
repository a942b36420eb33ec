"""`save_picture`: throughput over the number of requests, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from keepmask.bench.phases import PHASES
from keepmask.bench.timing import Row
from keepmask.bench.workload import Workload

__all__ = ["save_picture"]


def save_picture(path: Path, rows: Sequence[Row]) -> None:
    """Draw the rows of the workloads whose phases are known. The ending of `path` is the format."""
    shapes = [row["shape"] for row in rows if row["op"].startswith("phase ")]
    shown = [row for row in rows if row["shape"] in shapes]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _throughput(left, shown)
    _phases(right, shown)
    shape = Workload(**shown[0]["shape"])
    figure.suptitle(
        f"prompts of {shape.prompt} tokens, {shape.output} new ones, {shown[0]['dtype']}, {shown[0]['device']}",
        fontsize="small",
    )
    figure.savefig(path, dpi=150)


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    found = [row for row in rows if row["op"] == "throughput"]
    for name in dict.fromkeys(row["implementation"] for row in found):
        own = [row for row in found if row["implementation"] == name]
        axes.plot([row["shape"]["requests"] for row in own], [row["p50"] for row in own], marker="o", label=name)
    sizes = sorted({row["shape"]["requests"] for row in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)


def _phases(axes: Any, rows: Sequence[Row]) -> None:
    """One bar a number of requests, the floor as a mark on it."""
    found = [row for row in rows if row["op"].startswith("phase ")]
    sizes = sorted({row["shape"]["requests"] for row in found})
    bottom = dict.fromkeys(sizes, 0.0)
    for phase in PHASES:
        heights = {row["shape"]["requests"]: row["p50"] for row in found if row["op"] == f"phase {phase}"}
        axes.bar(
            [str(size) for size in sizes], [heights[size] for size in sizes], bottom=list(bottom.values()), label=phase
        )
        bottom = {size: bottom[size] + heights[size] for size in sizes}
    floors = {row["shape"]["requests"]: row["floor_ms"] for row in rows if row["op"] == "step"}
    axes.plot([str(size) for size in sizes], [floors[size] for size in sizes], "k_", markersize=24, label="floor")
    axes.set_xlabel("requests at once")
    axes.set_ylabel("ms a step, with masks")
    axes.legend(fontsize="small", frameon=False)
