"""Arrays to a device and back. What streams and events do is tested on a CUDA device."""

import numpy as np
import torch

from keepmask.sampling.transfer import HostCopies, to_device

CPU = torch.device("cpu")


def test_arrays_become_tensors_of_the_same_numbers():
    array = np.arange(12).reshape(3, 4)[:, ::2]
    assert to_device(array, CPU).tolist() == array.tolist()
    assert to_device(np.zeros(0, np.int64), CPU).dtype == torch.int64


def test_on_a_cpu_a_transfer_is_complete_and_its_arrays_are_its_own():
    tensors = [torch.arange(5), torch.rand(2, 3)[:, 1:], torch.zeros((0, 4), dtype=torch.float64)]
    transfer = HostCopies(CPU).start(tensors)
    expected = [tensor.numpy().copy() for tensor in tensors]
    tensors[0].zero_()
    assert transfer.ready is None
    for array, original in zip(transfer.wait(), expected, strict=True):
        np.testing.assert_array_equal(array, original)
        assert array.dtype == original.dtype
    transfer.release()
