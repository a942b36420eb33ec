"""`keepmask bench`: how fast the engine is here, and where its time goes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from keepmask.bench.engines import PEERS, Peer
from keepmask.bench.floor import Floor
from keepmask.bench.machine import machine_facts
from keepmask.bench.ours import VARIANTS, Ours
from keepmask.bench.peak_memory import peak_memory
from keepmask.bench.rounds import measure
from keepmask.bench.row_tables import page
from keepmask.bench.rows import memory_row, phase_rows, timing_rows
from keepmask.bench.timing import Row, report
from keepmask.bench.workload import FULL, QUICK, Sizes, Workload
from keepmask.config import EngineConfig
from keepmask.engine.loading import checkpoint
from keepmask.errors import ConfigError

__all__ = ["add_arguments", "run"]

_DEFAULT_MODEL = "smollm2-135m"
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Measures throughput and latency with sampling masks and without, where a step's time goes, the least time "
        "it could take on this machine, and peak memory. Implementations take turns on the same prompts; numbers are "
        "medians over rounds. Run it on an idle machine."
    )
    fields = EngineConfig.model_fields
    parser.add_argument(
        "--model", default=_DEFAULT_MODEL, help=f"{fields['model'].description} (default: {_DEFAULT_MODEL})"
    )
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sizes = parser.add_argument_group("what is measured")
    sizes.add_argument("--quick", action="store_true", help="fewer and shorter workloads: less than a minute")
    sizes.add_argument("--only", type=_count, nargs="+", metavar="REQUESTS", help="only these numbers of requests")
    sizes.add_argument(
        "--prompt", type=_count, nargs="+", metavar="TOKENS", help="lengths of prompts (default: 32 256)"
    )
    sizes.add_argument("--output", type=_count, metavar="TOKENS", help="length of completions (default: 128)")
    sizes.add_argument(
        "--seconds",
        type=float,
        help=f"time for the rounds, at least one of which is made (default: {FULL.seconds:.0f})",
    )
    peers = parser.add_argument_group("against other engines")
    peers.add_argument("--peer", choices=PEERS, action="append", default=[], help="may be given twice")
    peers.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vllm installed (default: this one)"
    )
    peers.add_argument(
        "--peer-compile", action="store_true", help="let vllm compile its model, which takes it minutes to start"
    )
    shown = parser.add_argument_group("results")
    shown.add_argument("--json", action="store_true", help="print one JSON row a measurement instead of tables")
    shown.add_argument("--picture", type=Path, metavar="PATH", help="save a picture of them; needs matplotlib")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.picture is not None and find_spec("matplotlib") is None:
        raise ConfigError("--picture: needs matplotlib; pip install matplotlib, or leave the picture out")
    disable_progress_bar()
    console = Console(stderr=True)
    rows = []
    with console.status("loading") as status:
        for row in _measure(args, _sizes(args), status.update):
            rows.append(row)
            if args.json:
                report([row], {}, None)
    if not args.json:
        Console(width=None if Console().is_terminal else _WIDTH).print(page(rows))
    if args.picture is not None:
        from keepmask.bench.picture import save_picture

        save_picture(args.picture, rows)
        console.print(f"Picture: {args.picture}", highlight=False, soft_wrap=True)
    return 0


def _sizes(args: argparse.Namespace) -> Sizes:
    sizes = QUICK if args.quick else FULL
    given: dict[str, Any] = {"output": args.output, "seconds": args.seconds}
    if args.prompt is not None:
        given |= {"prompts": tuple(args.prompt), "groups": False}
    return dataclasses.replace(sizes, **{name: value for name, value in given.items() if value is not None})


def _measure(args: argparse.Namespace, sizes: Sizes, on_progress: Any) -> Iterator[Row]:
    """All rows, those of throughput with masks first."""
    workloads = sizes.workloads(args.only)
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": max(workload.prompt + workload.output for workload in workloads),
        "max_num_seqs": max(workload.num_sequences for workload in workloads),
    }
    with ExitStack() as stack:
        yield from _rows(args, sizes, workloads, options, stack, on_progress)


def _rows(
    args: argparse.Namespace,
    sizes: Sizes,
    workloads: Sequence[Workload],
    options: dict[str, Any],
    stack: ExitStack,
    on_progress: Any,
) -> Iterator[Row]:
    largest = max(workloads, key=lambda workload: workload.num_sequences * (workload.prompt + workload.output))
    ours = Ours(options)
    dtype = str(ours.llm.engine.runner.dtype).removeprefix("torch.")
    facts = {"dtype": dtype, **machine_facts(ours.device)}
    peers = [stack.enter_context(_peer(name, args, options | {"dtype": dtype})) for name in dict.fromkeys(args.peer)]
    facts["versions"] |= {f"{peer.name} (peer)": peer.version for peer in peers}
    found = measure(ours, peers, workloads, seconds=sizes.seconds, rounds=sizes.rounds, on_progress=on_progress)
    stack.close()
    on_progress("the floor, and where the time goes")
    floor = Floor(ours.llm.engine.runner, wait=ours.wait)
    asks = next(iter(VARIANTS.values()))
    for workload, measured in found.items():
        for row in timing_rows(workload, measured, floor):
            yield row | facts
    for workload in workloads:
        if workload.n == 1 and workload.prompt == workloads[0].prompt:
            phases = ours.phases(workload, workload.prompts(ours.vocab_size, seed=0), asks)
            for row in phase_rows(workload, phases):
                yield row | facts
    del ours, floor
    for variant, asks in VARIANTS.items():
        on_progress(f"memory: {variant}")
        yield memory_row(variant, largest, peak_memory(largest, options=options, params=asks)) | facts


def _peer(name: str, args: argparse.Namespace, options: dict[str, Any]) -> Peer:
    python = args.peer_python if name == "vllm" and args.peer_python else sys.executable
    return Peer(name, python, options | {"model": checkpoint(args.model), "eager": not args.peer_compile})


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
