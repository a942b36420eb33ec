"""Scores on the device against float64, at the widths of real heads, and what the device is asked for."""

import numpy as np
import pytest
import torch
from replay_cases import definition, head_logits, random_tokens, score_rows, support_of, targets_of, transforms_of

from keepmask.replay import logprobs_from_logits
from keepmask.replay.support import Known, Support

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
T, V = 200, 3000


class Problem:
    """Ragged rows with every transform, on the device."""

    def __init__(self, E, dtype, seed=0, **kinds):
        self.tokens = random_tokens(np.random.default_rng(seed), num_tokens=T, vocab_size=V, max_width=200, **kinds)
        generator = torch.Generator().manual_seed(seed)
        hidden, weight = torch.randn(T, E, generator=generator), torch.randn(V, E, generator=generator)
        self.hidden, self.weight = (hidden / E**0.25).to(dtype), (weight / E**0.25).to(dtype)
        self.support = support_of(self.tokens).to(DEVICE)
        self.targets = targets_of(self.tokens).to(DEVICE)
        self.transforms = transforms_of(self.tokens).to(DEVICE)
        self.factors = torch.randn(2, T, generator=generator, dtype=torch.float64)

    def loss(self, scores):
        return (scores.logprobs * self.factors[0].to(scores.logprobs)).sum() + (
            scores.entropy * self.factors[1].to(scores.entropy)
        ).sum()

    def leaves(self, device):
        return [t.detach().to(device).requires_grad_() for t in (self.hidden, self.weight)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("E", [576, 2048, 4096])
def test_scores_and_gradients_are_those_of_float64(E, dtype):
    problem = Problem(E, dtype)
    double = [t.detach().double().requires_grad_() for t in (problem.hidden, problem.weight)]
    want = definition(head_logits(*double), problem.tokens)
    want_hidden, want_weight = torch.autograd.grad(problem.loss(want), double)
    hidden, weight = problem.leaves(DEVICE)
    weight.main_grad = torch.zeros(V, E, device=DEVICE)
    got = score_rows(
        hidden, weight, problem.targets, problem.support, transforms=problem.transforms, entropy="grad",
        weight_grad="accumulate", full_log_normalizer=True,
    )  # fmt: skip
    problem.loss(got).backward()
    for name in ("logprobs", "entropy", "member_logprobs", "log_normalizer", "full_log_normalizer"):
        torch.testing.assert_close(
            getattr(got, name).double().cpu(), getattr(want, name), rtol=0, atol=2e-5, equal_nan=True
        )
    rounding = {torch.bfloat16: 3e-3, torch.float16: 4e-4}.get(dtype, 2e-6)
    assert ((hidden.grad.double().cpu() - want_hidden).norm() / want_hidden.norm()).item() <= rounding
    assert ((weight.main_grad.double().cpu() - want_weight).norm() / want_weight.norm()).item() <= 2e-6


def test_scores_from_logits_on_the_device_are_the_same():
    problem = Problem(576, torch.float32)
    hidden, weight = problem.leaves(DEVICE)
    options = {"transforms": problem.transforms, "entropy": "value"}
    got = score_rows(hidden, weight, problem.targets, problem.support, **options)
    logits = (hidden.double() @ weight.double().T).detach()
    want = logprobs_from_logits(logits, problem.targets, problem.support, **options)
    torch.testing.assert_close(got.logprobs.double(), want.logprobs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_every_run_gives_the_same_bits(entropy):
    problem, results = Problem(1024, torch.bfloat16), []
    for _ in range(3):
        hidden, weight = problem.leaves(DEVICE)
        got = score_rows(
            hidden, weight, problem.targets, problem.support, transforms=problem.transforms, entropy=entropy
        )
        got.logprobs.sum().backward()
        results.append((got.logprobs, hidden.grad, weight.grad))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_a_second_pass_over_a_support_does_not_wait_for_the_device(entropy):
    problem = Problem(576, torch.bfloat16, empty=0.0)
    host = support_of(problem.tokens)
    support = Support(host.ids, host.offsets, Known(host.offsets)).to(DEVICE)
    hidden, weight = problem.leaves(DEVICE)

    def run():
        got = score_rows(hidden, weight, problem.targets, support, transforms=problem.transforms, entropy=entropy)
        (got.logprobs.sum() + (got.entropy.sum() if entropy == "grad" else 0)).backward()

    run()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
