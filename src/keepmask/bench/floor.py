"""`Floor`: the least time a decode step can take here, from the model's own matrices and the cache's bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from keepmask.engine.runner import ModelRunner
from keepmask.kernels.packed_linear import PackedLinear

__all__ = ["Floor"]

_STREAM_BYTES = 2**28  # past every cache
_REPEATS = 7


class Floor:
    """Times the model's matrix products at a batch size, and how fast memory is read; both measured when built.

    The products are those of a decode step in its order, every layer with its own weights and the head, so that
    weights come from memory as they do in a step. Attention is counted as the bytes of keys and values it reads.
    """

    def __init__(self, runner: ModelRunner, *, wait: Callable[[], None]) -> None:
        self._runner, self._wait = runner, wait
        decoder = runner._decoder
        self._linears = decoder.linears if decoder is not None else _plain(runner)
        self._linears.append(runner._linear_head)
        data = torch.ones(_STREAM_BYTES // 4, dtype=torch.float32, device=runner.device)
        self.bytes_per_s = data.nbytes / min(self._time(data.sum) for _ in range(_REPEATS))
        """Memory bandwidth of reading."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return self._runner.kv_cache_bytes / (self._runner.num_blocks * self._runner.cache.block_size)

    @torch.inference_mode()
    def matrices_s(self, B: int) -> float:
        """Seconds of all matrix products of a step over B rows; the median of several passes."""
        inputs = {
            width: torch.randn(B, width, dtype=self._runner.dtype, device=self._runner.device)
            for width in {linear.in_features for linear in self._linears}
        }

        def products() -> None:
            for linear in self._linears:
                linear(inputs[linear.in_features])

        products()
        return median(self._time(products) for _ in range(_REPEATS))

    def step_s(self, B: int, context: float) -> float:
        """Seconds of a decode step of B completions that see `context` tokens each."""
        return self.matrices_s(B) + B * context * self.kv_bytes_per_token / self.bytes_per_s

    def _time(self, run: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start


def _plain(runner: ModelRunner) -> list[PackedLinear]:
    """The linear layers of a model that runs its own code."""
    modules = [module for module in runner.model.base_model.modules() if isinstance(module, nn.Linear)]
    return [PackedLinear([module.weight], module.bias) for module in modules]
