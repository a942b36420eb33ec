"""`Floor`: the least time a decode step can take here, from the model's own matrices and the cache's bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from keepmask.engine.model_runner import ModelRunner
from keepmask.forward.linear import is_compiled, linear_layer
from keepmask.forward.linear_torch import Linear

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
        own = runner.linears
        self._linears = own if len(own) > 1 else [*_plain(runner), *own]
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
            width: torch.randn(-(-B // 16) * 16, width, dtype=self._runner.dtype, device=self._runner.device)
            for width in {each.in_features for each in self._linears}
        }
        if all(is_compiled(each) for each in self._linears):
            return median(self._time(_in_one_call(self._linears, inputs, B)) for _ in range(_REPEATS))

        def products() -> None:
            for each in self._linears:
                each(inputs[each.in_features][:B])

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


def _in_one_call(linears: list[Any], inputs: dict[int, Tensor], B: int) -> Callable[[], object]:
    """The products as one call of compiled code."""
    from keepmask.compiled.program import Program

    program, rows = Program(), max(len(each) for each in inputs.values())
    out = torch.empty(rows, max(each.out_features for each in linears), dtype=next(iter(inputs.values())).dtype)
    for each in linears:
        places = each.parts_of(out.data_ptr(), out.element_size())
        each.add_to(program, tokens=inputs[each.in_features].data_ptr(), out=places)

    def run(_out: Tensor = out) -> None:
        program.run(T=B)

    run()
    return run


def _plain(runner: ModelRunner) -> list[Linear]:
    """The linear layers of a model that runs its own code."""
    modules = [module for module in runner.model.base_model.modules() if isinstance(module, nn.Linear)]
    return [linear_layer([module.weight], [module.bias]) for module in modules]
