"""The table of parameters holds every number as it was, and says where Triton runs."""

import numpy as np
import pytest
import torch
from kernel_rows import row, table

from keepmask.sampling.cuda.draw_table import COLUMNS, use_triton


def test_numbers_come_back_in_their_types():
    rows = [
        row(temperature=0.7, top_k=5, top_p=1 - 2**-53, min_p=0.1, seed=-(2**63), profile="hf"),
        row(top_p=0.1, position=2**31, completion=3, seed=2**63 - 1),
    ]
    both = table(rows)
    assert both.num_rows == 2
    for name in COLUMNS:
        if name not in rows[0]:
            continue
        expected = [float(columns[name]) for columns in rows] if both[name].is_floating_point() else None
        assert both[name].tolist() == (expected or [int(columns[name]) for columns in rows])
    assert float(both["temperature"][0]) == np.float32(0.7)


def test_triton_runs_where_it_is_asked_for_or_where_it_is_at_home():
    here = torch.zeros(1)
    assert use_triton("triton", here)
    assert not use_triton("torch", here)
    assert not use_triton("auto", here)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_is_the_choice_on_a_cuda_device():
    assert use_triton("auto", torch.zeros(1, device="cuda"))
