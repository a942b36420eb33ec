"""Numba kernels that share rows among the threads torch has: `kernel(*arguments, start, stop)` does rows start to stop.

Such a kernel is called by another compiled function of three lines, its runner, which hands its arguments to `on_team`
as they are: both come from numba's cache. The GIL is released meanwhile. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from keepmask.compiled import team

__all__ = ["Runner", "on_team", "run_pairs", "run_rows"]

Runner = Callable[[Any, Any, int, int], None]
"""A compiled `runner(arguments, cuts, num_threads, team)` whose body is `on_team(kernel, ...)` with the same."""

_I32, _I64, _BYTES = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
_SHARES = 4  # of the work, for each thread: one that comes late takes fewer
_LEAST_WORK = 2**20


def run_rows(runner: Runner, num_rows: int, work: int, *arguments: Any) -> None:
    """Run a kernel on all rows. work: elements it touches in all; little work stays on this thread."""
    num_threads = max(1, min(torch.get_num_threads(), num_rows, 1 + work // _LEAST_WORK))
    num_shares = 1 if num_threads == 1 else min(num_rows, _SHARES * num_threads)
    cuts = np.arange(num_shares + 1) * num_rows // num_shares
    runner(arguments, cuts, num_threads, 0 if num_threads == 1 else team.address())


def run_pairs(runner: Runner, arguments: tuple[NDArray[Any], ...], *, offsets: Tensor, least: int) -> None:
    """Run a kernel, whose last argument is `offsets`, on all rows.

    offsets: [A+1] int64, by which rows are dealt out in even shares. least: how many pairs are worth a thread.
    """
    bounds = offsets.numpy()
    num_rows, num_pairs = bounds.size - 1, int(bounds[-1])
    num_threads = max(1, min(torch.get_num_threads(), num_pairs // least))
    num_shares = 1 if num_threads == 1 else _SHARES * num_threads
    cuts = np.searchsorted(bounds, np.arange(num_shares + 1) * (num_pairs / num_shares))
    cuts[0], cuts[-1] = 0, num_rows
    runner((*arguments, bounds), cuts, num_threads, 0 if num_threads == 1 else team.address())


def _on_team(typing_context: Any, kernel: Any, args: Any, cuts: Any, num_threads: Any, team: Any) -> Any:
    """In compiled code: `kernel(*args, cuts[i], cuts[i + 1])` for every i, on the threads of `team`.

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


on_team: Any = intrinsic(_on_team)
"""In compiled code: `kernel(*args, cuts[i], cuts[i + 1])` for every i, on the threads of `team`."""


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
