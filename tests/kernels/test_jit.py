"""Rows are shared among threads: each is run once, whatever their number, and errors come out."""

import os

import numpy as np
import pytest

from keepmask.kernels.jit import SOURCES, RowThreads, jit

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_are_there_again_in_a_forked_process():
    seen, threads = np.zeros(4, int), RowThreads(2)
    threads.run(count, 4, MUCH, seen)
    if (child := os.fork()) == 0:
        threads.run(count, 4, MUCH, seen)
        os._exit(0 if (seen == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_cached_machine_code_depends_on_the_sources_of_all_kernels():
    # numba makes what a function closes over a part of the key of its cached code.
    offset = 3

    def plus(x):
        return x + offset

    compiled = jit(plus)
    assert compiled(4) == 7
    assert [cell.cell_contents for cell in compiled.py_func.__closure__] == [3, SOURCES]
