"""Time of one step of the sampler on a CUDA device, against the bytes it must read over the device's bandwidth.

    scripts/bench sampler_gpu            a table
    scripts/bench sampler_gpu --json     one JSON row a case and implementation

A step reads each logit once: B x V x 4 bytes over the bandwidth, which a large copy is timed for first, is its floor.
Cases and logits are those of `scripts/bench sampler`; every row returns its mask and its processed log-prob. Timed are:

    step         one `Sampler.sample` and its mask, on the host: wall time
    kernels      selection, decision and capture alone, queued ahead of the device: time between CUDA events
    topk         `torch.topk(logits, 50)` alone: time between CUDA events
    sort-based   the PyTorch fallback of other engines, its bitmap copied to the host: wall time
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from keepmask.bench.machine import machine_facts
from keepmask.bench.sampler import CASES, logits_like_a_model, truncated
from keepmask.bench.timing import Row, arguments, quantiles, report
from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec
from keepmask.sampling.records import MAX_CANDIDATES
from keepmask.sampling.row_records import RowRecords

SHAPES = ((64, 151_936), (256, 151_936))
REPEATS, WARM_UP, AT_ONCE = 50, 5, 10
AHEAD = 20_000_000  # cycles the device is kept busy for, so that what is timed is queued before it starts
COPIED_BYTES = 2**30


def device_ms(run: Callable[[], object]) -> list[float]:
    """Milliseconds of one run on the device, without gaps between its kernels; several measurements."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        start.record()
        for _ in range(AT_ONCE):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / AT_ONCE)
    return times


def wall_ms(run: Callable[[], object]) -> list[float]:
    """Milliseconds of one run until its results are on the host; several measurements."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / (1e-3 * float(np.median(device_ms(lambda: target.copy_(source)))))


def sort_based(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, their log-probs, and the kept set as bits, all on the host."""
    z = truncated(logits / (1.0 if params.greedy else params.temperature), params)
    logprobs = z.log_softmax(-1)
    token_ids = z.argmax(-1) if params.greedy else (logprobs.exp() / torch.empty_like(z).exponential_()).argmax(-1)
    keep = torch.nn.functional.pad(z > -torch.inf, (0, -z.shape[1] % 8)).view(len(z), -1, 8)
    bits = (keep << torch.arange(8, dtype=torch.uint8, device=z.device)).sum(-1, dtype=torch.uint8)
    return token_ids.cpu(), logprobs.gather(-1, token_ids[:, None]).cpu(), bits.cpu()


def kernels_of(logits: torch.Tensor, rows: list, spec: SamplerSpec) -> Callable[[], None]:
    """What a step queues for these rows, without the copies and the log-prob entries."""
    from keepmask.sampling.cuda import capture_triton, decide_triton, select_triton
    from keepmask.sampling.cuda.draw_records import Candidates, words_of

    words = torch.from_numpy(words_of(RowRecords(spec).of(rows))).to(logits.device)

    def draw() -> Candidates:
        found = select_triton.select(logits, words, capacity=MAX_CANDIDATES)
        decide_triton.decide(found, words, spec.vocab_size)
        decide_triton.decide_all(logits, found, words)
        return found

    counts, over_all = (draw().field(name) for name in ("count", "over_all"))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    out = torch.empty(int(offsets[-1]), dtype=torch.int32, device=logits.device), logits.new_empty(0)
    ways = set(over_all[counts > 0].tolist())

    def run() -> None:
        found = draw()
        for way in ways:
            capture_triton.capture(logits, found, words, offsets, out, over_all=bool(way))

    return run


def measure(B: int, V: int, name: str, options: dict[str, Any], bytes_per_s: float) -> Iterator[Row]:
    """The four implementations on one case."""
    logits = logits_like_a_model(B, V).cuda()
    params = SamplingParams(logprobs=0, max_tokens=None, **options)
    spec = SamplerSpec(vocab_size=V, logprobs_mode="processed_logprobs", return_sampling_mask=True)
    sampler, head = Sampler(spec), DenseHead(logits)
    prompt = np.arange(0, 2000, 7).tolist()
    rows = [sampler.open_row(params, prompt_token_ids=prompt, seed=b, completion_index=0) for b in range(B)]

    def step() -> list[int]:
        batch = sampler.sample(head, rows)
        mask = batch.mask.wait()
        return [mask.row(b)[0].size or V for b in range(B)]

    floor = 1e3 * logits.nbytes / bytes_per_s
    common = {"op": f"sample {name}", "shape": [B, V], "dtype": "float32", "unit": "ms", "floor": floor}
    common |= {"support_mean": float(np.mean(step())), "bandwidth_gb_per_s": bytes_per_s / 1e9}
    times = {
        "step": wall_ms(step),
        "kernels": device_ms(kernels_of(logits, rows, spec)),
        "topk": device_ms(lambda: logits.topk(50)),
        "sort-based": wall_ms(lambda: sort_based(logits, params)),
    }
    for implementation, values in times.items():
        own = quantiles(values)
        yield common | {"implementation": implementation, "over_floor": own["p50"] / floor} | own


LINE = (
    "{op:42s} {shape!s:14s} {implementation:10s} p20 {p20:8.4f}  p50 {p50:8.4f}  p80 {p80:8.4f} ms   "
    "floor {floor:7.4f} ms  {over_floor:6.1f} x floor   mean support {support_mean:.0f}"
)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--shape", help="B,V instead of the usual shapes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sampler_gpu times a CUDA device and there is none here; `scripts/bench sampler` times the CPU")
    shapes = [tuple(map(int, args.shape.split(",")))] if args.shape else SHAPES
    cases = [(name, options) for name, options in CASES.items() if args.only in name]
    bytes_per_s = bandwidth()
    rows = (row for B, V in shapes for name, options in cases for row in measure(B, V, name, options, bytes_per_s))
    facts = machine_facts(torch.device("cuda")) | {"cuda": torch.version.cuda}
    report(rows, facts, None if args.json else LINE.format_map)


if __name__ == "__main__":
    main()
