"""The README's tables, made from the rows of `bench/results`.

    scripts/bench readme_tables            print them
    scripts/bench readme_tables --write    put them into the README

A file of rows is made by a benchmark, on an idle machine: scripts/bench sampler --json > bench/results/sampler.jsonl.
Rows of another machine are appended (>>): each table then comes once for each kind of machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from keepmask.bench.timing import Row

ROOT = Path(__file__).parents[3]
RESULTS, README = ROOT / "bench" / "results", ROOT / "README.md"
BEGIN, END = "<!-- tables: scripts/bench readme_tables -->", "<!-- end of tables -->"


def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def by_machine(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each kind of machine, by what it is: cores, and the instructions that choose compiled paths."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        names = [words for feature, words in FEATURES.items() if feature in row["features"]]
        missing = "" if "amx_bf16" in row["features"] else ", without AMX"
        where = f"{row['cores']} shared cores ({', '.join(names)}{missing})"
        found.setdefault(where, []).append(row)
    return found


def table(head: Iterable[str], body: Iterable[Iterable[object]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells in body:
        yield f"| {' | '.join(str(cell) for cell in cells)} |"


def number(value: float) -> str:
    """Two significant digits, or whole numbers above them."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def sampler(rows: list[Row]) -> Iterator[str]:
    yield (
        "`scripts/bench sampler`: one whole `Sampler.sample` on float32 logits, masks and processed log-probs on, "
        "against `torch.topk(logits, 50)` alone and against the sort-based path (sort, cumulative sum, noise over the "
        "vocabulary, bitmap, unpack)."
    )
    yield ""
    body = [
        (f"{row['shape']}, {row['op'].removeprefix('sample ')}", row["p50"], row["over_topk"], row["sort_based_over"])
        for row in rows
        if row["implementation"] == "fast" and row["shape"][0] > 1
    ]
    head = ("logits", "ms", "over topk", "sort-based path over this")
    yield from table(head, ((case, *map(number, values)) for case, *values in body))


def replay(rows: list[Row]) -> Iterator[str]:
    yield (
        "`scripts/bench replay`: log-probs of drawn tokens on their supports, forward and backward, against full "
        "logits with `masked_fill` and against the best chunked dense form; memory beyond inputs and gradients."
    )
    yield ""
    head = (
        "T, E, V",
        "mean support",
        "ms",
        "full logits over this",
        "dense chunks over this",
        "MB",
        "MB of full logits",
    )

    def body() -> Iterator[Iterable[object]]:
        found = [row for row in rows if row["op"].startswith("replay")]
        full = {(row["op"], *row["shape"], row["dtype"]): row for row in found if row["implementation"] == "full"}
        for row in found:
            if row["implementation"] == "keepmask":
                other = full[row["op"], *row["shape"], row["dtype"]]
                values = (row["support_mean"], row["p50"], row["full_over"], row["dense_chunks_over"])
                memory = (row["memory_mb"], other["memory_mb"])
                case = f"{', '.join(map(str, row['shape']))}, {row['dtype']}"
                yield case, *map(number, values), *(f"{value:,.0f}" for value in memory)

    yield from table(head, body())


def engine(rows: list[Row]) -> Iterator[str]:
    rows = [row for row in rows if row["op"] == "throughput"]
    versions = rows[0]["versions"]
    yield (
        f"`keepmask bench --peer vllm --peer transformers`: SmolLM2-135M in {rows[0]['dtype']}, "
        f"top_k 50 and top_p 0.95, tokens/s; in brackets how many times as fast keepmask is, with masks on "
        f"(vLLM {versions['vllm (peer)']}, which has no masks on CPUs, bound to both cores)."
    )
    yield ""
    names = list(dict.fromkeys(row["implementation"] for row in rows))

    def body() -> Iterator[Iterable[object]]:
        for shape in dict.fromkeys(json.dumps(row["shape"]) for row in rows):
            of = json.loads(shape)
            group = f" x {of['n']}" if of["n"] > 1 else ""
            found = {row["implementation"]: row for row in rows if json.dumps(row["shape"]) == shape}
            yield (
                f"{of['requests']}{group} of {of['prompt']} + {of['output']}",
                *(speed(found[name]) if name in found else "" for name in names),
            )

    yield from table(("requests of prompt + output", *names), body())


def speed(row: Row) -> str:
    over = f" ({row['keepmask_over']:.2f})" if "keepmask_over" in row else ""
    return f"{row['p50']:,.0f}{over}"


def server(rows: list[Row]) -> Iterator[str]:
    yield "`scripts/bench server`: through HTTP, and directly, in turn on one engine; the client has its own process."
    yield ""
    body = [
        (
            row["op"],
            row["implementation"],
            f"{row['p50']:,.2f}" if row["unit"] == "ratio" else f"{row['p50']:,.0f} tokens/s",
            f"{row['over_generate']:.2f}" if "over_generate" in row else "",
            row["problems"],
        )
        for row in rows
    ]
    yield from table(("load", "way", "", "over `LLM.generate`", "lost or misaligned"), body)


def wire(rows: list[Row]) -> Iterator[str]:
    yield "`scripts/bench wire`: masks on the wire, against vLLM's nested JSON."
    yield ""
    rows = [row for row in rows if row["op"].endswith("encode") and row["implementation"] != "nested JSON"]
    head = ("masks", "format", "bytes an id", "bytes over JSON", "encode + decode over JSON")
    yield from table(
        head,
        ((row["case"], row["implementation"], *(f"{row[key]:.2f}" for key in KEYS_OF_WIRE)) for row in rows),
    )


def speculated(rows: list[Row]) -> Iterator[str]:
    yield (
        "`scripts/bench speculated`: SmolLM2-135M in bfloat16, 128 tokens a request, without drafts and with, in turn; "
        "all tokens, supports and log-probs equal to the bit. A second epoch follows a step of 1e-6 in every weight."
    )
    yield ""
    body = [
        (
            KINDS_OF_SPECULATION[row["op"]].format(seeds=row.get("seeds")),
            row["shape"]["requests"],
            f"{row['without']:,.0f}",
            f"{row['p50']:,.0f} ({row['gain']:.2f})",
            f"{row['accepted']:.0%}",
        )
        for row in rows
    ]
    yield from table(("drafts", "requests", "tokens/s without", "with", "guesses drawn"), body)


KINDS_OF_SPECULATION = {
    "epoch": "history, second epoch, {seeds} seeds",
    "repetition": "n-grams, prompts that ask for repetition",
    "never": "never drawn",
}
KEYS_OF_WIRE = ("bytes_an_id", "bytes_over_json", "both_over_json")
FEATURES = {"avx512f": "AVX-512", "avx512_bf16": "its bfloat16", "amx_bf16": "AMX"}
TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "engine": engine,
    "sampler": sampler,
    "replay": replay,
    "server": server,
    "wire": wire,
    "speculated": speculated,
}


def tables() -> str:
    """All of them, in Markdown."""
    parts = ["Medians: the ratios are the message."]
    last = ""
    for name, make in TABLES.items():
        for where, rows in by_machine(rows_of(name)).items():
            if where != last:
                parts.append(f"On {where}:")
            parts.append("\n".join(make(rows)))
            last = where
    return "\n\n".join(parts)


def written(readme: str) -> str:
    """The README with the tables as they are now."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    if parser.parse_args().write:
        README.write_text(written(README.read_text("utf-8")), "utf-8")
    else:
        sys.stdout.write(tables() + "\n")


if __name__ == "__main__":
    main()
