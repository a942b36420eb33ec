"""The charts of a report, as SVG that takes its colours from the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepmask.report.figures import SequenceRatio

__all__ = [
    "BOTTOM",
    "HEIGHT",
    "LEFT",
    "RIGHT",
    "SIZE_BINS",
    "TOP",
    "WIDTH",
    "Axis",
    "chart",
    "grid",
    "log_ticks",
    "mass_chart",
    "nice_ticks",
    "percent",
    "power",
    "ratio_histogram",
    "sequence_chart",
    "size_bin",
    "size_histogram",
    "size_label",
    "x_axis",
    "x_tick",
    "y_axis",
]

SIZE_BINS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 2**31))
"""Support sizes, first and last of each shade; doubling, so the axis is logarithmic."""

WIDTH, HEIGHT = 560.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 14.0, 38.0
_RATIO_BINS = 36

Floats = NDArray[np.float64]


class Axis(NamedTuple):
    """Maps values linearly (or their logarithms) to the chart's units."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is, in the chart's units; values beyond the ends are at the ends."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = np.log(low), np.log(high), np.log(max(value, 1e-300))
        share = (min(max(value, low), high) - low) / (high - low) if high > low else 0.0
        return round(float(self.start + share * (self.end - self.start)), 1)


def x_axis(low: float, high: float) -> Axis:
    """The horizontal axis of a chart."""
    return Axis(low, high, LEFT, WIDTH - RIGHT)


def y_axis(low: float, high: float, *, log: bool = False) -> Axis:
    """The vertical axis of a chart."""
    return Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def size_bin(size: int) -> int:
    """Index into SIZE_BINS of a support of this many ids."""
    return next(i for i, (_, last) in enumerate(SIZE_BINS) if size <= last)


def size_label(index: int) -> str:
    """What a bin of SIZE_BINS is called."""
    first, last = SIZE_BINS[index]
    return f"{first}+" if index == len(SIZE_BINS) - 1 else str(first) if first == last else f"{first}\N{EN DASH}{last}"


def size_histogram(sizes: NDArray[np.int64]) -> str:
    """Share of tokens by support size, in doubling bins coloured like the tokens of the text; 0 is the vocabulary."""
    bins = _size_groups(sizes)
    shares = [int(where.sum()) / max(sizes.size, 1) for _, _, where in bins]
    top = _nice_ceiling(max(shares))
    y = y_axis(0, top)
    marks = [grid(y, [top * i / 4 for i in range(5)], percent)]
    for slot, (label, name, where), share in zip(_slots(len(bins)), bins, shares, strict=True):
        title = f"support of {label} id{'s' * (label != '1')}: {int(where.sum()):,} tokens, {percent(share)}"
        head = y.at(share)
        marks.append(
            f"<g><title>{title}</title>{slot.backdrop()}"
            f'<rect class="bar {name}" x="{slot.at(0.1)}" y="{head}" width="{0.8 * slot.width:.1f}" '
            f'height="{y.start - head:.1f}"/>'
            f'<text class="value" x="{slot.at(0.5)}" y="{head - 4:.1f}">{percent(share) if share else ""}</text>'
            f"{slot.tick(label)}</g>"
        )
    return chart("Support sizes", marks, x_label="ids in the support", y_label="share of tokens")


def mass_chart(sizes: NDArray[np.int64], kept: Floats) -> str:
    """Median and 10-90 % range of the probability a support keeps, by its size, in the bins of `size_histogram`."""
    bins = _size_groups(np.maximum(sizes, 0))
    quantiles = [np.percentile(kept[where], [10, 50, 90]).tolist() if where.any() else None for _, _, where in bins]
    low = min((values[0] for values in quantiles if values), default=0.0)
    foot = max(0.0, np.floor(low * 10 - 0.2) / 10)
    y = y_axis(min(foot, 0.9), 1)
    marks = [grid(y, nice_ticks(y.low, 1), lambda value: f"{value:g}")]
    for slot, (label, _, where), values in zip(_slots(len(bins)), bins, quantiles, strict=True):
        shape = title = ""
        if values:
            tenth, middle, ninetieth = values
            count = f"{int(where.sum()):,} tokens"
            title = (
                f"<title>support of {label}: median {middle:.3f}, 10 to 90 % {tenth:.3f} to {ninetieth:.3f}, {count}"
                "</title>"
            )
            top, bottom = y.at(ninetieth), y.at(tenth)
            shape = (
                f'<rect class="range" x="{slot.at(0.32)}" y="{top}" width="{0.36 * slot.width:.1f}" '
                f'height="{max(bottom - top, 1.5):.1f}" rx="2"/>'
                f'<line class="middle" x1="{slot.at(0.22)}" x2="{slot.at(0.78)}" y1="{y.at(middle)}" '
                f'y2="{y.at(middle)}"/>'
            )
        marks.append(f"<g>{title}{slot.backdrop()}{shape}{slot.tick(label)}</g>")
    return chart(
        "Probability kept",
        marks,
        x_label="ids in the support · line: median, box: 10 to 90 %",
        y_label="probability kept",
    )


