"""What a target did with a probe, and what that says about the target as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from keepmask.conform.probes import PROFILES, Probe, Support

__all__ = ["Observation", "Report", "Result", "Target", "observed", "run_probes"]

Status = Literal["tested", "failed", "refused", "untestable"]

_LONG = 64  # ids; no filter of a probe leaves that many


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The support a target returned for a probe, or why there is none."""

    status: Status
    """tested: there is a support. failed: the target broke a rule that every profile has, or broke down. refused: it
    does not take such requests. untestable: this target cannot be asked."""
    support: Support = ()
    """Slots of the row."""
    num_others: int = 0
    """Ids of the row that are in no slot."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A probe and what came of it."""

    probe: Probe
    seen: Observation

    def agrees(self, profile: str) -> bool | None:
        """Whether the target did what this profile says; None where it was not asked."""
        if self.seen.status in ("refused", "untestable"):
            return None
        matches = self.probe.allows(profile, self.seen.support)
        return self.seen.status == "tested" and matches and self.seen.num_others == 0


class Target(Protocol):
    """Something that samples."""

    @property
    def name(self) -> str:
        """What the page calls it."""
        ...

    def observe(self, probe: Probe) -> Observation:
        """Ask the probe."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all probes on one target."""

    target: str
    results: tuple[Result, ...]

    @property
    def num_asked(self) -> int:
        """Probes that could be asked."""
        return sum(result.agrees("vllm") is not None for result in self.results)

    def differing(self, profile: str) -> list[str]:
        """Names of the probes where the target did not do what this profile says."""
        return [result.probe.name for result in self.results if result.agrees(profile) is False]

    def passed(self, profile: str) -> bool:
        """Whether the target follows this profile wherever it could be asked."""
        return self.num_asked > 0 and not self.differing(profile)

    def as_dict(self, expect: str | None = None) -> dict[str, Any]:
        """All of it as JSON. expect: the profile to give a verdict on."""
        return {
            "target": self.target,
            "expect": expect,
            "passed": None if expect is None else self.passed(expect),
            "asked": self.num_asked,
            "differing": {profile: self.differing(profile) for profile in PROFILES},
            "probes": [_result_dict(result) for result in self.results],
        }


def run_probes(
    target: Target, probes: Iterable[Probe], *, on_progress: Callable[[Probe], None] = lambda probe: None
) -> Report:
    """Ask all probes. on_progress: called before each. Raises BackendError when the target cannot be asked at all."""
    results = []
    for probe in probes:
        on_progress(probe)
        results.append(Result(probe, target.observe(probe)))
    return Report(target.name, tuple(results))


def observed(rows: Sequence[Sequence[int] | None], drawn: Sequence[int], slot_ids: Sequence[int]) -> Observation:
    """What these rows say, one a completion.

    rows: ids of each, ascending, None where it is marked as the whole vocabulary; a long row of all ids from 0 is taken
    for it too, as some engines list them. drawn: the id drawn from each. slot_ids: the id of each slot.
    """
    for row, token_id in zip(rows, drawn, strict=True):
        if row is not None and token_id not in row:
            return Observation(status="failed", note=f"drew {_named(token_id, slot_ids)}, which is not in its row")
    supports = [_slots(row, slot_ids) for row in rows]
    if any(support != supports[0] for support in supports):
        return Observation(status="failed", note=f"{len(rows)} equal rows gave {len(set(supports))} supports")
    support, num_others = supports[0]
    return Observation(status="tested", support=support, num_others=num_others)


def _slots(row: Sequence[int] | None, slot_ids: Sequence[int]) -> tuple[Support, int]:
    if row is None or (len(row) > _LONG and list(row) == list(range(len(row)))):
        return "all", 0
    slots = tuple(slot for slot, token_id in enumerate(slot_ids) if token_id in row)
    return slots, len(row) - len(slots)


def _named(token_id: int, slot_ids: Sequence[int]) -> str:
    return f"slot {slot_ids.index(token_id)}" if token_id in slot_ids else f"token {token_id}"


def _result_dict(result: Result) -> dict[str, Any]:
    probe, seen = result.probe, result.seen
    return {
        "name": probe.name,
        "rule": probe.rule,
        "wanted": probe.wanted,
        "params": probe.params,
        "prompt": probe.prompt,
        "output": probe.output,
        "exact": probe.exact,
        **{profile: probe.expected(profile) for profile in PROFILES},
        "status": seen.status,
        "target": seen.support if seen.status == "tested" else None,
        "others": seen.num_others,
        "note": seen.note,
        "agrees": [profile for profile in PROFILES if result.agrees(profile)],
    }
