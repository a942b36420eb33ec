"""`zeros`: memory for the KV cache, straight from the system."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["zeros"]

_HUGE_PAGE = 2**21


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`; on a CPU memory is taken at the first write to it, in huge pages where the system has some.

    Storing the keys and values of new tokens would otherwise wait for the system to map small pages, one by one.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _HUGE_PAGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    region = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)
