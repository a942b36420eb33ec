"""`Ours`: keepmask's engine as the benchmark drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from keepmask.bench.phases import PHASES, PhaseClock, phases_of
from keepmask.bench.workload import SAMPLING, Workload
from keepmask.engine.request import Request
from keepmask.errors import EngineError
from keepmask.llm import LLM
from keepmask.params import SamplingParams

__all__ = ["VARIANTS", "Ours", "Timing"]

VARIANTS: dict[str, dict[str, Any]] = {
    "keepmask": {"return_sampling_mask": True},
    "keepmask, masks off": {"return_sampling_mask": False},
}
"""What the requests of each variant ask for; the first one is compared with other engines."""


class Timing(NamedTuple):
    """One run of a workload, in seconds."""

    total: float
    """From the first request's arrival to the last output."""
    first_tokens: list[float]
    """Of each request, from arrival to its first token."""
    steps: list[float]
    """Of each step in the second half of the run, where all completions decode."""


class Ours:
    """An LLM whose steps are timed. options: those of `LLM`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = LLM(**{"logprobs_mode": "processed_logprobs"} | options)
        runner = self.llm.engine.runner
        self.vocab_size, self.device = runner.vocab_size, runner.device
        for layer in runner.cache.layers:  # takes its memory now, not in whatever is measured first
            layer.keys.zero_()
            layer.values.zero_()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, workload: Workload, prompts: list[list[int]], asks: dict[str, Any]) -> Timing:
        """Complete the prompts; none of them is known from before."""
        params = SamplingParams(
            **SAMPLING, n=workload.n, max_tokens=workload.output, ignore_eos=True, logprobs=0, **asks
        )
        self.llm.engine.reset_prefix_cache()
        start = time.perf_counter()
        watch = _Watch(start)
        engine, own = self.llm.engine, vars(self.llm.engine).get("step")
        engine.step = watch.steps(engine.step)  # type: ignore[method-assign]
        try:
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        finally:
            del engine.step
            if own is not None:  # measured by others too
                engine.step = own  # type: ignore[method-assign]
        total = time.perf_counter() - start
        made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        if made != workload.num_tokens:
            raise EngineError(f"{workload.label}: {made} tokens came instead of {workload.num_tokens}")
        return Timing(total, list(watch.first.values()), watch.times[len(watch.times) // 2 :])

    def phases(self, workload: Workload, prompts: list[list[int]], asks: dict[str, Any]) -> dict[str, float]:
        """Milliseconds a step spends in each of `PHASES`, over a whole run."""
        clock = PhaseClock(self.wait)
        engine = self.llm.engine
        before = engine.stats().num_steps
        with phases_of(engine, clock):
            self.run(workload, prompts, asks)
        num_steps = engine.stats().num_steps - before
        return {phase: 1e3 * clock.seconds[phase] / num_steps for phase in PHASES}


class _Watch:
    """Times of steps, and of each request's first token."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.times: list[float] = []
        self.first: dict[str, float] = {}

    def steps(self, step: Callable[[], list[Request]]) -> Callable[[], list[Request]]:
        def timed() -> list[Request]:
            begin = time.perf_counter()
            touched = step()
            end = time.perf_counter()
            self.times.append(end - begin)
            for request in touched:
                self.first.setdefault(request.request_id, end - self._start)
            return touched

        return timed
