"""Copies to the host on a stream of their own, on a CUDA device: what they wait for, and what they keep alive.

`busy` keeps a stream from going on for a while, so that whoever does not wait for it comes too early.
"""

import gc

import pytest
import torch

from keepmask.sampling.transfer import HostCopies, to_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N = 2**20
CYCLES = 300_000_000  # a fifth of a second


@pytest.fixture
def copies():
    made = HostCopies(torch.device("cuda", torch.cuda.current_device()))
    made.start([torch.zeros(N, device="cuda")]).wait()  # its first buffer
    return made


def busy(stream=None):
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(CYCLES)


def full(value):
    return torch.full((N,), float(value), device="cuda")


def test_a_copy_sees_what_the_current_stream_was_told_before_it(copies):
    source = full(1)
    busy()
    source.fill_(7)
    transfer = copies.start([source])
    source.fill_(8)
    assert not transfer.ready.query(), "nothing was waited for"
    assert (transfer.wait()[0] == 7).all()


def test_the_current_stream_does_not_wait_for_the_copy(copies):
    busy(copies._stream)
    transfer = copies.start([full(3)])
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not transfer.ready.query()
    assert (transfer.wait()[0] == 3).all()


def test_waiting_waits(copies):
    copies.start([full(1)]).wait()
    busy(copies._stream)
    assert (copies.start([full(2)]).wait()[0] == 2).all(), "read before the copy was complete"


def test_memory_that_is_copied_from_is_not_given_to_others_meanwhile(copies):
    busy(copies._stream)
    transfer = copies.start([full(3)])
    others = [full(9) for _ in range(16)]  # would be put where the source was, had nobody kept it
    torch.cuda.current_stream().synchronize()
    assert not transfer.ready.query()
    assert (transfer.wait()[0] == 3).all()
    assert len(others) == 16


def test_the_source_of_an_abandoned_copy_is_kept_until_it_is_complete(copies):
    torch.cuda.synchronize()
    busy(copies._stream)
    transfer = copies.start([full(3)])
    buffer = transfer._buffer
    del transfer
    gc.collect()
    others = [full(9) for _ in range(16)]
    torch.cuda.current_stream().synchronize()
    buffer.ready.synchronize()
    assert (buffer.memory[: 4 * N].view(torch.float32) == 3).all()
    assert len(others) == 16


def test_a_buffer_is_not_used_again_while_an_abandoned_copy_writes_it(copies):
    busy(copies._stream)
    first = copies.start([full(3)])
    address = first.arrays[0].ctypes.data
    del first
    gc.collect()
    second = copies.start([full(5)])
    assert second.arrays[0].ctypes.data != address
    assert (second.wait()[0] == 5).all()
    torch.cuda.synchronize()
    assert copies.start([full(6)]).arrays[0].ctypes.data in (address, second.arrays[0].ctypes.data)


def test_a_buffer_is_not_used_again_while_its_arrays_are_read(copies):
    first = copies.start([full(3)])
    first.ready.synchronize()
    second = copies.start([full(5)])
    second.ready.synchronize()
    assert (first.arrays[0] == 3).all()
    first.release()
    second.release()


def test_buffers_are_pinned_and_few(copies):
    addresses = set()
    for value in range(20):
        transfer = copies.start([full(value)])
        addresses.add(transfer.arrays[0].ctypes.data)
        transfer.wait()
    assert len(addresses) == 1
    assert len(copies._buffers) == 1
    assert copies._buffers[0].memory.is_pinned()


def test_tensors_of_any_type_and_stride_arrive_as_they_were(copies):
    tensors = [
        torch.arange(5, device="cuda"),
        torch.rand(7, 9, device="cuda")[:, 2:5],
        torch.tensor([True, False, True], device="cuda"),
        torch.zeros((0, 4), dtype=torch.float64, device="cuda"),
        torch.arange(3, dtype=torch.int32, device="cuda"),
    ]
    for array, tensor in zip(copies.start(tensors).wait(), tensors, strict=True):
        assert array.tolist() == tensor.tolist()
        assert array.shape == tuple(tensor.shape)


def test_an_upload_is_queued_and_keeps_what_it_was_given(copies):
    array = torch.arange(N).numpy().copy()
    busy()
    tensor = to_device(array, torch.device("cuda"))
    array[:] = -1
    again = [to_device(array, torch.device("cuda")) for _ in range(8)]
    assert torch.equal(tensor.cpu(), torch.arange(N))
    assert len(again) == 8
