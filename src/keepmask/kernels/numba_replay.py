"""The operations of `replay_pairs` compiled for the CPU: each row is read once, in its own type.

Kernels run without the GIL on plain threads, as many as PyTorch uses: a second OpenMP pool would fight PyTorch's.
Work is split between rows, so results do not depend on the number of threads. bfloat16 is read and written as the
upper half of a float32; all sums are float32. Importing this module loads numba, so it is imported on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["add_weight_gradient", "hidden_gradient", "pair_logits"]

F = TypeVar("F", bound=Callable[..., Any])

_MIN_PAIRS_PER_THREAD = 512  # below it a thread costs more than it saves
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_REORDER = {"reassoc", "contract", "nsz", "arcp"}  # lets sums vectorise; NaN and inf keep their meaning


def pair_logits(hidden: Tensor, rows: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """`replay_pairs.pair_logits`."""
    out = torch.empty(ids.numel(), dtype=torch.float32)
    _run(_pair_logits, offsets, _array(hidden), rows.numpy(), _array(weight), ids.numpy(), out.numpy())
    return out


def hidden_gradient(out: Tensor, rows: Tensor, grad: Tensor, weight: Tensor, ids: Tensor, offsets: Tensor) -> None:
    """`replay_pairs.hidden_gradient`."""
    _run(_set_rows, offsets, _array(out), rows.numpy(), grad.numpy(), _array(weight), ids.numpy())


def add_weight_gradient(out: Tensor, ids: Tensor, grad: Tensor, hidden: Tensor, rows: Tensor, offsets: Tensor) -> None:
    """`replay_pairs.add_weight_gradient`."""
    _run(_add_rows, offsets, _array(out), ids.numpy(), grad.numpy(), _array(hidden), rows.numpy())


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _run(kernel: Callable[..., None], offsets: Tensor, *arrays: NDArray[Any]) -> None:
    """`kernel(*arrays, offsets, start, stop)` over all rows, on as many threads as the pairs are worth."""
    bounds = offsets.numpy()
    num_rows, num_pairs = bounds.size - 1, int(bounds[-1])
    num_threads = max(1, min(torch.get_num_threads(), num_pairs // _MIN_PAIRS_PER_THREAD))
    cuts = np.searchsorted(bounds, np.linspace(0, num_pairs, num_threads + 1))
    cuts[0], cuts[-1] = 0, num_rows
    shares = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
    others = [threading.Thread(target=kernel, args=(*arrays, bounds, *share)) for share in shares[1:]]
    for thread in others:
        thread.start()
    kernel(*arrays, bounds, *shares[0])
    for thread in others:
        thread.join()


def _compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(nogil=True, fastmath=_REORDER, cache=True)(function))
    except RuntimeError:  # no folder to keep the compiled code in: compile once a process
        return cast(F, numba.njit(nogil=True, fastmath=_REORDER)(function))


def _inlined(function: Callable[..., Any]) -> Any:
    return intrinsic(function)  # numba calls it without the typing context


@_inlined
def _widen(typing_context: Any, x: Any) -> Any:
    """A float32 as it is; a uint16 as the bfloat16 whose bits it holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        upper = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(upper, ir.FloatType())

    return types.float32(x), generate


@_inlined
def _narrow(typing_context: Any, x: Any, like: Any) -> Any:
    """The inverse of `_widen`, in the type of `like`: rounded to the nearest bfloat16, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[1] == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        upper = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, ir.Constant(_I16, 0x7FC0), upper)

    return like(types.float32, like), generate


# The loops over e are what is vectorised; four rows at a time keep the loads independent of each other.


@_compiled
def _pair_logits(hidden: Any, rows: Any, weight: Any, ids: Any, out: Any, offsets: Any, start: int, stop: int) -> None:
    size = hidden.shape[1]
    h = np.empty(size, np.float32)
    for a in range(start, stop):
        source = hidden[rows[a]]
        for e in range(size):
            h[e] = _widen(source[e])
        m, end = offsets[a], offsets[a + 1]
        while m + 4 <= end:
            w0, w1, w2, w3 = weight[ids[m]], weight[ids[m + 1]], weight[ids[m + 2]], weight[ids[m + 3]]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for e in range(size):
                s0 += h[e] * _widen(w0[e])
                s1 += h[e] * _widen(w1[e])
                s2 += h[e] * _widen(w2[e])
                s3 += h[e] * _widen(w3[e])
            out[m], out[m + 1], out[m + 2], out[m + 3] = s0, s1, s2, s3
            m += 4
        while m < end:
            w0, s0 = weight[ids[m]], np.float32(0)
            for e in range(size):
                s0 += h[e] * _widen(w0[e])
            out[m] = s0
            m += 1


@_compiled
def _sum_rows(total: Any, grad: Any, table: Any, index: Any, m: int, end: int) -> None:
    """total = sum of grad[m] * table[index[m]] over m up to end."""
    size = total.size
    total[:] = 0
    while m + 4 <= end:
        g0, g1, g2, g3 = grad[m], grad[m + 1], grad[m + 2], grad[m + 3]
        w0, w1, w2, w3 = table[index[m]], table[index[m + 1]], table[index[m + 2]], table[index[m + 3]]
        for e in range(size):
            total[e] += (g0 * _widen(w0[e]) + g1 * _widen(w1[e])) + (g2 * _widen(w2[e]) + g3 * _widen(w3[e]))
        m += 4
    while m < end:
        g0, w0 = grad[m], table[index[m]]
        for e in range(size):
            total[e] += g0 * _widen(w0[e])
        m += 1


@_compiled
def _set_rows(out: Any, rows: Any, grad: Any, weight: Any, ids: Any, offsets: Any, start: int, stop: int) -> None:
    total = np.empty(out.shape[1], np.float32)
    for a in range(start, stop):
        _sum_rows(total, grad, weight, ids, offsets[a], offsets[a + 1])
        target = out[rows[a]]
        for e in range(total.size):
            target[e] = _narrow(total[e], target[e])


@_compiled
def _add_rows(out: Any, ids: Any, grad: Any, hidden: Any, rows: Any, offsets: Any, start: int, stop: int) -> None:
    total = np.empty(out.shape[1], np.float32)
    for u in range(start, stop):
        _sum_rows(total, grad, hidden, rows, offsets[u], offsets[u + 1])
        target = out[ids[u]]
        for e in range(total.size):
            target[e] = _narrow(_widen(target[e]) + total[e], target[e])