def ratio_histogram(full: Floats | None, replayed: Floats) -> str:
    """Share of tokens by importance ratio, over the whole vocabulary and replayed, in the same bins and axes.

    The bins are centred on 1; the first and last take what lies beyond. The vertical axis is logarithmic.
    """
    edges = _ratio_edges([ratio for ratio in (full, replayed) if ratio is not None])
    decades = int(np.clip(np.ceil(np.log10(replayed.size / 0.8)), 2, 6))  # so that one token can be seen
    x, y = x_axis(edges[0], edges[-1]), y_axis(10.0**-decades, 1, log=True)
    marks = [grid(y, [10.0**-i for i in range(decades + 1)], percent)]
    marks += [x_tick(x, tick) for tick in nice_ticks(edges[1], edges[-2])]
    marks += [x_tick(x, edge, sign) for edge, sign in ((edges[:2].mean(), "≤"), (edges[-2:].mean(), "≥"))]
    marks.append(f'<line class="one" x1="{x.at(1)}" x2="{x.at(1)}" y1="{TOP}" y2="{y.start}"/>')
    for name, label, ratio in (("full", "full vocabulary", full), ("replayed", "replayed", replayed)):
        if ratio is not None:
            marks.append(_ratio_bars(edges, ratio, name, label, x, y))
    return chart("Importance ratios", marks, x_label="importance ratio, policy / rollout", y_label="share of tokens")


def sequence_chart(full: SequenceRatio | None, replayed: SequenceRatio) -> str:
    """Median and 10–90 % band of the ratio of a whole completion so far, by number of tokens; logarithmic."""
    curves = [(name, curve) for name, curve in (("full", full), ("replayed", replayed)) if curve is not None]
    low = min(float(curve.low.min()) for _, curve in curves)
    high = max(float(curve.high.max()) for _, curve in curves)
    low, high = max(min(low, 0.5), 1e-12), min(max(high, 1.2), 1e12)
    x, y = x_axis(1, max(float(curve.positions[-1]) for _, curve in curves)), y_axis(low, high, log=True)
    marks = [grid(y, log_ticks(low, high), power)]
    marks += [x_tick(x, tick) for tick in nice_ticks(1, x.high, whole=True)]
    for name, curve in curves:
        at = [x.at(position) for position in curve.positions.tolist()]
        top = [f"{a},{y.at(value)}" for a, value in zip(at, curve.high.tolist(), strict=True)]
        foot = [f"{a},{y.at(value)}" for a, value in zip(at, curve.low.tolist(), strict=True)]
        line = [f"{a},{y.at(value)}" for a, value in zip(at, curve.median.tolist(), strict=True)]
        marks.append(f'<polygon class="band {name}" points="{" ".join(top + foot[::-1])}"/>')
        marks.append(f'<polyline class="line {name}" points="{" ".join(line)}"/>')
    return chart(
        "Sequence ratios",
        marks,
        x_label="tokens of the completion · line: median, band: 10 to 90 %",
        y_label="sequence ratio",
    )


class _Slot(NamedTuple):
    """The horizontal space of one category."""

    left: float
    width: float

    def at(self, share: float) -> float:
        return round(self.left + share * self.width, 1)

    def backdrop(self) -> str:
        """What the pointer meets anywhere above the category's name."""
        height = HEIGHT - BOTTOM - TOP
        return f'<rect class="hit" x="{self.left:.1f}" y="{TOP}" width="{self.width:.1f}" height="{height}"/>'

    def tick(self, label: str) -> str:
        return f'<text class="tick" x="{self.at(0.5)}" y="{HEIGHT - BOTTOM + 16}">{label}</text>'


def _slots(num_slots: int) -> list[_Slot]:
    width = (WIDTH - LEFT - RIGHT) / num_slots
    return [_Slot(LEFT + width * i, width) for i in range(num_slots)]


