"""What the candidate kernels read and write: the parameters of M rows as one table, their candidates, their draws."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepmask.sampling.row_records import (
    BAND,
    EMPTY,
    HF,
    NEAR,
    NOT_FINITE,
    OK,
    OUTSIDE,
    RELATIVELY_NEAR,
    SGLANG,
    SGLANG_TORCH,
    TOO_MANY,
    UNCERTAIN,
    VLLM,
    VLLM_TORCH,
)

__all__ = [
    "BAND",
    "COLUMNS",
    "EMPTY",
    "FLOAT_COLUMNS",
    "HF",
    "NEAR",
    "NOT_FINITE",
    "OK",
    "OUTSIDE",
    "REACHED",
    "RELATIVELY_NEAR",
    "SGLANG",
    "SGLANG_TORCH",
    "TOO_MANY",
    "UNCERTAIN",
    "VLLM",
    "VLLM_TORCH",
    "Best",
    "Candidates",
    "DrawTable",
    "Draws",
    "Impl",
    "use_triton",
]

Impl = Literal["auto", "torch", "triton"]
"""Which form of a kernel: its definition in PyTorch, its Triton form, or the latter where it can run."""

REACHED = 1 + BAND
"""Candidates weigh this much more than a mass cut asks for, so that it lies among them however sums round."""

INT_COLUMNS = (
    "source",  # row of the logits
    "greedy",
    "top_k",  # above V where off
    "profile",
    "position",  # of the output
    "completion",
    "seed",  # 64 bits, in two's complement
    "whole",  # no filter is on
    "weighs",  # the sum over all ids is needed
    "select_k",  # candidates hold the ids with the select_k highest logits; 0 where off
    "by_rank",  # select_k or select_log_min_p bounds the candidates
    "mask_slot",  # row of the arrays that supports are written to; -1 for none
    "logprobs_slot",  # the same for their log-probabilities
    "num_top",  # entries wanted of the best of the support; -1 for no entry at all
)
FLOAT_COLUMNS = (
    "temperature",  # a float32 number; 1 where greedy
    "top_p",  # 1 where off
    "log_min_p",  # -inf where off
    "select_log_min_p",  # candidates hold the ids within this of the highest; -inf where off
    "select_top_p",  # candidates hold this share of the weight; 1 where off
)
COLUMNS = INT_COLUMNS + FLOAT_COLUMNS


def use_triton(impl: Impl, tensor: Tensor) -> bool:
    """Whether a kernel runs in its Triton form: if asked for, or left to choose on a CUDA device with Triton there."""
    return impl == "triton" or (impl == "auto" and tensor.is_cuda and find_spec("triton") is not None)


@dataclass(frozen=True, slots=True)
class DrawTable:
    """Parameters of M rows. ints: [len(COLUMNS), M] int64; float columns hold the bits of float64 numbers."""

    ints: Tensor

    @staticmethod
    def pack(columns: dict[str, NDArray[np.generic]]) -> NDArray[np.int64]:
        """[len(COLUMNS), M] int64, of [M] arrays by name."""
        rows = [columns[name].astype(np.int64) for name in INT_COLUMNS]
        rows += [columns[name].astype(np.float64).view(np.int64) for name in FLOAT_COLUMNS]
        return np.stack(rows)

    @property
    def num_rows(self) -> int:
        """M."""
        return self.ints.shape[1]

    @property
    def floats(self) -> Tensor:
        """The same memory as float64."""
        return self.ints.view(torch.float64)

    def __getitem__(self, column: str) -> Tensor:
        """[M] int64 or float64."""
        return (self.floats if column in FLOAT_COLUMNS else self.ints)[COLUMNS.index(column)]


class Candidates(NamedTuple):
    """Candidates of M rows, by ascending id. Of [M, C] arrays the first counts[m] entries of row m count."""

    z: Tensor
    """[M, C] float32, logits before temperature, all above -inf."""
    ids: Tensor
    """[M, C] int32."""
    counts: Tensor
    """[M] int32; 0 where the status is not OK."""
    sums: Tensor
    """[3, M] float64: the highest s = float32(z / temperature) of the row; the weight exp(s - highest) of all ids, 0
    where the row does not weigh; the weight of the candidates."""
    num_possible: Tensor
    """[M] int32, how many of all logits are above -inf."""
    status: Tensor
    """[M] int32."""

    @classmethod
    def empty(cls, M: int, capacity: int, device: torch.device) -> Candidates:
        """Room for them."""
        shape = (M, capacity)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(M, dtype=torch.int32, device=device),
            torch.empty((3, M), dtype=torch.float64, device=device),
            torch.empty(M, dtype=torch.int32, device=device),
            torch.empty(M, dtype=torch.int32, device=device),
        )


class Draws(NamedTuple):
    """Draws of M rows. Where the status is not OK the others hold nothing meaningful."""

    token_ids: Tensor
    """[M] int64."""
    counts: Tensor
    """[M] int32, ids in the support; 0 for the whole vocabulary."""
    over_all: Tensor
    """[M] int32, 1 where the support has yet to be read off all V logits."""
    token_s: Tensor
    """[M] float32, s of the token."""
    token_logprobs: Tensor
    """[M] float32, over the support."""
    ranks: Tensor
    """[M] int32, from 1, by (s descending, id ascending), within the support."""

    @classmethod
    def empty(cls, M: int, device: torch.device) -> Draws:
        """Room for them."""
        types = (torch.int64, torch.int32, torch.int32, torch.float32, torch.float32, torch.int32)
        return cls(*(torch.empty(M, dtype=dtype, device=device) for dtype in types))


class Best(NamedTuple):
    """The best of the supports of M rows, by (s descending, id ascending), num[m] of them in row m."""

    num: Tensor
    """[M] int32."""
    ids: Tensor
    """[M, T] int32."""
    s: Tensor
    """[M, T] float32."""
    logprobs: Tensor
    """[M, T] float32."""
