"""Programs: steps one after the other on every thread, each step's work done once, and their time accounted for."""

import os
import platform

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types

from keepmask.compiled.program import Program
from keepmask.compiled.team import Kernel
from keepmask.compiled.vectors import next_item, pointer

HAS_CLOCK = platform.machine() == "x86_64"


@cfunc(types.void(types.voidptr), nopython=True)
def add_neighbours(data):  # out[i] = source[i] + source[size - 1 - i]: reads what other threads wrote
    a = carray(data, (4,), np.int64)
    size = a[1]
    source, out = carray(pointer(a[2]), (size,), np.int64), carray(pointer(a[3]), (size,), np.int64)
    i = next_item(data)
    while i < size:
        out[i] = source[i] + source[size - 1 - i]
        i = next_item(data)


ADD = Kernel(add_neighbours, 3)


def chain(size, length):
    """A program that adds neighbours `length` times, from one array to the other and back."""
    arrays = [np.arange(size), np.zeros(size, np.int64)]
    program = Program()
    for at in range(length):
        program.add("odd" if at % 2 else "even", ADD, "size", *(arrays[(at + k) % 2].ctypes.data for k in (0, 1)))
    return program, arrays


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_each_step_sees_all_that_the_one_before_it_wrote(num_threads, size):
    program, arrays = chain(size, 40)
    for _ in range(20):
        want = arrays[0].copy()
        for _ in range(40):
            want = want + want[::-1]
        program.run(size=size)
        assert np.array_equal(arrays[0], want)
        arrays[0][:] = np.arange(size)


def test_values_are_those_of_the_run():
    program, (first, second) = chain(6, 1)
    program.run(size=2)
    assert second.tolist() == [1, 1, 0, 0, 0, 0]
    program.run(size=6)
    assert second.tolist() == [5] * 6
    assert first.tolist() == list(range(6))


def test_steps_that_nothing_waits_for_are_run_once_each(num_threads):
    source, outs = np.arange(50), np.zeros((8, 50), np.int64)
    program = Program()
    for at, out in enumerate(outs):
        program.add("adding", ADD, 50, source.ctypes.data, out.ctypes.data, waits=at == 7)
    program.run()
    assert (outs == 49).all()
    assert set(program.seconds()) == ({"adding"} if HAS_CLOCK else set())


def test_other_values_than_the_steps_name_are_refused():
    program, _ = chain(3, 1)
    for values in ({}, {"size": 3, "length": 1}, {"length": 3}):
        with pytest.raises(TypeError, match=r"must be \['size'\]"):
            program.run(**values)


@pytest.mark.skipif(not HAS_CLOCK, reason="reads the clock of x86 processors")
def test_time_is_divided_among_labels_by_where_it_went():
    size = 200_000
    data = [np.zeros(size, np.int64) for _ in range(2)]
    program = Program()
    program.add("short", ADD, 10, data[0].ctypes.data, data[1].ctypes.data)
    for _ in range(10):
        program.add("long", ADD, size, data[0].ctypes.data, data[1].ctypes.data)
    assert program.seconds() == {}
    program.run()
    seconds = program.seconds()
    assert seconds.keys() == {"short", "long"}
    assert 0 < 2 * seconds["short"] < seconds["long"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_run_one_on_one_thread():
    program, arrays = chain(50, 2)
    program.run(size=50)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        program.run(size=50)
        os._exit(0 if (arrays[0] == 8 * 49).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
