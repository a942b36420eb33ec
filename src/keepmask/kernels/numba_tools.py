"""What compiled CPU kernels share: bfloat16 as raw bits, an exponential that vectorises, and torch's own threads.

Importing this module loads numba, so it is imported on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.core.cgutils import ir
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from keepmask.kernels import cpu_team

__all__ = ["array", "compiled", "deal", "exp", "narrow", "on_team", "widen"]

F = TypeVar("F", bound=Callable[..., Any])

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_I64, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
_SHARES = 4  # of the work, for each thread: one that comes late takes fewer
_REORDER = {"reassoc", "contract", "nsz", "arcp"}  # lets sums vectorise; NaN and inf keep their meaning


def compiled(function: F) -> F:
    """`function` compiled without the GIL, from numba's cache where there is a folder for it."""
    try:
        return cast(F, numba.njit(nogil=True, fastmath=_REORDER, cache=True)(function))
    except RuntimeError:  # no folder to keep the code in: compile once a process
        return cast(F, numba.njit(nogil=True, fastmath=_REORDER)(function))


def array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a CPU tensor; a bfloat16 one as the uint16 bits."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def deal(kernel: Callable[..., None], arrays: tuple[NDArray[Any], ...], *, offsets: Tensor, least: int) -> None:
    """`kernel(arrays, cuts, num_threads, team)`, where `kernel` hands its arguments on to `on_team`.

    offsets: [A+1] int64, by which rows are dealt out in even shares. least: how many pairs are worth a thread.
    """
    bounds = offsets.numpy()
    num_rows, num_pairs = bounds.size - 1, int(bounds[-1])
    num_threads = max(1, min(torch.get_num_threads(), num_pairs // least))
    num_shares = 1 if num_threads == 1 else _SHARES * num_threads
    cuts = np.searchsorted(bounds, np.arange(num_shares + 1) * (num_pairs / num_shares))
    cuts[0], cuts[-1] = 0, num_rows
    kernel((*arrays, bounds), cuts, num_threads, 0 if num_threads == 1 else cpu_team.address())


def _inlined(function: Callable[..., Any]) -> Any:
    return intrinsic(function)  # numba calls it without the typing context


@_inlined
def widen(typing_context: Any, x: Any) -> Any:
    """A float32 as it is; a uint16 as the bfloat16 whose bits it holds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.float32:
            return args[0]
        upper = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(upper, ir.FloatType())

    return types.float32(x), generate


@_inlined
def narrow(typing_context: Any, x: Any, like: Any) -> Any:
    """The inverse of `widen`, in the type of `like`: rounded to the nearest bfloat16, ties to even."""

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


@_inlined
def _from_bits(typing_context: Any, x: Any) -> Any:
    """The float32 whose bits an int32 holds."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@numba.njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e**x in float32, within 2 units in the last place, for x in [-80, 80]; NaN for NaN."""
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # ln 2 in two parts (Cody and Waite), so that the remainder is exact.
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = _from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + np.float32(1)) * power


@_inlined
def on_team(typing_context: Any, kernel: Any, args: Any, cuts: Any, num_threads: Any, team: Any) -> Any:
    """In compiled code: `kernel(*args, cuts[i], cuts[i + 1])` for every i, on the threads of `cpu_team`.

    kernel: a compiled function that raises nothing. args: a tuple. cuts: [S+1] int64. team: the team's address, or 0
    for this thread alone.
    """
    result = kernel.get_call_type(typing_context, (*args.types, types.int64, types.int64), {})
    compiled_kernel = kernel.dispatcher.overloads[result.args]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(compiled_kernel.library)
        args_value, cuts_value = values[1], context.make_array(cuts)(context, builder, values[2])
        frame_type = ir.LiteralStructType([_I64, _I64, _I64.as_pointer(), args_value.type])
        body = _body(context, builder.module, compiled_kernel.fndesc, result, args, frame_type)
        frame = cgutils.alloca_once(builder, frame_type)
        num_shares = builder.sub(cuts_value.nitems, ir.Constant(_I64, 1))
        for place, value in enumerate((ir.Constant(_I64, 0), num_shares, cuts_value.data, args_value)):
            builder.store(value, cgutils.gep_inbounds(builder, frame, 0, place))
        data = builder.bitcast(frame, _BYTES)
        with builder.if_else(cgutils.is_null(builder, values[4])) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                parallel = ir.FunctionType(ir.VoidType(), [body.type, _BYTES, _I32, _I32]).as_pointer()
                number = builder.trunc(values[3], _I32)
                builder.call(builder.inttoptr(values[4], parallel), [body, data, number, ir.Constant(_I32, 0)])
        return context.get_dummy_value()

    return types.none(kernel, args, cuts, types.int64, types.int64), generate


def _body(context: Any, module: Any, kernel: Any, signature: Any, args: Any, frame_type: Any) -> Any:
    """`void body(void *frame)`: takes shares of the work by the frame's counter until there are none."""
    name = module.get_unique_name("keepmask_body")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_BYTES]), name)
    body.linkage = "internal"
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    frame = builder.bitcast(body.args[0], frame_type.as_pointer())
    counter, num_shares, cuts, values = (cgutils.gep_inbounds(builder, frame, 0, place) for place in range(4))
    num_shares, cuts, values = (builder.load(pointer) for pointer in (num_shares, cuts, values))
    take, work, done = (body.append_basic_block(name) for name in ("take", "work", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    share = builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", share, num_shares), work, done)
    builder.position_at_end(work)
    bounds = [builder.load(builder.gep(cuts, [builder.add(share, ir.Constant(_I64, i))])) for i in (0, 1)]
    context.call_internal_no_propagate(builder, kernel, signature, [*cgutils.unpack_tuple(builder, values), *bounds])
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
    return body
