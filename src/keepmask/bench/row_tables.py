"""The tables a person reads, made from rows."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepmask.bench.phases import PHASES
from keepmask.bench.timing import Row
from keepmask.bench.workload import Workload

__all__ = ["page"]


def page(rows: Sequence[Row]) -> RenderableType:
    """Throughput, latency, where the time goes, memory; and where it was measured."""
    facts = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    where = (
        f"{facts['device']}, {facts['threads']} threads, {facts['dtype']}; {versions}; commit {facts['commit']}; "
        f"load average at start {facts['load_average']}"
    )
    tables = {
        "Tokens/s (in brackets: keepmask with masks is so many times as fast)": _throughput(rows),
        "Latency with masks, ms": _latency(rows),
        "Where a step's time goes, ms (mean over a run, prompts included)": _phases(rows),
        "Peak resident memory, MB": _memory(rows),
    }
    return Group(*(part for title, table in tables.items() for part in (Text(title), table)), Text(where))


def _of(rows: Sequence[Row], op: str) -> list[Row]:
    return [row for row in rows if row["op"] == op]


def _label(row: Row) -> str:
    return Workload(**row["shape"]).label


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _throughput(rows: Sequence[Row]) -> Table:
    found = _of(rows, "throughput")
    names = list(dict.fromkeys(row["implementation"] for row in found))
    table = _table("requests", *names)
    for label in dict.fromkeys(map(_label, found)):
        cells = {row["implementation"]: _speed(row) for row in found if _label(row) == label}
        table.add_row(label, *(cells.get(name, "") for name in names))
    return table


def _speed(row: Row) -> str:
    ratio = f" ({row['keepmask_over']:.2f})" if "keepmask_over" in row else ""
    return f"{row['p50']:,.0f}{ratio}"


def _latency(rows: Sequence[Row]) -> Table:
    table = _table("requests", "first token", "step p20", "p50", "p80", "floor", "over the floor")
    name = rows[0]["implementation"]
    first = {_label(row): row for row in _of(rows, "first token") if row["implementation"] == name}
    for row in _of(rows, "step"):
        if row["implementation"] == name:
            times = (first[_label(row)]["p50"], row["p20"], row["p50"], row["p80"], row["floor_ms"])
            table.add_row(_label(row), *(f"{ms:,.1f}" for ms in times), f"{row['over_floor']:.2f}")
    return table


def _phases(rows: Sequence[Row]) -> Table:
    table = _table("requests", *PHASES)
    found = [row for row in rows if row["op"].startswith("phase ")]
    for label in dict.fromkeys(map(_label, found)):
        table.add_row(label, *(f"{row['p50']:,.2f}" for row in found if _label(row) == label))
    return table


def _memory(rows: Sequence[Row]) -> Table:
    table = _table("", "requests", "peak", "weights", "KV budget", "over both", "afterwards")
    for row in _of(rows, "peak memory"):
        sizes = (row["p50"], row["weights_mb"], row["kv_cache_mb"], row["over_weights_and_cache_mb"], row["after_mb"])
        table.add_row(row["implementation"], _label(row), *(f"{size:,.0f}" for size in sizes))
    return table
