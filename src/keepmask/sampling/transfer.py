"""Arrays to a device and tensors back; nothing waits but `Transfer.wait`, and whoever is given `Transfer.ready`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HostCopies", "Transfer", "to_device"]

_ALIGNMENT = 8  # bytes: the widest type there is
_LEAST_BYTES = 4096


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor of the device. For a CUDA device the copy is queued on the current stream, from pinned
    memory that PyTorch keeps until it is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopies:
    """Copies tensors of one device to the host, on a stream of its own, through pinned buffers that are used again.

    A buffer, and the memory it is copied from, stay as they are until the copy is complete, even if nobody waits for
    it. On a CPU there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._padding = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=device)
        self._buffers: list[_Buffer] = []

    def start(self, tensors: Sequence[Tensor]) -> Transfer:
        """Queue the copy of these tensors as the current stream will have left them."""
        if self._stream is None:
            return Transfer([tensor.numpy().copy() for tensor in tensors], None)
        packed, offsets = self._packed(tensors)
        buffer = self._take(packed.numel())
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.memory[: packed.numel()].copy_(packed, non_blocking=True)
            buffer.ready.record(self._stream)
        buffer.source = packed
        memory = buffer.memory.numpy()
        arrays = [
            memory[offset : offset + tensor.nbytes].view(_numpy_dtype(tensor)).reshape(tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        transfer = Transfer(arrays, buffer)
        buffer.user = weakref.ref(transfer)
        return transfer

    def _packed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """One tensor of bytes that holds them all, and where each begins."""
        parts, offsets, end = [self._padding[:0]], [], 0
        for tensor in tensors:
            offsets.append(end)
            gap = -tensor.nbytes % _ALIGNMENT
            parts += [tensor.reshape(-1).view(torch.uint8), self._padding[:gap]]
            end += tensor.nbytes + gap
        return torch.cat(parts), offsets

    def _take(self, num_bytes: int) -> _Buffer:
        """A buffer that nothing uses: the smallest that is large enough, or a new one in place of all that are not."""
        free = [buffer for buffer in self._buffers if buffer.is_free()]
        if fitting := [buffer for buffer in free if buffer.memory.numel() >= num_bytes]:
            return min(fitting, key=lambda buffer: buffer.memory.numel())
        size = 1 << (max(num_bytes, _LEAST_BYTES) - 1).bit_length()
        with torch.inference_mode(mode=False):  # whichever mode comes first, both may write it
            new = _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=True), _event())
        self._buffers = [buffer for buffer in self._buffers if buffer not in free] + [new]
        return new


class Transfer:
    """Host copies of tensors. `arrays` hold them once `ready` is (None: they do already), and until `release`."""

    __slots__ = ("__weakref__", "_buffer", "arrays")

    def __init__(self, arrays: list[NDArray[Any]], buffer: _Buffer | None) -> None:
        self.arrays = arrays
        self._buffer = buffer

    @property
    def ready(self) -> torch.cuda.Event | None:
        """Says when the copy is complete."""
        return None if self._buffer is None else self._buffer.ready

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, complete and in memory of their own."""
        if self._buffer is None:
            return self.arrays
        self._buffer.ready.synchronize()
        arrays = [array.copy() for array in self.arrays]
        self.release()
        return arrays

    def release(self) -> None:
        """Give the arrays' memory back; call it once the copy is complete and read."""
        if self._buffer is not None:
            self._buffer.user = None
            self._buffer.source = None


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Tensor
    """[bytes] uint8, pinned."""
    ready: torch.cuda.Event
    """Recorded behind the copy into it."""
    source: Tensor | None = None
    """What is copied from; held until the copy is complete, so that nothing else is put there."""
    user: weakref.ref[Transfer] | None = None

    def is_free(self) -> bool:
        """Whether nobody reads it and no copy writes it."""
        if self.user is not None and self.user() is not None:
            return False
        if self.source is not None and not self.ready.query():  # type: ignore[no-untyped-call]
            return False
        self.source = None
        return True


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _numpy_dtype(tensor: Tensor) -> np.dtype[Any]:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype
