"""Rows are shared among torch's threads: each is run once, whatever their number, also in a forked process."""

import os

import numpy as np
import pytest
import torch

from keepmask.compiled.jit import jit
from keepmask.compiled.team_rows import on_team, run_pairs, run_rows

MUCH = 2**30


@jit
def count(seen, by, start, stop):
    for row in range(start, stop):
        seen[row] += by[0]


@jit
def run_count(args, cuts, num_threads, team):
    on_team(count, args, cuts, num_threads, team)


@jit
def sizes(out, offsets, start, stop):
    for row in range(start, stop):
        out[row] += offsets[row + 1] - offsets[row]


@jit
def run_sizes(args, cuts, num_threads, team):
    on_team(sizes, args, cuts, num_threads, team)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("work", [0, MUCH])
def test_each_row_is_run_once(num_threads, num_rows, work):
    seen = np.zeros(num_rows, np.int64)
    run_rows(run_count, num_rows, work, seen, (2, 0.5))
    assert (seen == 2).all()


@pytest.mark.parametrize("counts", [[], [0], [5], [0, 0, 7, 1], [1000, 0, 1, 2, 3], [1] * 50])
@pytest.mark.parametrize("least", [1, 10**6])
def test_rows_are_dealt_out_by_their_pairs(num_threads, counts, least):
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int64)
    out = np.zeros(len(counts), np.int64)
    run_pairs(run_sizes, (out,), offsets=offsets, least=least)
    assert out.tolist() == counts


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_run_rows_on_one_thread():
    # As torch does in the workers of its data loaders: OpenMP's threads do not follow into them.
    seen = np.zeros(4, np.int64)
    run_rows(run_count, 4, MUCH, seen, (1, 0.0))
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        run_rows(run_count, 4, MUCH, seen, (1, 0.0))
        os._exit(0 if (seen == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
