"""`phases_of`: where the time of an engine's steps goes, measured from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from keepmask.engine.core import Engine
from keepmask.engine.model_runner import ModelRunner
from keepmask.forward import attention, decoder_layer
from keepmask.forward.linear_torch import Linear

__all__ = ["PHASES", "PhaseClock", "phases_of"]

PHASES = {
    "linear": "matrix products of the layers",
    "attention": "attention over the cache",
    "model": "the rest of the forward: norms, rotation, activation, embedding",
    "head": "logits of the sampled positions",
    "sampler": "filters, draw, log-probs",
    "capture": "supports to the host",
    "scheduling": "admission, blocks, laying out the batch",
    "output": "stop conditions, commits, text, results",
}
"""What a step is divided into; each phase without the others inside it."""


class PhaseClock:
    """Seconds in each phase. Where wrapped functions call one another, time counts for the innermost.

    wait: called before each reading; waits for a device that works on its own.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._wait, self._now = wait, now
        self._open: list[str] = []
        self._since = 0.0

    def wrap(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, on the clock."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def _turn(self) -> None:
        """Close the account of the phase that was running."""
        if self._open:
            self._wait()
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def phases_of(engine: Engine, clock: PhaseClock) -> Iterator[None]:
    """While this is open, the engine's steps run on the clock; afterwards it is as it was.

    The engine's own parts are wrapped on this one instance. Layers share their attention and matrix products through
    names in modules, which are exchanged meanwhile: no other engine should run.
    """
    runner = engine.runner
    with ExitStack() as stack:
        for owner, name, phase in (
            (engine, "add", "scheduling"),
            (engine, "step", "scheduling"),
            (engine, "_accept", "output"),
            (engine, "output", "output"),
            (runner, "head", "head"),
            (engine.sampler, "sample", "sampler"),
            (engine.sampler, "_capture", "capture"),
            (attention, "attend", "attention"),
            (decoder_layer, "attend", "attention"),
        ):
            stack.enter_context(_replaced(owner, name, clock.wrap(getattr(owner, name), phase)))
        stack.enter_context(_replaced(runner, "forward", _divided(runner, clock)))
        for kind in {type(linear) for linear in runner.linears}:
            stack.enter_context(_replaced(kind, "__call__", _product(kind, runner.linear_head, clock)))
        yield


def _divided(runner: ModelRunner, clock: PhaseClock) -> Callable[..., Any]:
    """The runner's forward on the clock, the parts of one that is a single call of compiled code by its own account."""
    timed = clock.wrap(runner.forward, "model")

    def forward(*args: Any) -> Any:
        hidden = timed(*args)
        for phase, seconds in runner.seconds().items():
            clock.seconds["model"] -= seconds
            clock.seconds[phase] += seconds
        return hidden

    return forward


def _product(kind: type[Linear], head: Linear, clock: PhaseClock) -> Callable[..., Any]:
    """The product of a kind of linear layer, on the clock unless it is the head's."""
    plain = kind.__call__
    timed = clock.wrap(plain, "linear")

    def product(layer: Linear, x: Tensor) -> Tensor:
        result: Tensor = plain(layer, x) if layer is head else timed(layer, x)
        return result

    return product


@contextmanager
def _replaced(owner: object, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """owner.name is `value` meanwhile. What it had of its own comes back; what its class gave it shows again."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
