"""Rows are shared among threads: each is run once, whatever their number, and errors come out."""

import numpy as np
import pytest

from keepmask.kernels.jit import RowThreads

MUCH = 2**30


def count(seen, first, end):
    for row in range(first, end):
        seen[row] += 1


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("work", [0, MUCH])
def test_each_row_is_run_once(num_threads, num_rows, work):
    seen = np.zeros(num_rows, int)
    RowThreads(num_threads).run(count, num_rows, work, seen)
    assert (seen == 1).all()


def test_an_error_in_another_thread_is_raised_here():
    def fail(first, end):
        if end == 4:
            raise ValueError("row 3")

    with pytest.raises(ValueError, match="row 3"):
        RowThreads(2).run(fail, 4, MUCH)
