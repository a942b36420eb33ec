"""How the engine's time grows: with the number of requests, with the context, and with the length of the queue.

    scripts/bench scaling            a table
    scripts/bench scaling --json     one JSON row a measurement
    scripts/bench scaling --quick    smaller sizes: does it run, not how fast

Sizes of a kind are measured in turn, in rounds. `per_unit` is what should stay level: tokens/s for requests (it should
rise), microseconds a step for each additional token of context, microseconds a request of the queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from transformers.utils.logging import disable_progress_bar

from keepmask.bench.machine import machine_facts
from keepmask.bench.timing import Row, arguments, quantiles, report
from keepmask.llm import LLM
from keepmask.params import SamplingParams

SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "logprobs": 0, "detokenize": False}


class Sizes(NamedTuple):
    rounds: int = 3
    requests: tuple[int, ...] = (16, 32, 64, 128)
    contexts: tuple[int, ...] = (256, 512, 1024, 1536, 2048)
    queues: tuple[int, ...] = (500, 1000, 2500, 5000)
    output: int = 48
    batch: int = 16


FULL = Sizes()
QUICK = Sizes(rounds=1, requests=(16, 32), contexts=(64, 128), queues=(100, 200), output=8, batch=4)


def run(llm: LLM, requests: int, prompt: int, output: int) -> tuple[float, list[float]]:
    """Seconds in all, and of each step."""
    ids = np.random.default_rng(0).integers(10_000, 40_000, (requests, prompt)).tolist()
    params = SamplingParams(**SAMPLING, max_tokens=output, return_sampling_mask=True)
    llm.engine.reset_prefix_cache()
    start = time.perf_counter()
    for number, token_ids in enumerate(ids):
        llm.engine.add(str(number), token_ids, params)
    steps = []
    while llm.engine.num_unfinished:
        begin = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - begin)
    return time.perf_counter() - start, steps


def by_requests(llm: LLM, sizes: Sizes) -> Iterator[Row]:
    found: dict[int, list[float]] = {n: [] for n in sizes.requests}
    for _ in range(sizes.rounds):
        for n, values in found.items():
            values.append(n * sizes.output / run(llm, n, 32, sizes.output)[0])
    for n, values in found.items():
        yield row("throughput", {"requests": n, "prompt": 32, "output": sizes.output}, values, "tokens/s")


def by_context(llm: LLM, sizes: Sizes) -> Iterator[Row]:
    """Half of the output is decoded by then, and all requests decode."""
    found: dict[int, list[float]] = {n: [] for n in sizes.contexts}
    for _ in range(sizes.rounds):
        for n, values in found.items():
            _, steps = run(llm, sizes.batch, n - sizes.output, sizes.output)
            values.append(1e3 * float(np.median(steps[-sizes.output // 2 :])))
    least = min(sizes.contexts)
    for n, values in found.items():
        extra = (np.median(values) - np.median(found[least])) / (n - least) if n > least else 0.0
        yield row("step", {"requests": sizes.batch, "context": n}, values, "ms") | {
            "per_unit": 1e3 * extra,
            "per_unit_of": "us a step for each more token of context",
        }


def by_queue(llm: LLM, sizes: Sizes) -> Iterator[Row]:
    """Requests of 8 tokens for 4 more, all there at once."""
    found: dict[int, list[float]] = {n: [] for n in sizes.queues}
    for _ in range(max(1, sizes.rounds - 1)):
        for n, values in found.items():
            values.append(run(llm, n, 8, 4)[0])
    for n, values in found.items():
        yield row("queue", {"requests": n, "prompt": 8, "output": 4}, values, "s") | {
            "per_unit": 1e6 * float(np.median(values)) / n,
            "per_unit_of": "us a request",
        }


def row(op: str, shape: dict[str, int], values: list[float], unit: str) -> Row:
    """One size's row."""
    return {"op": op, "shape": shape, "implementation": "keepmask", "unit": unit} | quantiles(values)


def line(row: Row) -> str:
    """A row for people."""
    shape = ", ".join(f"{name} {value}" for name, value in row["shape"].items())
    each = f"   {row['per_unit']:8.2f} {row['per_unit_of']}" if "per_unit" in row else ""
    return f"{row['op']:12s} {shape:42s} p20 {row['p20']:9.2f}  p50 {row['p50']:9.2f} {row['unit']}{each}"


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: does it run, not how fast")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    disable_progress_bar()
    longest = max(*sizes.contexts, 32 + sizes.output)
    llm = LLM("smollm2-135m", logprobs_mode="processed_logprobs", max_model_len=longest, max_num_seqs=128)
    facts = machine_facts() | {"dtype": str(llm.engine.runner.dtype).removeprefix("torch.")}
    run(llm, 2, 8, 4)
    for measure in (by_requests, by_context, by_queue):
        report(measure(llm, sizes), facts, None if args.json else line)


if __name__ == "__main__":
    main()