def _size_groups(sizes: NDArray[np.int64]) -> list[tuple[str, str, NDArray[np.bool_]]]:
    """Label, class of the shade, and members of each bin of sizes; "all" for the vocabulary where it occurs."""
    bins = [(size_label(i), f"s{i}", (sizes >= first) & (sizes <= last)) for i, (first, last) in enumerate(SIZE_BINS)]
    whole = sizes == 0
    return [*bins, ("all", "sv", whole)] if whole.any() else bins


def _ratio_bars(edges: Floats, ratio: Floats, name: str, label: str, x: Axis, y: Axis) -> str:
    counts, _ = np.histogram(np.clip(ratio, edges[0], edges[-1]), edges)
    bars = []
    for i, count in enumerate(counts.tolist()):
        if count:
            share = count / ratio.size
            left, right, head = x.at(edges[i]), x.at(edges[i + 1]), y.at(max(share, 1.2 * y.low))
            low = "0" if i == 0 else f"{edges[i]:.3f}"
            high = "more" if i == counts.size - 1 else f"{edges[i + 1]:.3f}"
            title = f"{label}, ratio {low} to {high}: {count:,} tokens, {percent(share)}"
            bars.append(
                f'<rect class="bar {name}" x="{left + 0.5:.1f}" y="{head}" width="{max(right - left - 1, 1):.1f}" '
                f'height="{y.start - head:.1f}"><title>{title}</title></rect>'
            )
    return f"<g>{''.join(bars)}</g>"


def _ratio_edges(ratios: Sequence[Floats]) -> Floats:
    """Edges of bins of one width, 1 in the middle of one, over all but the most extreme 0.2 % of the ratios."""
    low = min(0.9, *(float(np.percentile(ratio, 0.2)) for ratio in ratios))
    high = max(1.05, *(float(np.percentile(ratio, 99.8)) for ratio in ratios))
    width = (min(high, 5.0) - max(low, 0.0)) / _RATIO_BINS
    below = int(np.ceil((1 - max(low, 0.0)) / width - 0.5))
    above = int(np.ceil((min(high, 5.0) - 1) / width - 0.5))
    return np.asarray(1 + width * (np.arange(-below, above + 2) - 0.5), np.float64)


def grid(y: Axis, ticks: Sequence[float], form: Callable[[float], str]) -> str:
    """Horizontal lines at the ticks, with their labels."""
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(tick)}" y2="{y.at(tick)}"/>'
        f'<text class="tick end" x="{LEFT - 6}" y="{y.at(tick) + 3.5}">{form(tick)}</text>'
        for tick in ticks
    )


def x_tick(x: Axis, tick: float, label: str | None = None) -> str:
    """A label under the horizontal axis."""
    return f'<text class="tick" x="{x.at(tick)}" y="{HEIGHT - BOTTOM + 16}">{label or f"{tick:g}"}</text>'


def chart(name: str, marks: Sequence[str], *, x_label: str, y_label: str) -> str:
    """An SVG of these marks, with the name of its horizontal axis under it."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(name)}: '
        f'{escape(y_label)} by {escape(x_label)}">{"".join(marks)}'
        f'<text class="label" x="{middle}" y="{HEIGHT - 4}">{escape(x_label)}</text></svg>'
    )


def percent(share: float) -> str:
    """A share as a percentage of two significant digits or so."""
    value = 100 * share
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.095 else f"{value:.1g} %"


def power(value: float) -> str:
    """A power of ten as one, where digits would be long."""
    exponent = round(float(np.log10(value)))
    if 1e-3 <= value < 1e5 or not np.isclose(value, 10.0**exponent):
        return f"{value:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _nice_ceiling(value: float) -> float:
    for top in (0.04, 0.08, 0.2, 0.4, 0.6, 0.8, 1.0):
        if value * 1.08 <= top:
            return top
    return 1.0


def nice_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight round numbers within [low, high]."""
    raw = (high - low) / 6
    scale = 10.0 ** np.floor(np.log10(raw)) if raw > 0 else 1.0
    step = next((scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw), scale)
    step = max(step, 1.0) if whole else step
    first = int(np.ceil(low / step - 1e-9))
    return [round(step * i, 10) for i in range(first, int(np.floor(high / step + 1e-9)) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with halves and doubles where there are few."""
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    factors = (1,) if len(exponents) > 6 else (1, 3) if len(exponents) > 3 else (1, 2, 5)
    stride = max(1, len(exponents) // 7)
    ticks = [factor * 10.0**exponent for exponent in exponents[::stride] for factor in factors]
    return [round(tick, 14) for tick in ticks if low <= tick <= high]
