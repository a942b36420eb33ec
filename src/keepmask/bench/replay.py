"""Time and memory of scoring drawn tokens on their supports, forward and backward, against the dense forms.

    scripts/bench replay                       a table
    scripts/bench replay --json                one JSON row a case and form
    scripts/bench replay --rollouts FILE       rows of a rollout file in place of made-up ones
    scripts/bench replay --penalties           transforms at the support, per pair

The forms of a case are timed in turn in one process (`replay_forms`). Memory is the growth of the peak resident size
in a fresh process that runs one form once, inputs and existing gradients not counted.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from keepmask.bench.machine import machine_facts
from keepmask.bench.peak_memory import resident
from keepmask.bench.replay_forms import FORMS, Problem, full, keep_mask, make_problem, supports_like
from keepmask.bench.timing import Row, arguments, in_turn, quantiles, report
from keepmask.mask import SamplingMask
from keepmask.replay.history import LogitBias, TokenHistory
from keepmask.replay.support import Support
from keepmask.replay.transforms import TokenTransforms


class Case(NamedTuple):
    """What is scored."""

    T: int
    E: int
    V: int
    dtype: str
    kind: str
    """Of support, as in `supports_like`."""
    memory_tokens: int
    """T when memory is measured."""


CASES = (
    *(Case(2048, 576, 49152, dtype, kind, 4096) for dtype in ("float32", "bfloat16") for kind in ("8", "75", "500")),
    Case(1024, 2048, 151936, "bfloat16", "8", 1024),
    Case(1024, 2048, 151936, "bfloat16", "500", 1024),
)
SECONDS, ROUNDS = 3.0, 3


def problem_for(case: Case, num_tokens: int, rollouts: Path | None) -> Problem:
    """The case's tensors, with this many tokens."""
    rng = np.random.default_rng(0)
    mask = supports_like(case.kind, num_tokens, case.V, rng) if rollouts is None else recorded(rollouts, num_tokens)
    return make_problem(mask, case.E, case.V, getattr(torch, case.dtype))


def recorded(file: Path, num_tokens: int) -> SamplingMask:
    """The first rows of a rollout file."""
    from keepmask.wire import read_rollouts

    masks = [rollout.sampling_mask for rollout in read_rollouts(file)[0] if rollout.sampling_mask is not None]
    return SamplingMask.concat(masks)[:num_tokens]


def measure(case: Case, rollouts: Path | None, names: list[str]) -> Iterator[Row]:
    """Time and memory of each form."""
    problem = problem_for(case, case.T, rollouts)
    runs: dict[str, Any] = {name: partial(FORMS[name], problem) for name in names}
    if "full" in runs:
        runs["full"] = partial(full, problem, keep_mask(problem))
    times = {name: quantiles(ms) for name, ms in in_turn(runs, seconds=SECONDS, rounds=ROUNDS, most=50).items()}
    counts = problem.mask.counts
    common = {
        "op": f"replay K {case.kind}",
        "shape": [case.T, case.E, case.V],
        "dtype": case.dtype,
        "unit": "ms",
        "support_mean": float(counts.mean()),
        "support_p99": float(np.quantile(counts, 0.99)),
        "single_share": float((counts == 1).mean()),
    }
    for name in names:
        row = common | {"implementation": name} | times[name]
        for other in ("full", "dense chunks"):
            over = times[other]["p50"] / times[name]["p50"] if other in times else None
            row[f"{other.replace(' ', '_')}_over"] = over
        yield row | {"memory_mb": extra_memory(case, rollouts, name), "memory_tokens": case.memory_tokens}


def extra_memory(case: Case, rollouts: Path | None, name: str) -> float:
    """Growth of the peak resident size, MB, of a process that has everything loaded and compiled."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_memory_process, args=(send, case, rollouts, name))
    process.start()
    result: float = receive.recv()
    process.join()
    return result


def _memory_process(send: Connection, case: Case, rollouts: Path | None, name: str) -> None:
    FORMS[name](problem_for(case._replace(V=4096), 64, None))
    problem = problem_for(case, case.memory_tokens, rollouts)
    problem.hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = resident("VmRSS")
    FORMS[name](problem)
    send.send((resident("VmHWM") - before) / 2**20)


def penalties(num_tokens: int = 7000, vocab_size: int = 49152, num_sequences: int = 28) -> Row:
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
        return transforms.at(support.row_index, support.ids).apply(logits)

    _ = support.row_index
    times = quantiles(in_turn({"": run}, seconds=SECONDS)[""])
    return {
        "op": "transforms at the support",
        "shape": [num_tokens, support.num_pairs, vocab_size],
        "dtype": "float32",
        "implementation": "keepmask",
        "unit": "ns a pair",
        **{name: 1e6 * ms / support.num_pairs for name, ms in times.items()},
    }


def line(row: Row) -> str:
    """A row for people."""
    text = "{op:26s} {shape!s:20s} {dtype:9s} {implementation:26s} p50 {p50:9.2f} {unit}".format(**row)
    for other in ("full", "dense_chunks"):
        if row.get(f"{other}_over"):
            text += f"   {other} / this {row[f'{other}_over']:7.1f}"
    return text + ("   + {memory_mb:6.0f} MB at T {memory_tokens}".format(**row) if "memory_mb" in row else "")


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rollouts", type=Path, help="a rollout file to take the rows from")
    parser.add_argument("--penalties", action="store_true", help="only the transforms at the support")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="one case, by number")
    parser.add_argument("--form", action="append", choices=FORMS, help="one form; may be given several times")
    args = parser.parse_args()
    numbers = range(len(CASES)) if args.case is None else [args.case]
    facts, show = machine_facts(), None if args.json else line
    if not args.penalties:
        for number in numbers:
            report(measure(CASES[number], args.rollouts, args.form or list(FORMS)), facts, show)
    if args.penalties or args.case is None:
        report([penalties()], facts, show)


if __name__ == "__main__":
    main()
