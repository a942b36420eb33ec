"""Time and memory of scoring drawn tokens on their supports, forward and backward, against the dense forms.

    python bench/replay.py                       a table
    python bench/replay.py --json                one JSON row a case and form
    python bench/replay.py --rollouts FILE       rows of a rollout file in place of made-up ones
    python bench/replay.py --penalties           transforms at the support, per pair

The forms of a case are timed in turn in one process (`replay_forms`). Memory is the growth of the peak resident size
in a fresh process that runs one form once, inputs and existing gradients not counted.
"""

import argparse
import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import keepmask
from keepmask import SamplingMask
from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms
from replay_forms import FORMS, Problem, full, keep_mask, make_problem, supports_like

# T, E, V, dtype, kind of support, T when memory is measured
CASES = (
    (2048, 576, 49152, "float32", "8", 4096),
    (2048, 576, 49152, "float32", "75", 4096),
    (2048, 576, 49152, "float32", "500", 4096),
    (2048, 576, 49152, "bfloat16", "8", 4096),
    (2048, 576, 49152, "bfloat16", "75", 4096),
    (2048, 576, 49152, "bfloat16", "500", 4096),
    (1024, 2048, 151936, "bfloat16", "8", 1024),
    (1024, 2048, 151936, "bfloat16", "500", 1024),
)
SECONDS, MIN_REPEATS, MAX_REPEATS = 1.0, 3, 50


def problem_for(case: tuple, num_tokens: int, rollouts: Path | None) -> Problem:
    _, E, V, dtype, kind, _ = case
    rng = np.random.default_rng(0)
    mask = supports_like(kind, num_tokens, V, rng) if rollouts is None else recorded(rollouts, num_tokens)
    return make_problem(mask, E, V, getattr(torch, dtype))


def recorded(file: Path, num_tokens: int) -> SamplingMask:
    """The first rows of a rollout file."""
    from keepmask.wire import read_rollouts

    masks = [rollout.sampling_mask for rollout in read_rollouts(file)[0] if rollout.sampling_mask is not None]
    return SamplingMask.concat(masks)[:num_tokens]


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """p20, p50 and p80 in ms of each, taken in turn; a slow one is run a few times, a fast one more often."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(MIN_REPEATS):
        for name, run in runs.items():
            while True:
                begin = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - begin))
                if sum(times[name]) > 1e3 * SECONDS or len(times[name]) % MAX_REPEATS == 0:
                    break
    return {name: np.quantile(values, [0.2, 0.5, 0.8]) for name, values in times.items()}


def measure(case: tuple, rollouts: Path | None, names: list[str]) -> Iterator[dict[str, object]]:
    T, E, V, dtype, kind, memory_tokens = case
    problem = problem_for(case, T, rollouts)
    runs = {name: partial(FORMS[name], problem) for name in names}
    if "full" in runs:
        runs["full"] = partial(full, problem, keep_mask(problem))
    times = timed(runs)
    counts = problem.mask.counts
    common = {
        "op": f"replay K {kind}",
        "shape": [T, E, V],
        "dtype": dtype,
        "unit": "ms",
        "support_mean": float(counts.mean()),
        "support_p99": float(np.quantile(counts, 0.99)),
        "single_share": float((counts == 1).mean()),
    }
    for name in names:
        p20, p50, p80 = times[name]
        row = common | {"implementation": name, "p20": p20, "p50": p50, "p80": p80}
        for other in ("full", "dense chunks"):
            row[f"{other.replace(' ', '_')}_over"] = times[other][1] / p50 if other in times else None
        yield row | {"memory_mb": extra_memory(case, memory_tokens, rollouts, name), "memory_tokens": memory_tokens}


def extra_memory(case: tuple, num_tokens: int, rollouts: Path | None, name: str) -> float:
    """Growth of the peak resident size, MB, of a process that has everything loaded and compiled."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_memory_process, args=(send, case, num_tokens, rollouts, name))
    process.start()
    result = receive.recv()
    process.join()
    return result


