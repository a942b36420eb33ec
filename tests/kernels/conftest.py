from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[1, 2, 5])
def num_threads(request):
    """Threads that torch has during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
