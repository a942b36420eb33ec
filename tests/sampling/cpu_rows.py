"""Rows of logits for the tests of the kernels that read them."""

import numpy as np
from hypothesis import strategies as st

from keepmask.sampling.cpu.search import Found
from keepmask.sampling.records import OFF_K, RECORD

EXACT = (0.0, 0.0)
HALF = (2 * 2.0**-8, 2.0**-12)
SIZES = st.sampled_from([1, 2, 63, 64, 65, 130, 1024, 3000])


def rows_of(V):
    """A float32 row: smooth, with ties, flat, with bans, or huge."""
    rng = st.integers(0, 2**32).map(np.random.default_rng)
    smooth = st.builds(lambda rng, scale: rng.normal(0, scale, V), rng, st.floats(0.01, 30))
    tied = st.builds(lambda rng: rng.integers(-3, 3, V) * 0.5, rng)
    flat = st.just(np.zeros(V))
    banned = st.builds(lambda rng: np.where(rng.random(V) < 0.8, -np.inf, rng.normal(0, 3, V)), rng)
    huge = st.builds(lambda rng: rng.normal(0, 1, V) * 1e30, rng)
    return st.one_of(smooth, tied, flat, banned, huge).map(lambda row: row.astype(np.float32))


def within(row, margin, rng):
    """An exact row that may be stored as `row`."""
    finite = np.where(np.isfinite(row), row, np.float32(0))
    room = margin[0] * np.abs(finite) + margin[1]
    return np.where(np.isfinite(row), finite + rng.uniform(-1, 1, row.size) * room, row).astype(np.float32)


def record(**fields):
    """[1] record of a row without filters that reads row 0 of the logits, with these fields."""
    made = np.zeros(1, RECORD)
    made["temperature"], made["top_p"], made["select_top_p"], made["top_k"] = 1, 1, 1, OFF_K
    made["log_min_p"] = made["select_log_min_p"] = -np.inf
    for name, value in fields.items():
        made[name] = value
    return made


def room(C):
    """`Found` of one row, with room for C ids."""
    return Found.of(np.full((1, C), np.nan, np.float32), np.full((1, C), -7, np.int32))
