"""The charts of a training run, one run or two: curves over steps, histograms over steps, phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from keepmask.report.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    chart,
    grid,
    log_ticks,
    nice_ticks,
    power,
    x_axis,
    x_tick,
    y_axis,
)

__all__ = ["Curve", "curves_chart", "histogram_chart", "phase_chart"]

_MAX_COLUMNS = 48  # of a histogram over steps; more steps are added up


class Curve(NamedTuple):
    """Points of one quantity over steps. style: classes of the page's style sheet, "full" or "replayed" among them."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """Marks at the points, for measurements that are not made at every step."""


def curves_chart(name: str, curves: Sequence[Curve], *, log: bool = False, low: float | None = None) -> str:
    """Lines over steps. low: where the axis begins at the latest; log: decades, for differences."""
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value) and (value > 0 or not log)]
    steps = [step for curve in curves for step, _ in curve.points]
    least, most = min(values, default=0.0), max(values, default=1.0)
    if log:
        least, most = 10 ** math.floor(math.log10(least or 1e-8)), 10 ** math.ceil(math.log10(most or 1.0) + 1e-9)
    else:
        least = least if low is None else min(least, low)
        room = 0.05 * (most - least) or 0.05 * abs(most) or 0.05
        least, most = (least if least == low else least - room), most + room
    x, y = x_axis(min(steps, default=0), max(*steps, 1) if steps else 1), y_axis(least, most, log=log)
    ticks, form = (log_ticks(least, most), power) if log else (nice_ticks(least, most), _short)
    marks = [grid(y, ticks, form)] + [x_tick(x, tick) for tick in nice_ticks(x.low, x.high, whole=True)]
    for curve in curves:
        points = [(x.at(step), y.at(max(value, least)), step, value) for step, value in curve.points]
        line = " ".join(f"{a},{b}" for a, b, *_ in points)
        marks.append(f'<polyline class="line {curve.style}" points="{line}"/>')
        radius = 4 if curve.dots else 2
        marks += [
            f'<circle class="dot {curve.style}" cx="{a}" cy="{b}" r="{radius}"><title>{escape(curve.name)}, '
            f"step {step:g}: {value:.4g}</title></circle>"
            for a, b, step, value in points
        ]
    return chart(name, marks, x_label="step", y_label=name)


def histogram_chart(
    name: str, style: str, edges: Sequence[float], histograms: Sequence[tuple[float, Sequence[float]]]
) -> str:
    """Shares of tokens by ratio, upwards, over steps: the darker, the more. edges: the inner ones of the bins."""
    stride = max(1, -(-len(histograms) // _MAX_COLUMNS))
    groups = [histograms[i : i + stride] for i in range(0, len(histograms), stride)]
    num_bins = len(edges) + 1
    width, height = (WIDTH - LEFT - RIGHT) / max(len(groups), 1), (HEIGHT - BOTTOM - TOP) / num_bins
    marks = []
    for column, group in enumerate(groups):
        counts = [sum(each[row] for _, each in group) for row in range(num_bins)]
        total = sum(counts) or 1.0
        for row, count in enumerate(counts):
            if count:
                share, top = count / total, HEIGHT - BOTTOM - (row + 1) * height
                marks.append(
                    f'<rect class="cell {style}" x="{LEFT + column * width:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill-opacity="{0.12 + 0.88 * math.sqrt(share):.2f}"><title>step '
                    f"{group[0][0]:g}, ratio {_bin(edges, row)}: {share:.1%}</title></rect>"
                )
    for row, edge in enumerate(edges):
        middle = HEIGHT - BOTTOM - (row + 1) * height
        marks.append(f'<text class="tick end" x="{LEFT - 6}" y="{middle + 3.5:.1f}">{edge:g}</text>')
    for column in sorted({0, len(groups) // 2, len(groups) - 1}) if groups else ():
        marks.append(
            f'<text class="tick" x="{LEFT + (column + 0.5) * width:.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{groups[column][0][0]:g}</text>"
        )
    return chart(name, marks, x_label="step", y_label="ratio")


def phase_chart(name: str, phases: Sequence[str], steps: Sequence[tuple[float, Sequence[float]]]) -> str:
    """Seconds of each step by phase, one on the other."""
    most = max((sum(seconds) for _, seconds in steps), default=1.0) or 1.0
    y = y_axis(0.0, most * 1.05)
    width = (WIDTH - LEFT - RIGHT) / max(len(steps), 1)
    marks = [grid(y, nice_ticks(0.0, most * 1.05), _short)]
    for column, (step, seconds) in enumerate(steps):
        foot = 0.0
        for row, value in enumerate(seconds):
            top, bottom = y.at(foot + value), y.at(foot)
            foot += value
            marks.append(
                f'<rect class="phase p{row}" x="{LEFT + column * width + 0.15 * width:.1f}" y="{top}" '
                f'width="{0.7 * width:.1f}" height="{max(bottom - top, 0):.1f}"><title>step {step:g}, '
                f"{escape(phases[row])}: {value:.2f} s</title></rect>"
            )
    for column in sorted({0, len(steps) // 2, len(steps) - 1}) if steps else ():
        marks.append(
            f'<text class="tick" x="{LEFT + (column + 0.5) * width:.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{steps[column][0]:g}</text>"
        )
    return chart(name, marks, x_label="step", y_label="seconds")


def _bin(edges: Sequence[float], row: int) -> str:
    if row == 0:
        return f"below {edges[0]:g}"
    return f"above {edges[-1]:g}" if row == len(edges) else f"{edges[row - 1]:g} to {edges[row]:g}"


_short: Callable[[float], str] = "{:.4g}".format
