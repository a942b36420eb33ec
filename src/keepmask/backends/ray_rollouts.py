"""`RayRollouts`: any backend, once in each of several Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.backends.base import Rollouts, weight_parts
from keepmask.backends.rollout_pool import KeptWeights, PoolMember, RolloutPool
from keepmask.errors import BackendError
from keepmask.extras import needs
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RayRollouts"]


class RayRollouts(RolloutPool):
    """`RolloutPool` of actors; an actor that died is started anew.

    make: gives the backend, in the actor's process; Ray pickles it: `functools.partial(LLM, "folder", dtype=...)`.
    num_cpus, num_gpus: of each actor. placement_group: actor i goes into its bundle i; without one Ray places them.
    options: of `RolloutPool`.

    Rollouts and weights cross Ray's object store as arrays, which are read there without a copy: a rollout holds its
    place in the store until it is given up. Ray runs as `ray.init` started it; unless that was called, Ray starts by
    itself on this machine.
    """

    def __init__(
        self,
        make: Callable[[], Rollouts],
        num_actors: int,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        placement_group: Any = None,
        concurrency: int = 256,
        **options: Any,
    ) -> None:
        self._make, self._placement_group = make, placement_group
        # Beyond the prompts there is always a thread for new weights and questions.
        self._actor_options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_concurrency": concurrency + 4}
        actors = [self._started(number) for number in range(num_actors)]
        super().__init__(actors, concurrency=concurrency, **options)

    def _started(self, number: int) -> _Actor:
        options = dict(self._actor_options)
        if self._placement_group is not None:
            with needs("ray", "RayRollouts"):
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group, placement_group_bundle_index=number
            )
        return _Actor(self._make, options)

    def _keep(self, weights: Mapping[str, Tensor]) -> KeptWeights:
        return _StoredWeights(weights)

    def _renewed(self, number: int, backend: PoolMember) -> PoolMember:
        backend.close()
        return self._started(number)


class _StoredWeights(KeptWeights):
    """Weights in Ray's object store, once for all actors, as safetensors files of about 64 MB."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        ray = _ray()
        self.parts = [ray.put(np.frombuffer(part, np.uint8)) for part in weight_parts(weights.items())]

    def checksums(self) -> dict[str, str]:
        from keepmask.engine.weights import checksum  # loads torch

        ray = _ray()
        return {name: checksum(tensor) for part in self.parts for name, tensor in _loaded(ray.get(part)).items()}


class _Replica:
    """What runs in an actor's process."""

    def __init__(self, make: Callable[[], Rollouts]) -> None:
        self._backend = make()

    def rollouts(self, prompt: ArrayLike, params: SamplingParams) -> list[Rollout]:
        (found,) = self._backend.rollouts([prompt], [params])
        return found

    def update_weights(self, version: str | None, *parts: NDArray[np.uint8]) -> str:
        weights: dict[str, Tensor] = {}
        for part in parts:
            weights.update(_loaded(part))
        return self._backend.update_weights(weights, version=version)

    def ask(self, method: str, *args: Any) -> Any:
        told = getattr(self._backend, method)
        return told(*args) if callable(told) else told


class _Actor:
    """A `_Replica` seen from the driver: a `PoolMember`."""

    def __init__(self, make: Callable[[], Rollouts], options: Mapping[str, Any]) -> None:
        self._ray = _ray()
        self.handle = self._ray.remote(_Replica).options(max_restarts=0, max_task_retries=0, **options).remote(make)

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        asked = [self.handle.rollouts.remote(*pair) for pair in zip(prompts, each, strict=True)]
        return [self._answer(ref) for ref in asked]

    def rollouts_as_finished(self, prompts: Sequence[ArrayLike], params: Any) -> Any:
        yield from enumerate(self.rollouts(prompts, params))

    def update_weights(self, weights: Mapping[str, Tensor], *, version: str | None = None) -> str:
        assert isinstance(weights, _StoredWeights)
        return str(self._answer(self.handle.update_weights.remote(version, *weights.parts)))

    @property
    def weight_version(self) -> str:
        return str(self._ask("weight_version"))

    def weight_checksums(self) -> Mapping[str, str]:
        return dict(self._ask("weight_checksums"))

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        resolved: SamplingParams = self._ask("resolved_params", prompt, params)
        return resolved

    def close(self) -> None:
        self._ray.kill(self.handle)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._answer(self.handle.ask.remote(method, *args))

    def _answer(self, ref: Any) -> Any:
        """What the actor returned; raises what it raised, and BackendError where it died."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayError as error:
            raise BackendError(f"a Ray actor failed: {type(error).__name__}: {str(error)[:1000]}") from error


def _ray() -> Any:
    with needs("ray", "RayRollouts"):
        import ray
    return ray


def _loaded(part: NDArray[np.uint8]) -> dict[str, Tensor]:
    import safetensors.torch  # loads torch

    tensors: dict[str, Tensor] = safetensors.torch.load(part.tobytes())
    return tensors