def _memory_process(send: Connection, case: tuple, num_tokens: int, rollouts: Path | None, name: str) -> None:
    small = (64, case[1], 4096, *case[3:])
    FORMS[name](problem_for(small, 64, None))
    problem = problem_for(case, num_tokens, rollouts)
    problem.hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = _status_mb("VmRSS")
    FORMS[name](problem)
    send.send(_status_mb("VmHWM") - before)


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def penalties(num_tokens: int = 7000, vocab_size: int = 49152, num_sequences: int = 28) -> dict[str, object]:
    """Temperature, bias and all penalties at the support of K about 75, ns a pair, per-sequence parameters."""
    rng = np.random.default_rng(0)
    support = Support.from_mask(supports_like("75", num_tokens, vocab_size, rng))
    length = num_tokens // num_sequences
    zipf = torch.tensor(np.exp(rng.random(num_sequences * (length + 20)) * np.log(vocab_size)).astype(np.int64) - 1)
    token = torch.arange(num_tokens)
    sequence = token // length
    logits = torch.randn(support.num_pairs)
    parameters = torch.rand(3, num_sequences)[:, sequence]

    def run() -> torch.Tensor:
        transforms = TokenTransforms(
            num_tokens=num_tokens,
            temperature=parameters[0] + 0.5,
            repetition_penalty=parameters[1] + 1,
            frequency_penalty=parameters[2],
            presence_penalty=parameters[0],
            logit_bias=LogitBias(
                ids=torch.arange(num_sequences * 4) % 97,
                values=torch.ones(num_sequences * 4),
                offsets=torch.arange(num_sequences + 1) * 4,
                requests=sequence,
            ),
            history=TokenHistory(
                ids=zipf,
                offsets=torch.arange(num_sequences + 1) * (length + 20),
                sequences=sequence,
                lengths=20 + token % length,
                starts=torch.full((num_tokens,), 20),
            ),
        )
        return transforms.at(support).apply(logits)

    _ = support.row_index
    times = {name: 1e6 * value for name, value in zip(("p20", "p50", "p80"), timed({"": run})[""], strict=True)}
    return {
        "op": "transforms at the support",
        "shape": [num_tokens, support.num_pairs, vocab_size],
        "dtype": "float32",
        "implementation": "keepmask",
        "unit": "ns a pair",
        **{name: value / support.num_pairs for name, value in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON row a case and form")
    parser.add_argument("--rollouts", type=Path, help="a rollout file to take the rows from")
    parser.add_argument("--penalties", action="store_true", help="only the transforms at the support")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="one case, by number")
    parser.add_argument("--form", action="append", choices=FORMS, help="one form; may be given several times")
    args = parser.parse_args()
    cpu = platform.processor() or platform.machine()
    versions = {"keepmask": keepmask.__version__, "torch": torch.__version__, "numpy": np.__version__}
    machine = {"device": cpu, "threads": torch.get_num_threads()} | versions
    if args.penalties:
        report(penalties() | machine, args.json)
        return
    for number in range(len(CASES)) if args.case is None else [args.case]:
        for row in measure(CASES[number], args.rollouts, args.form or list(FORMS)):
            report(row | machine, args.json)
    if args.case is None:
        report(penalties() | machine, args.json)


def report(row: dict[str, object], as_json: bool) -> None:
    if as_json:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(rounded), flush=True)
        return
    line = "{op:26s} {shape!s:20s} {dtype:9s} {implementation:26s} p50 {p50:9.2f} {unit}".format(**row)
    for other in ("full", "dense_chunks"):
        if row.get(f"{other}_over"):
            line += f"   {other} / this {row[f'{other}_over']:7.1f}"
    if "memory_mb" in row:
        line += "   + {memory_mb:6.0f} MB at T {memory_tokens}".format(**row)
    print(line, flush=True)


if __name__ == "__main__":
    main()
