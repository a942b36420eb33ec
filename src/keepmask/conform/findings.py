"""One page of what the probes found."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepmask.conform.outcome import Observation, Report, Result
from keepmask.conform.probes import GROUPS, PROFILES, Support

__all__ = ["WIDTH", "page", "support_text"]

WIDTH = 150
"""Columns the page needs."""


def page(report: Report, expect: str | None = None) -> RenderableType:
    """The table, what it says of each profile, and what stood in the way. expect: the profile to be followed."""
    results = {result.probe.name: result for result in report.results}
    table = Table(box=box.SIMPLE_HEAD, title=report.target, title_justify="left", pad_edge=False)
    for name in ("probe", "", *PROFILES, "target", "follows"):
        table.add_column(name.replace("-", "\n-"), no_wrap=True)
    for group, probes in GROUPS.items():
        asked = [results[probe.name] for probe in probes if probe.name in results]
        if asked:
            table.add_row(Text(group, style="bold"))
        for result in asked:
            expected = (support_text(result.probe.expected(profile)) for profile in PROFILES)
            name, rule = f"  {result.probe.name}", result.probe.rule
            table.add_row(name, rule, *expected, _seen(result.seen), _follows(result, expect))
    return Group(table, *map(Text, _summary(report, expect)))


def support_text(support: Support) -> str:
    """ "0 2", "0-3" for runs of three and more, "all" for the whole vocabulary."""
    if support == "all":
        return "all"
    runs: list[list[int]] = []
    for slot in support:
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs) or "none"


def _seen(seen: Observation) -> str:
    if seen.status != "tested":
        return seen.status
    return support_text(seen.support) + (f" +{seen.num_others}" if seen.num_others else "")


def _follows(result: Result, expect: str | None) -> Text:
    """The profiles the target did as, in red where the expected one is not among them."""
    if result.agrees("vllm") is None:
        return Text("")
    followed = [profile for profile in PROFILES if result.agrees(profile)]
    text = {0: "none", len(PROFILES): "all"}.get(len(followed), " ".join(followed))
    if expect is None:
        return Text(text)
    return Text(text, "green") if expect in followed else Text(f"NO: {text}", "bold red")


def _summary(report: Report, expect: str | None) -> Iterator[str]:
    num_asked = report.num_asked
    counts = ", ".join(f"{profile} in {num_asked - len(report.differing(profile))}" for profile in PROFILES)
    yield f"Of {num_asked} probes that could be asked the target follows {counts}."
    if expect is not None:
        differing = report.differing(expect)
        if differing:
            yield f"Expected {expect}: NO, differs in {', '.join(differing)}."
        else:
            yield f"Expected {expect}: " + ("yes." if num_asked else "NO, nothing could be asked.")
    notes: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.seen.note:
            notes.setdefault((result.seen.status, result.seen.note), []).append(result.probe.name)
    for (status, note), names in notes.items():
        yield f"{status.capitalize()}: {', '.join(names)}: {note}."
