"""How the engine's time grows: with the number of requests, with the context, and with the length of the queue.

    python bench/scaling.py            a table
    python bench/scaling.py --json     one JSON row a measurement
    python bench/scaling.py --quick    smaller sizes: does it run, not how fast

Sizes of a kind are measured in turn, in rounds. `per_unit` is what should stay level: tokens/s for requests (it should
rise), microseconds a step for each additional token of context, microseconds a request of the queue.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

import keepmask
from keepmask import LLM, SamplingParams

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


def by_requests(llm: LLM, sizes: Sizes) -> Iterator[dict[str, object]]:
    found = {n: [] for n in sizes.requests}
    for _ in range(sizes.rounds):
        for n, values in found.items():
            values.append(n * sizes.output / run(llm, n, 32, sizes.output)[0])
    for n, values in found.items():
        yield row("throughput", {"requests": n, "prompt": 32, "output": sizes.output}, values, "tokens/s", 1.0)


def by_context(llm: LLM, sizes: Sizes) -> Iterator[dict[str, object]]:
    """Half of the output is decoded by then, and all requests decode."""
    found = {n: [] for n in sizes.contexts}
    for _ in range(sizes.rounds):
        for n, values in found.items():
            _, steps = run(llm, sizes.batch, n - sizes.output, sizes.output)
            values.append(1e3 * float(np.median(steps[-sizes.output // 2 :])))
    least = min(sizes.contexts)
    for n, values in found.items():
        extra = (np.median(values) - np.median(found[least])) / (n - least) if n > least else 0.0
        yield row("step", {"requests": sizes.batch, "context": n}, values, "ms", 1.0) | {
            "per_unit": 1e3 * extra,
            "per_unit_of": "us a step for each more token of context",
        }


def by_queue(llm: LLM, sizes: Sizes) -> Iterator[dict[str, object]]:
    """Requests of 8 tokens for 4 more, all there at once."""
    found = {n: [] for n in sizes.queues}
    for _ in range(max(1, sizes.rounds - 1)):
        for n, values in found.items():
            values.append(run(llm, n, 8, 4)[0])
    for n, values in found.items():
        yield row("queue", {"requests": n, "prompt": 8, "output": 4}, values, "s", 1.0) | {
            "per_unit": 1e6 * float(np.median(values)) / n,
            "per_unit_of": "us a request",
        }


def row(op: str, shape: dict[str, int], values: list[float], unit: str, scale: float) -> dict[str, object]:
    p20, p50, p80 = (float(value) * scale for value in np.quantile(values, (0.2, 0.5, 0.8)))
    return {"op": op, "shape": shape, "implementation": "keepmask", "p20": p20, "p50": p50, "p80": p80, "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON row a measurement")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: does it run, not how fast")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    disable_progress_bar()
    longest = max(*sizes.contexts, 32 + sizes.output)
    llm = LLM("smollm2-135m", logprobs_mode="processed_logprobs", max_model_len=longest, max_num_seqs=128)
    facts = {
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.engine.runner.dtype).removeprefix("torch."),
        "keepmask": keepmask.__version__,
        "torch": torch.__version__,
    }
    run(llm, 2, 8, 4)
    for measure in (by_requests, by_context, by_queue):
        for found in measure(llm, sizes):
            report(found | facts, args.json)


def report(row: dict[str, object], as_json: bool) -> None:
    if as_json:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(rounded), flush=True)
        return
    shape = ", ".join(f"{name} {value}" for name, value in row["shape"].items())
    each = f"   {row['per_unit']:8.2f} {row['per_unit_of']}" if "per_unit" in row else ""
    print(f"{row['op']:12s} {shape:42s} p20 {row['p20']:9.2f}  p50 {row['p50']:9.2f} {row['unit']}{each}", flush=True)


if __name__ == "__main__":
    main()
