"""`PackedLinear`: a linear layer whose weight is laid out ahead of time for the CPU's matrix unit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PackedLinear"]

_ROWS_HINT = 64  # rows of input the layout is made for; others are served as well


class PackedLinear:
    """x @ weight.T + bias for x [T, in], weight [out, in], bias [out] or None.

    On CPUs with oneDNN the weight is kept a second time, in the layout of its kernels, which otherwise make that layout
    anew at every call. `refresh` follows a change of the weight. Elsewhere this is torch's own linear.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: Tensor | None = None
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def refresh(self) -> None:
        """Lay out the weight as it is now."""
        if self.weight.device.type == "cpu" and _can_pack(self.weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS_HINT)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
