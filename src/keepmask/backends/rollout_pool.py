"""`RolloutPool`: several backends as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from keepmask.backends.base import Rollouts, tied_once
from keepmask.errors import BackendError, ConfigError, EngineError, KeepmaskError, RequestError
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptWeights", "PoolMember", "RolloutPool"]

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0  # between two tries to bring a member back
_FAILURES = (BackendError, EngineError)
_Told = TypeVar("_Told")


@runtime_checkable
class PoolMember(Rollouts, Protocol):
    """`Rollouts` that also tell what weights they hold; `LLM`, the HTTP clients and Ray's actors do."""

    def weight_checksums(self) -> Mapping[str, str]:
        """A digest of every weight, by its name; equal for equal weights in engines of one kind."""


@dataclass(slots=True, eq=False)
class _Member:
    number: int
    backend: PoolMember
    under_way: int = 0
    failure: Exception | None = None
    """Why it is set aside; None while it serves."""


class RolloutPool:
    """Several backends of the same model as one: `Rollouts` itself.

    Each prompt goes to the member with the fewest under way. A member that raises BackendError or EngineError is set
    aside, and what it had under way is drawn by others. It serves again after it was asked for its weights: their
    version and checksums must be the pool's, where need be after they were pushed again. A prompt's rollouts are taken
    whole from the one try that succeeded, so none is lost and none comes twice.

    Prompts without a seed are given one, so that no two members draw the same noise and a second try draws what the
    first would have.

    concurrency: prompts under way at one member. attempts: members a prompt is tried at before its error is raised.
    patience_s: how long a prompt waits while no member serves. seed: of the seeds; None takes the machine's entropy.
    Raises ConfigError for members whose weights differ or cannot be told.
    """

    def __init__(
        self,
        members: Sequence[Rollouts],
        *,
        concurrency: int = 256,
        attempts: int = 3,
        patience_s: float = 600.0,
        seed: int | None = None,
    ) -> None:
        for name, value in (("members", len(members)), ("concurrency", concurrency), ("attempts", attempts)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self._members = [_Member(number, _member(number, backend)) for number, backend in enumerate(members)]
        self._concurrency, self._attempts, self._patience_s = concurrency, attempts, patience_s
        self._seeds = np.random.default_rng(seed)
        self._changed = threading.Condition()
        """Held to read or change members and seeds; told whenever a member has room again."""
        self._updating = threading.Lock()
        """Held while weights change or are verified."""
        self._closed = threading.Event()
        self._kept: KeptWeights | None = None
        """The weights of the last update."""
        self._version = self._members[0].backend.weight_version
        self._first_checksums = self._members[0].backend.weight_checksums()
        for member in self._members[1:]:
            if problem := self._difference(member.backend, self._first_checksums):
                raise ConfigError(f"members[{member.number}]: {problem}; all must start from the same weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_serving(self) -> int:
        """Members that draw now; the others are set aside."""
        with self._changed:
            return len(self._serving())

    @property
    def weight_version(self) -> str:
        """See `Rollouts`."""
        return self._version

    def close(self) -> None:
        """Close every member."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            backends = [member.backend for member in self._members]
        for backend in backends:
            backend.close()

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """See `Rollouts`."""
        return self._at_any(lambda backend: backend.resolved_params(prompt, params))

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See `Rollouts`."""
        found = dict(self.rollouts_as_finished(prompts, params))
        return [found[at] for at in range(len(prompts))]

    def rollouts_as_finished(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """See `Rollouts`. After the iterator is closed no prompt is begun; what is under way ends at its member, and
        counts there until it has.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise RequestError(f"params: {len(each)} for {len(prompts)} prompts; give one for all or one for each")
        return self._as_finished(prompts, [self._seeded(own) for own in each])

    def update_weights(self, weights: Mapping[str, Tensor], *, version: str | None = None) -> str:
        """See `Rollouts`. The pool keeps a copy, for members that come back.

        RequestError, where the weights do not fit, leaves the pool as it was. Members that fail are set aside.
        """
        with self._updating:
            kept = self._keep(weights)

            def push(member: _Member, name: str | None) -> str | None:
                backend = member.backend
                try:
                    return backend.update_weights(kept, version=name)
                except _FAILURES as error:
                    self._set_aside(member, backend, error)
                    return None

            with self._changed:
                waiting = self._serving()
            named = None
            while named is None:
                if not waiting:
                    raise BackendError(f"no member took the weights: {self._failures()}")
                named = push(waiting.pop(0), version)
            self._kept, self._version = kept, named
            with ThreadPoolExecutor(max(1, len(waiting))) as threads:
                for job in [threads.submit(push, member, named) for member in waiting]:
                    job.result()
            return named

    def weight_checksums(self) -> Mapping[str, str]:
        """Of the weights that draw the next token."""
        return self._at_any(lambda backend: backend.weight_checksums())

    # For pools that make their members

    def _keep(self, weights: Mapping[str, Tensor]) -> KeptWeights:
        """The weights in the form in which members are given them, now and when they come back."""
        return KeptWeights(weights)

    def _renewed(self, number: int, backend: PoolMember) -> PoolMember:
        """What serves in place of a member that failed: the same, unless the pool makes its members."""
        return backend

    # Drawing

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        with self._changed:
            return params.replace(seed=int(self._seeds.integers(2**63)))

    def _as_finished(
        self, prompts: Sequence[ArrayLike], params: Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        most = self._concurrency * len(self._members)
        threads = ThreadPoolExecutor(max(1, min(len(prompts), most)), "rollout-pool")
        try:
            jobs = {threads.submit(self._draw, *each): at for at, each in enumerate(zip(prompts, params, strict=True))}
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _draw(self, prompt: ArrayLike, params: SamplingParams) -> list[Rollout]:
        """The rollouts of one prompt, from the first member that gives them."""
        failure: Exception | None = None
        for _ in range(self._attempts):
            member, backend = self._take()
            try:
                (rollouts,) = backend.rollouts([prompt], [params])
                return rollouts
            except _FAILURES as error:
                failure = error
                self._set_aside(member, backend, error)
            finally:
                with self._changed:
                    member.under_way -= 1
                    self._changed.notify_all()
        raise BackendError(f"a prompt failed in {self._attempts} tries, the last time with: {failure}") from failure

    def _take(self) -> tuple[_Member, PoolMember]:
        """The least loaded member and its backend, as soon as one has room."""

        def free() -> list[_Member]:
            return [member for member in self._serving() if member.under_way < self._concurrency]

        with self._changed:
            while not free():
                alive = bool(self._serving())
                told = self._changed.wait(None if alive else self._patience_s)
                if self._closed.is_set():
                    raise BackendError("the pool was closed")
                if not told and not self._serving():
                    raise BackendError(f"no member served for {self._patience_s:g} s: {self._failures()}")
            member = min(free(), key=lambda each: each.under_way)
            member.under_way += 1
            return member, member.backend

    # Failing and coming back

    def _serving(self) -> list[_Member]:
        return [member for member in self._members if member.failure is None]

    def _failures(self) -> str:
        failed = [f"members[{each.number}]: {each.failure}" for each in self._members if each.failure is not None]
        return "; ".join(failed[:4])

    def _set_aside(self, member: _Member, backend: PoolMember, error: Exception) -> None:
        """Once for each failure, however many prompts tell of it: the last may come when it serves again."""
        with self._changed:
            if self._closed.is_set() or member.failure is not None or member.backend is not backend:
                return
            member.failure = error
            self._changed.notify_all()
        threading.Thread(target=self._bring_back, args=(member,), name="rollout-pool-return", daemon=True).start()

    def _bring_back(self, member: _Member) -> None:
        wait_s = 0.0
        while not self._closed.wait(wait_s):
            backend = None
            try:
                backend = self._renewed(member.number, member.backend)
                with self._updating:
                    self._verify(backend)
                    with self._changed:
                        member.backend, member.failure = backend, None
                        self._changed.notify_all()
                if self._closed.is_set():
                    backend.close()
                return
            except KeepmaskError as error:
                member.failure = error
                if backend is not None and backend is not member.backend:
                    backend.close()  # what it holds may be what the next one needs
            wait_s = min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, 2 * wait_s))

    def _verify(self, backend: PoolMember) -> None:
        """Raise BackendError unless it holds the pool's weights, which it is given if it does not."""
        expected = self._expected_checksums()
        problem = self._difference(backend, expected)
        if problem and self._kept is not None:
            backend.update_weights(self._kept, version=self._version)
            problem = self._difference(backend, expected)
        if problem:
            raise BackendError(f"it cannot serve again: {problem}")

    def _expected_checksums(self) -> Mapping[str, str]:
        with self._changed:
            others = [member.backend for member in self._serving()]
        for other in others:
            try:
                return other.weight_checksums()
            except _FAILURES:
                continue  # found out and set aside by the next prompt
        return self._first_checksums if self._kept is None else self._kept.checksums()

    def _difference(self, backend: PoolMember, expected: Mapping[str, str]) -> str:
        if (version := backend.weight_version) != self._version:
            return f"its weights are version {version!r}, the pool's {self._version!r}"
        found = backend.weight_checksums()
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        return f"{len(wrong)} weights have another checksum, the first {wrong[0]}" if wrong else ""

    def _at_any(self, ask: Callable[[PoolMember], _Told]) -> _Told:
        member, backend = self._take()
        try:
            return ask(backend)
        finally:
            with self._changed:
                member.under_way -= 1
                self._changed.notify_all()


class KeptWeights(dict[str, "Tensor"]):
    """A copy on the CPU, of tied tensors the first: the trainer's own change with its next step."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__((name, tensor.detach().cpu().clone()) for name, tensor in tied_once(weights.items()))

    def checksums(self) -> dict[str, str]:
        """As `weight_checksums` of a member that holds them."""
        from keepmask.engine.weights import checksum  # loads torch

        return {name: checksum(tensor) for name, tensor in self.items()}


def _member(number: int, backend: Rollouts) -> PoolMember:
    if not isinstance(backend, PoolMember):
        raise ConfigError(
            f"members[{number}]: {type(backend).__name__} lacks methods of {PoolMember.__module__}.PoolMember"
        )
    return backend
