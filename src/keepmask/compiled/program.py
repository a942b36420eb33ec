"""`Program`: compiled kernels that the threads of torch's team run one after the other, in a single call.

Between two kernels the threads wait for one another at a counter, which takes a fraction of a microsecond; handing
every kernel to the team from Python takes some twenty. The processor's clock is read after each, so that a program
knows where its time went.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from keepmask.compiled.team import Kernel, size_address
from keepmask.compiled.vectors import Vectors, call, pointer, statement

__all__ = ["Program"]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_FUNCTION, _WAITS, _TICK, _COUNTER = range(4)  # columns of a step; the kernel's own arguments follow its counter
_SPINS = 2048  # rounds of waiting before a thread offers its core to others: about a hundred microseconds


class Program:
    """Steps, each a kernel and its arguments: int64, or the name of a value that every run gives.

    Built with `add`, then run any number of times, by one thread at a time.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, Kernel, bool, tuple[int | str, ...]]] = []
        self._table: NDArray[np.int64] | None = None
        self._places: dict[str, NDArray[np.int64]] = {}
        self._elapsed = 0.0

    def add(self, label: str, kernel: Kernel, *arguments: int | str, waits: bool = True) -> None:
        """Run the kernel with these arguments after its counter.

        label: what its time is counted as. waits: whether the next step starts only when all threads have ended this
        one; if not, its time is counted with that of the next.
        """
        self._steps.append((label, kernel, waits, arguments))
        self._table = None

    def run(self, **values: int) -> None:
        """Run all steps with these values, and wait; the GIL is released meanwhile.

        Raises TypeError for other names than the arguments have.
        """
        table = self._laid_out() if self._table is None else self._table
        if values.keys() != self._places.keys():
            raise TypeError(f"values {sorted(values)}: must be {sorted(self._places)}")
        flat = table.reshape(-1)
        table[:, _COUNTER] = 0
        for name, value in values.items():
            flat[self._places[name]] = value
        start = time.perf_counter()
        _driver()(torch.get_num_threads(), *table.shape, table.ctypes.data, size_address())
        self._elapsed = time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Where the time of the latest run went, by label; nothing before it, or on processors other than x86."""
        found: dict[str, float] = defaultdict(float)
        if _IS_X86 and self._table is not None and self._elapsed:
            waiting = np.flatnonzero(self._table[:, _WAITS])
            ticks = np.diff(self._table[waiting, _TICK])
            for step, share in zip(waiting[1:] - 1, ticks / ticks.sum(), strict=True):
                found[self._steps[step][0]] += share * self._elapsed
        return found

    def _laid_out(self) -> NDArray[np.int64]:
        """A row a step, after a first one in which threads only wait for one another."""
        width = _COUNTER + 1 + max(len(arguments) for *_, arguments in self._steps)
        table = np.zeros((1 + len(self._steps), width), np.int64)
        table[0, _WAITS] = 1
        places: dict[str, list[int]] = defaultdict(list)
        for at, (_, kernel, waits, arguments) in enumerate(self._steps, 1):
            table[at, _FUNCTION], table[at, _WAITS] = kernel.address, waits
            for column, argument in enumerate(arguments, _COUNTER + 1):
                if isinstance(argument, str):
                    places[argument].append(at * width + column)
                else:
                    table[at, column] = argument
        self._table, self._places = table, {name: np.array(each) for name, each in places.items()}
        return table


@cache
def _driver() -> Kernel:
    """What every thread of the team does. Its counter is how often any thread has come to a place to wait."""
    wait = statement(_wait)

    @cfunc(types.void(types.voidptr), nopython=True)
    def driver(data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        a = carray(data, (5,), np.int64)
        table = carray(pointer(a[3]), (a[1], a[2]), np.int64)
        num_threads = _team_size(a[4])
        arrivals = 0
        for at in range(a[1]):
            step = a[3] + 8 * at * a[2]
            if table[at, _FUNCTION] != 0:
                call((table[at, _FUNCTION], step + 8 * _COUNTER))
            if table[at, _WAITS] != 0:
                arrivals += num_threads
                wait((a.ctypes.data, arrivals, step + 8 * _TICK))

    return Kernel(driver, 4)


def _wait(b: Any, args: list[Any]) -> None:
    """Count oneself at the counter and wait until it is at `arrivals`; who is last stores the clock at the tick."""
    counter, tick = (b.inttoptr(arg, _I64.as_pointer()) for arg in (args[0], args[2]))
    arrivals, external = args[1], Vectors(b, "float32").external
    before = b.atomic_rmw("add", counter, _I64(1), "acq_rel")
    if _IS_X86:  # others do not let programs read theirs
        with b.if_then(b.icmp_signed("==", b.add(before, _I64(1)), arrivals)):
            b.store(b.call(external("llvm.readcyclecounter", _I64), []), tick)
    spins = cgutils.alloca_once(b, _I64)
    b.store(_I64(0), spins)
    look, stay, done = (b.append_basic_block(name) for name in ("look", "stay", "done"))
    b.branch(look)
    b.position_at_end(look)
    b.cbranch(b.icmp_signed(">=", b.load_atomic(counter, "acquire", 8), arrivals), done, stay)
    b.position_at_end(stay)
    b.store(b.add(b.load(spins), _I64(1)), spins)
    with b.if_else(b.icmp_signed("<", b.load(spins), _I64(_SPINS))) as (soon, late):
        with soon:
            if _IS_X86:
                b.call(external("llvm.x86.sse2.pause", ir.VoidType()), [])
        with late:
            b.call(external("sched_yield", _I32), [])
    b.branch(look)
    b.position_at_end(done)


def _build_team_size(_context: Any, address: Any) -> tuple[Any, Any]:
    def build(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        size = cgutils.alloca_once_value(b, _I64(1))
        b.store(_I64(1), size)
        with b.if_then(b.icmp_signed("!=", arguments[0], _I64(0))):
            kind = ir.FunctionType(_I32, [])
            b.store(b.sext(b.call(b.inttoptr(arguments[0], kind.as_pointer()), []), _I64), size)
        return b.load(size)

    return types.int64(address), build


_team_size = intrinsic(_build_team_size)
"""For compiled code: the threads of the team, from the address that says it; 1 where there is none."""
