import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from keepmask.report.figures import SequenceRatio
from keepmask.report.plots import (
    SIZE_BINS,
    mass_chart,
    ratio_histogram,
    sequence_chart,
    size_bin,
    size_histogram,
    size_label,
)


def shapes(svg, tag, kind):
    """Elements of this tag whose class holds this word; parsing also shows that the SVG is well formed."""
    return [element for element in ElementTree.fromstring(svg).iter(tag) if kind in element.get("class", "").split()]


def titles(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("title")]


def number_at(svg, label):
    """Tokens of the size bin with this label, as its title says."""
    return next(int(re.search(r": ([\d,]+) tokens", title)[1]) for title in titles(svg) if f" {label} id" in title)


@pytest.mark.parametrize(
    ("size", "label"),
    [
        (1, "1"),
        (2, "2"),
        (3, "3\N{EN DASH}4"),
        (4, "3\N{EN DASH}4"),
        (5, "5\N{EN DASH}8"),
        (128, "65\N{EN DASH}128"),
        (10**6, "129+"),
    ],
)
def test_sizes_fall_into_doubling_bins(size, label):
    assert size_label(size_bin(size)) == label


def test_bins_join_without_gaps():
    assert all(last + 1 == first for (_, last), (first, _) in pairwise(SIZE_BINS))


def test_size_histogram_counts_every_token_once():
    svg = size_histogram(np.array([1, 1, 2, 4, 200, 0, 0, 0]))
    assert [number_at(svg, label) for label in ("1", "2", "3\N{EN DASH}4", "129+", "all")] == [2, 1, 1, 1, 3]
    heights = [float(bar.get("height")) for bar in shapes(svg, "rect", "bar")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)


def test_the_vocabulary_has_a_bar_only_where_it_occurs():
    assert not shapes(size_histogram(np.array([1, 2])), "rect", "sv")


def test_ratio_histogram_draws_both_on_the_same_axes():
    svg = ratio_histogram(np.array([0.7, 0.8, 0.95, 1.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    full, replayed = (shapes(svg, "rect", kind) for kind in ("full", "replayed"))
    assert len(full) == 4
    assert len(replayed) == 1
    (middle,) = shapes(svg, "line", "one")
    spike = float(replayed[0].get("x")) + float(replayed[0].get("width")) / 2
    assert spike == pytest.approx(float(middle.get("x1")), abs=1)
    assert full[-1].get("x") == replayed[0].get("x")


def test_ratio_histogram_counts_every_token_also_beyond_its_axis():
    rng = np.random.default_rng(0)
    ratio = np.concatenate([rng.uniform(0.5, 1, 5000), [1e-30, 1e30, np.inf]])
    svg = ratio_histogram(ratio, np.ones(3))
    counted = sum(
        int(re.search(r": ([\d,]+) tokens", title)[1].replace(",", "")) for title in titles(svg) if "full" in title
    )
    assert counted == ratio.size


def test_ratio_histogram_needs_no_full_scores():
    svg = ratio_histogram(None, np.array([1.0, 1.01]))
    assert not shapes(svg, "rect", "full")
    assert shapes(svg, "rect", "replayed")


def test_sequence_chart_is_logarithmic():
    positions = np.array([1, 2, 3])
    falling = np.array([1.0, 0.1, 0.01])
    flat = SequenceRatio(positions, np.ones(3), np.ones(3), np.ones(3))
    svg = sequence_chart(SequenceRatio(positions, falling / 2, falling, falling * 2), flat)
    (line,) = shapes(svg, "polyline", "full")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    (level,) = shapes(svg, "polyline", "replayed")
    assert len({point.split(",")[1] for point in level.get("points").split()}) == 1


def test_sequence_chart_of_one_position_is_drawn():
    one = SequenceRatio(np.array([1]), np.array([0.9]), np.array([1.0]), np.array([1.1]))
    assert shapes(sequence_chart(None, one), "polyline", "replayed")


def test_mass_chart_shows_the_median_of_each_size():
    svg = mass_chart(np.array([1, 1, 1, 40, -1]), np.array([0.98, 0.99, 1.0, 0.6, 1.0]))
    texts = titles(svg)
    assert any("support of 1: median 0.990" in text and "3 tokens" in text for text in texts)
    assert any("support of all: median 1.000" in text for text in texts)
    assert len(shapes(svg, "line", "middle")) == 3


def test_charts_of_extreme_or_no_data_have_finite_coordinates():
    charts = [
        size_histogram(np.zeros(0, np.int64)),
        ratio_histogram(np.full(3, 1e-300), np.full(3, 1e300)),
        mass_chart(np.array([1]), np.array([0.0])),
        sequence_chart(None, SequenceRatio(np.array([1, 9]), *np.full((3, 2), 1e-300))),
    ]
    assert not any(re.search(r'"(nan|inf|-inf)"', chart) for chart in charts)
