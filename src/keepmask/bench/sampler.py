"""Time of one `Sampler.sample` against `torch.topk` alone and against the sort-based path of other engines.

    scripts/bench sampler            a table
    scripts/bench sampler --json     one JSON row a case

Each case alternates its three implementations in one process and reports quantiles of the wall time. The sort-based
path is the PyTorch fallback of other engines: sort, softmax, cumulative sum, scatter, exponential noise over all of V,
log-softmax, then the kept set as a bitmap, copied to the host and unpacked to ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from keepmask.bench.machine import machine_facts
from keepmask.bench.timing import Row, arguments, in_turn, quantiles, report
from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler, SamplerSpec

SHAPES = ((64, 49152), (1, 49152), (64, 151936))
CASES: dict[str, dict[str, Any]] = {
    "top_k 50 + top_p .95": {"top_k": 50, "top_p": 0.95},
    "top_p .95": {"top_p": 0.95},
    "min_p .05": {"min_p": 0.05},
    "top_k 512 + top_p .97": {"top_k": 512, "top_p": 0.97},
    "no filter": {},
    "greedy": {"temperature": 0.0},
    "top_k 50 + top_p .95 + penalties": {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
}
SECONDS = 0.3  # of each implementation of a case


def logits_like_a_model(B: int, V: int) -> torch.Tensor:
    """[B, V] float32: Zipf's law with another exponent a row, so that most supports are small and a few are wide."""
    rng = np.random.default_rng(0)
    exponent = rng.gamma(4.0, 0.8, (B, 1)) + 0.9
    z = 15 - exponent * np.log(np.arange(1, V + 1)) + rng.normal(0, 0.5, (B, V))
    return torch.tensor(rng.permuted(z, axis=1), dtype=torch.float32)


def sort_based(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Token ids, their log-probs, and the kept ids of each row."""
    if params.greedy:
        token_ids = logits.argmax(-1)
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, token_ids[:, None], True)
        return token_ids, torch.zeros(len(logits)), unpack(keep)
    z = truncated(logits / params.temperature, params)
    logprobs = z.log_softmax(-1)
    token_ids = logprobs.exp().div_(torch.empty_like(z).exponential_()).argmax(-1)
    return token_ids, logprobs.gather(-1, token_ids[:, None]), unpack(z > -torch.inf)


def truncated(z: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The logits with -inf for what min-p, top-k and top-p drop, by sorting whole rows."""
    if params.min_p > 0:
        probs = z.softmax(-1)
        z.masked_fill_(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if params.top_k <= 0 and params.top_p >= 1:
        return z
    values, ids = z.sort(-1)
    if params.top_k > 0:
        values.masked_fill_(values < values[:, -params.top_k, None], -torch.inf)
    if params.top_p < 1:
        drop = values.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[:, -1] = False
        values.masked_fill_(drop, -torch.inf)
    return z.scatter(-1, ids, values)


def unpack(keep: torch.Tensor) -> list[np.ndarray]:
    bitmap = np.packbits(keep.numpy(), axis=-1, bitorder="little")
    return [np.flatnonzero(np.unpackbits(row, bitorder="little")) for row in bitmap]


def measure(B: int, V: int, name: str, options: dict[str, Any]) -> Iterator[Row]:
    """The three implementations on one case."""
    logits = logits_like_a_model(B, V)
    head = DenseHead(logits)
    params = SamplingParams(logprobs=0, max_tokens=None, **options)
    sampler = Sampler(
        SamplerSpec(vocab_size=V, logprobs_mode="processed_logprobs", return_sampling_mask=True), impl="fast"
    )
    prompt = np.arange(0, 2000, 7).tolist()
    rows = [sampler.open_row(params, prompt_token_ids=prompt, seed=b, completion_index=0) for b in range(B)]

    def fast() -> None:
        batch = sampler.sample(head, rows)
        mask = batch.mask.wait()
        for b in range(B):
            mask.row(b)
            batch.logprobs.row_logprobs(b)

    runs = {"topk": lambda: logits.topk(50), "fast": fast, "sort-based": lambda: sort_based(logits, params)}
    times = {name: quantiles(values) for name, values in in_turn(runs, seconds=SECONDS).items()}
    mask = sampler.sample(head, rows).mask.wait()
    sizes = [mask.row(b)[0].size or V for b in range(B)]
    common = {
        "op": f"sample {name}",
        "shape": [B, V],
        "dtype": "float32",
        "unit": "ms",
        "support_mean": float(np.mean(sizes)),
    }
    for implementation, own in times.items():
        over = {
            "over_topk": own["p50"] / times["topk"]["p50"],
            "sort_based_over": times["sort-based"]["p50"] / own["p50"],
        }
        yield common | {"implementation": implementation} | own | over


LINE = (
    "{op:42s} {shape!s:14s} {implementation:10s} p20 {p20:8.3f}  p50 {p50:8.3f}  p80 {p80:8.3f} ms   "
    "{over_topk:6.2f} x topk   sort-based / this {sort_based_over:7.1f}   mean support {support_mean:.0f}"
)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--shape", help="B,V instead of the usual shapes")
    args = parser.parse_args()
    shapes = [tuple(map(int, args.shape.split(",")))] if args.shape else SHAPES
    cases = [(name, options) for name, options in CASES.items() if args.only in name]
    rows = (row for B, V in shapes for name, options in cases for row in measure(B, V, name, options))
    report(rows, machine_facts(), None if args.json else LINE.format_map)


if __name__ == "__main__":
    main()
