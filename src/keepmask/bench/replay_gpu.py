"""Time and memory of scoring drawn tokens on their supports on one GPU, forward and backward.

    scripts/bench replay_gpu            all cases, one JSON row each
    scripts/bench replay_gpu --quick    a small shape, to see that everything runs

First the results of the Triton form are compared with the PyTorch definition in float64; then each case is timed,
kernel by kernel and as a whole, beside the dense form with full logits in chunks of tokens. Rows also say what share
of the memory bandwidth the passes over the head reach, counting every row read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from keepmask.bench.machine import machine_facts
from keepmask.bench.replay_forms import supports_like
from keepmask.bench.timing import Row, arguments, report
from keepmask.head import pairs_triton
from keepmask.head.form import HeadForm, PairTransforms
from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden
from keepmask.replay.support import Support

SHAPE = (32768, 4096, 131072)  # T, E, V
QUICK = (1024, 512, 8192)
KINDS = {"8": 4.0, "50": 15.0, "500": 110.0}  # kind of support, and the time in ms it should stay under
REPEATS = 10


def milliseconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median over the repeats, each timed with events after a warm-up."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


class Case:
    def __init__(self, kind: str, T: int, E: int, V: int) -> None:
        mask = supports_like(kind, T, V, np.random.default_rng(0))
        generator = torch.Generator("cuda").manual_seed(0)
        self.kind = kind
        self.hidden = torch.randn(T, E, generator=generator, device="cuda").bfloat16().requires_grad_()
        self.weight = torch.randn(V, E, generator=generator, device="cuda").mul_(3 / E**0.5).bfloat16().requires_grad_()
        self.weight.main_grad = torch.zeros(V, E, device="cuda")
        self.support = Support.from_mask(mask, "cuda")
        self.targets = torch.tensor(mask.ids[mask.offsets[:-1]], dtype=torch.int64, device="cuda")
        self.advantages = torch.randn(T, generator=generator, device="cuda")

    def step(self, impl: str = "triton", **options: object) -> torch.Tensor:
        self.hidden.grad = None
        scores = logprobs_from_hidden(
            self.hidden,
            self.weight,
            self.targets,
            self.support,
            options=ScoreOptions(weight_grad="accumulate", impl=impl),
            **options,
        )
        (scores.logprobs * self.advantages).sum().backward()
        return scores.logprobs.detach()

    def dense_chunks(self, chunk: int = 4096) -> None:
        """Three products per chunk of tokens in bfloat16, of which the first keeps the support's logits only."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        rows, ids, bounds = self.support.row_index, self.support.ids.long(), self.support.offsets.tolist()
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk]
            low, high = bounds[start], bounds[start + len(part)]
            place = (rows[low:high] - start, ids[low:high])
            kept = (part @ weight.T)[place].float()
            dense = torch.zeros(len(part), len(weight), dtype=torch.bfloat16, device="cuda")
            dense[place] = kept.sigmoid().bfloat16()  # the softmax over rows costs the same for every form
            _ = dense @ weight
            self.weight.main_grad += dense.T @ part

    def rows(self) -> Row:
        pairs, (T, E), V = self.support.num_pairs, self.hidden.shape, self.weight.shape[0]
        active = self.support.active().pairs
        _ = active.by_id
        positions = active.positions(self.targets[active.rows])
        hidden, weight = self.hidden.detach(), self.weight.detach()
        grad, out = torch.randn(active.num_pairs, device="cuda"), torch.empty_like(hidden)
        head = (hidden, weight, None, active, positions, HeadForm(), PairTransforms())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        extra = torch.cuda.max_memory_allocated() - before
        kernels = {
            "forward_ms": lambda: pairs_triton.score_rows(*head, jacobian=False),
            "forward_with_derivative_ms": lambda: pairs_triton.score_rows(*head, jacobian=True),
            "hidden_gradient_ms": lambda: pairs_triton.hidden_gradient(out, grad, weight, active),
            "weight_gradient_ms": lambda: pairs_triton.add_weight_gradient(self.weight.main_grad, grad, hidden, active),
        }
        times = {name: milliseconds(run) for name, run in kernels.items()}
        total = milliseconds(self.step)
        gigabytes = active.num_pairs * E * 2 / 1e9
        return {
            "op": f"replay K {self.kind}",
            "shape": [T, E, V],
            "dtype": "bfloat16",
            "implementation": "keepmask, triton",
            "support_mean": pairs / T,
            "unit": "ms",
            "p50": total,
            "limit": KINDS[self.kind],
            **times,
            "entropy_gradient_ms": milliseconds(lambda: self.step(entropy="grad")),
            "forward_gb_per_s": gigabytes / (times["forward_with_derivative_ms"] / 1e3),
            "weight_gradient_gb_per_s": gigabytes / (times["weight_gradient_ms"] / 1e3),
            "extra_memory_mb": extra / 2**20,
        }


def check(T: int = 512, E: int = 1024, V: int = 4096) -> Row:
    """The largest deviations from the definition in float64, on a shape where that is affordable."""
    case = Case("50", T, E, V)
    got = case.step()
    grads = case.hidden.grad.double(), case.weight.main_grad.double()
    hidden, weight = (t.detach().double().requires_grad_() for t in (case.hidden, case.weight))
    want = logprobs_from_hidden(
        hidden, weight, case.targets, case.support, options=ScoreOptions(impl="gather")
    ).logprobs
    (want * case.advantages).sum().backward()
    again = torch.zeros_like(case.weight.main_grad)
    case.weight.main_grad = again
    case.step()
    return {
        "op": "agreement with float64",
        "logprob_max": float((got - want).abs().max()),
        "hidden_gradient_relative": float((grads[0] - hidden.grad).norm() / hidden.grad.norm()),
        "weight_gradient_relative": float((grads[1] - weight.grad).norm() / weight.grad.norm()),
        "weight_gradient_repeats": bool(torch.equal(again.double(), grads[1])),
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small shape")
    args = parser.parse_args()
    facts = machine_facts(torch.device("cuda"))
    report([check()], facts, None)
    for kind in KINDS:
        begin = time.perf_counter()
        case = Case(kind, *(QUICK if args.quick else SHAPE))
        row = case.rows()
        if kind == "8":
            row["dense_chunks_ms"] = milliseconds(case.dense_chunks, repeats=3)
        report([row], facts | {"seconds_in_all": time.perf_counter() - begin}, None)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
