"""The ways to score drawn tokens on their supports that `keepmask.bench.replay` compares, forward and backward.

Each is `step(problem)`: log-probs of the targets on their rows, and gradients of `(logprobs * advantages).sum()` added
to `problem.hidden.grad` (fresh each time) and to the gradient buffer of the head, which exists beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from keepmask.mask import SamplingMask
from keepmask.replay.logprobs import ScoreOptions, logprobs_from_hidden
from keepmask.replay.support import Support

CHUNK = 256  # tokens a dense product takes at a time


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    mask: SamplingMask
    support: Support
    advantages: Tensor

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        return self.support.row_index, self.support.ids.long()


def supports_like(kind: str, num_tokens: int, vocab_size: int, rng: np.random.Generator) -> SamplingMask:
    """Ragged rows as reported for real rollouts, ids distributed as 1 / rank. `kind` is about the mean.

    "8": median 2, p99 about 80, 46 % of one id. "50": 20 % of one id, at most 500. "75": 12 % of one id, at most 512.
    "500": even up to 1024, 3 % of one id.
    """
    single, median, spread, most = {
        "8": (0.46, 4.8, 1.35, vocab_size),
        "50": (0.20, 30, 1.3, 500),
        "75": (0.12, 38, 1.3, 512),
        "500": (0.03, 0, 0, 1024),
    }[kind]
    if median:
        counts = np.minimum(1 + np.ceil(rng.lognormal(np.log(median), spread, num_tokens)), most)
    else:
        counts = rng.integers(2, most + 1, num_tokens)
    counts = np.where(rng.random(num_tokens) < single, 1, counts).astype(np.int64)
    rows = []
    for count in np.minimum(counts, vocab_size // 4).tolist():
        row = np.zeros(0, np.int64)
        while row.size < count:
            drawn = np.exp(rng.random(4 * count + 16) * np.log(vocab_size)).astype(np.int64) - 1
            row = np.unique(np.concatenate([row, drawn]))
        rows.append(rng.choice(row, count, replace=False))
    return SamplingMask.from_lists(rows)


def make_problem(mask: SamplingMask, hidden_size: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    hidden = torch.randn(len(mask), hidden_size, generator=generator)
    weight = torch.randn(vocab_size, hidden_size, generator=generator) * (3 / hidden_size**0.5)
    drawn = mask.offsets[:-1] + (rng.random(len(mask)) * mask.counts).astype(np.int64)
    problem = Problem(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        torch.tensor(mask.ids[drawn], dtype=torch.int64),
        mask,
        Support.from_mask(mask),
        torch.randn(len(mask), generator=generator),
    )
    problem.weight.grad = torch.zeros_like(problem.weight)
    return problem


def full(problem: Problem, keep: Tensor | None = None) -> Tensor:
    """Full logits, masked, log-softmax."""
    keep = keep_mask(problem) if keep is None else keep
    logits = (problem.hidden @ problem.weight.T).float()
    logprobs = logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
    logprobs = logprobs.gather(-1, problem.targets[:, None])[:, 0]
    problem.hidden.grad = None
    (logprobs * problem.advantages).sum().backward()
    return logprobs.detach()


def keep_mask(problem: Problem) -> Tensor:
    keep = torch.zeros(len(problem.mask), problem.weight.shape[0], dtype=torch.bool)
    keep[problem.pairs] = True
    return keep


def dense_chunks(problem: Problem) -> Tensor:
    """The best dense form: a product per chunk of tokens, of which the support's logits are kept; then two more
    products, from logit gradients that are zero outside the support. In the type of the inputs, as trainers do."""
    hidden, weight, support = problem.hidden.detach(), problem.weight.detach(), problem.support
    rows, ids = problem.pairs
    bounds = [*support.offsets[:-1:CHUNK].tolist(), support.num_pairs]
    z = torch.empty(support.num_pairs)
    for chunk, (low, high) in enumerate(pairwise(bounds)):
        start = chunk * CHUNK
        z[low:high] = (hidden[start : start + CHUNK] @ weight.T)[rows[low:high] - start, ids[low:high]].float()
    peak = torch.segment_reduce(z, "max", offsets=support.offsets)
    total = torch.segment_reduce((z - peak[rows]).exp(), "sum", offsets=support.offsets)
    members = z - (peak + total.log())[rows]
    positions = support.target_positions(problem.targets)
    logit_grad = -problem.advantages[rows] * members.exp()
    logit_grad[positions] += problem.advantages
    grad = torch.empty_like(hidden)
    for chunk, (low, high) in enumerate(pairwise(bounds)):
        start = chunk * CHUNK
        part = hidden[start : start + CHUNK]
        dense = torch.zeros(len(part), weight.shape[0], dtype=hidden.dtype)
        dense[rows[low:high] - start, ids[low:high]] = logit_grad[low:high].to(hidden.dtype)
        torch.mm(dense, weight, out=grad[start : start + CHUNK])
        problem.weight.grad.addmm_(dense.T, part)
    problem.hidden.grad = grad
    return members[positions]


def keepmask(problem: Problem, *, fresh: bool = False, impl: str = "auto", cold: bool = False) -> Tensor:
    """keepmask. fresh: the head has no gradient yet, and gets a whole one. cold: the views of the support are made
    anew, as for the first pass over a batch."""
    support = Support.from_mask(problem.mask) if cold else problem.support
    weight = problem.weight.detach().requires_grad_() if fresh else problem.weight
    problem.hidden.grad = None
    weight_grad = "dense" if fresh else "accumulate"
    scores = logprobs_from_hidden(
        problem.hidden, weight, problem.targets, support, options=ScoreOptions(weight_grad=weight_grad, impl=impl)
    )
    (scores.logprobs * problem.advantages).sum().backward()
    return scores.logprobs.detach()


FORMS = {
    "full": full,
    "dense chunks": dense_chunks,
    "keepmask": keepmask,
    "keepmask, first pass": partial(keepmask, cold=True),
    "keepmask, fresh gradient": partial(keepmask, fresh=True),
    "keepmask, plain PyTorch": partial(keepmask, impl="gather"),
}
