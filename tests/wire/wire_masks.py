"""Masks for the tests of the wire: a strategy, the corner cases every format must carry, and a measure of memory."""

import tracemalloc

import numpy as np
from hypothesis import strategies as st

from keepmask.mask import SamplingMask

MAX_ID = 2**31 - 1

# Two adjacent rows where one is the whole vocabulary; a row of 60,000 ids; no tokens at all.
CORNERS = {
    "empty beside full": SamplingMask.from_lists([[], [5], [], [], [0, MAX_ID]]),
    "all whole": SamplingMask([], [0, 0, 0, 0]),
    "wide": SamplingMask(np.arange(0, 180_000, 3), [0, 60_000]),
    "no tokens": SamplingMask([], [0]),
    "no tokens, logprobs": SamplingMask([], [0], []),
    "logprobs": SamplingMask.from_lists([[187, 326], [42]], [[-0.6931472, -0.6931472], [0.0]]),
    "wide, logprobs": SamplingMask(np.arange(60_000), [0, 0, 60_000], np.linspace(-30, -1e-7, 60_000)),
}

ids = st.one_of(st.integers(0, 40), st.integers(0, 151_935), st.integers(0, MAX_ID))
supports = st.lists(st.lists(ids, unique=True, max_size=10).map(sorted), max_size=10)
logprobs = st.floats(-(2.0**100), 0, width=32)


@st.composite
def masks(draw):
    rows = draw(supports)
    if not draw(st.booleans()):
        return SamplingMask.from_lists(rows)
    return SamplingMask.from_lists(
        rows, [draw(st.lists(logprobs, min_size=len(row), max_size=len(row))) for row in rows]
    )


def peak_bytes(function):
    """Most memory that a call held at once, as Python and NumPy count it."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
