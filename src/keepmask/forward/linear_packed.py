"""`PackedLinear`: a linear layer whose weight is laid out ahead of time for the CPU's matrix unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PackedLinear"]

_ROWS_HINT = 64  # rows of input the layout is made for; others are served as well


class PackedLinear:
    """x @ weight.T + bias for x [T, in], weight [out, in], bias [out] or None.

    parameters: whose rows, one after the other, are the weight; several become views of one tensor. On CPUs with oneDNN
    the weight is laid out for its kernels, which otherwise make that layout anew at every call; elsewhere this is
    torch's own linear.

    sole: keep that layout only. The parameters then hold NaN in no memory until `restore`; whoever reads or changes
    them restores them first, and calls `refresh` afterwards.
    """

    __slots__ = ("_parameters", "_sole", "_weight", "bias", "in_features", "out_features", "packed")

    def __init__(self, parameters: Sequence[Tensor], bias: Tensor | None, *, sole: bool = False) -> None:
        self._parameters, self._sole = list(parameters), sole
        self.bias = bias
        self.packed: Tensor | None = None
        self._weight: Tensor | None = parameters[0]
        if len(parameters) > 1:
            self._become(torch.cat([parameter.data for parameter in parameters]))
        self.out_features, self.in_features = self.weight.shape
        self.refresh()

    @property
    def weight(self) -> Tensor:
        """[out, in]."""
        if self._weight is None:
            raise RuntimeError("weight: is kept for the CPU's kernels only; call restore() first, refresh() afterwards")
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """[T, out] from x [T, in]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def refresh(self) -> None:
        """Lay out the weight as it is now."""
        if self._weight is None or self._weight.device.type != "cpu" or not _can_pack(self._weight.dtype):
            return
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self._weight.detach(), _ROWS_HINT)
        if self._sole:
            self._weight = None
            for parameter in self._parameters:
                parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)

    def restore(self) -> None:
        """Give the parameters their memory and values back."""
        if self._weight is None and self.packed is not None:
            self._become(self.packed.to_dense())

    def _become(self, weight: Tensor) -> None:
        sizes = [parameter.shape[0] for parameter in self._parameters]
        for parameter, rows in zip(self._parameters, torch.split(weight, sizes), strict=True):
            parameter.data = rows
        self._weight = weight


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
