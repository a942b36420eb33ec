"""Scores on supports, from hidden states and from logits, against dense float64 rows under autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import (
    Token,
    definition,
    gradient_error,
    head_logits,
    random_tokens,
    score_error,
    score_rows,
    support_of,
    targets_of,
    transforms_of,
)

import oracle
from keepmask import MaskError, SamplingMask
from keepmask.replay.logprobs import logprobs_from_logits
from keepmask.replay.scores import RowStatus
from keepmask.replay.support import Support

IMPLS = ["gather", "numba", "triton", "dense"]
T, E, V = 24, 16, 60
LARGEST = 45  # transformed logit of all problems here
SCORE = score_error(E, LARGEST)
GRADIENT, GRADIENT_BF16 = (gradient_error(E, LARGEST, V, dtype) for dtype in (torch.float32, torch.bfloat16))


class Problem:
    """A head, hidden states and tokens, and the loss whose gradient is compared: random weights of every score."""

    def __init__(self, seed=0, *, num_tokens=T, scale=1.0, dtype=torch.float32, bias=True, **kinds):
        rng = np.random.default_rng(seed)
        self.tokens = random_tokens(rng, num_tokens=num_tokens, vocab_size=V, **kinds)
        self.support, self.targets = support_of(self.tokens), targets_of(self.tokens)
        self.transforms = transforms_of(self.tokens)
        generator = torch.Generator().manual_seed(seed)
        self.hidden = (scale * torch.randn(num_tokens, E, generator=generator)).to(dtype)
        self.weight = torch.randn(V, E, generator=generator).to(dtype)
        self.bias = torch.randn(V, generator=generator).to(dtype) if bias else None
        rows = [torch.randn(n, generator=generator, dtype=torch.float64) for n in self.support.counts.tolist()]
        self.reference = torch.cat([row.log_softmax(0) for row in rows])
        self.weights = torch.randn(3, num_tokens, generator=generator, dtype=torch.float64)
        self.member_weights = torch.randn(self.support.num_pairs, generator=generator, dtype=torch.float64)

    def leaves(self, dtype=None):
        tensors = [t for t in (self.hidden, self.weight, self.bias) if t is not None]
        return [t.to(dtype or t.dtype).clone().requires_grad_() for t in tensors]

    def loss(self, scores, *, kl=False):
        loss = (scores.logprobs * self.weights[0]).sum() + (scores.entropy * self.weights[1]).sum()
        loss = loss + (scores.member_logprobs * self.member_weights).sum()
        return loss + (scores.kl * self.weights[2]).sum() if kl else loss


def expected(problem, *, kl=False, scored=None, **form):
    hidden, weight, *bias = problem.leaves(torch.float64)
    scores = definition(
        head_logits(hidden, weight, *bias, **form),
        problem.tokens,
        scored=scored,
        ref_member_logprobs=problem.reference if kl else None,
    )
    gradients = torch.autograd.grad(problem.loss(scores, kl=kl), [hidden, weight, *bias])
    return scores, gradients


def assert_close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance, equal_nan=True)


def assert_relative(got, want, tolerance):
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() <= tolerance


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize("form", [{}, {"softcap": 5.0}, {"softcap": 4.0, "scale": 0.7}], ids=str)
def test_scores_and_gradients_equal_those_of_dense_rows(impl, form):
    problem = Problem()
    want, want_gradients = expected(problem, **form)
    hidden, weight, bias = problem.leaves()
    got = score_rows(
        hidden, weight, problem.targets, problem.support, bias=bias, transforms=problem.transforms,
        entropy="grad", full_log_normalizer=True, impl=impl, **form,
    )  # fmt: skip
    for name in ("logprobs", "entropy", "member_logprobs", "log_normalizer", "full_log_normalizer"):
        assert getattr(got, name).dtype == torch.float32
        assert_close(getattr(got, name), getattr(want, name), SCORE)
    for one, other in zip(torch.autograd.grad(problem.loss(got), [hidden, weight, bias]), want_gradients, strict=True):
        assert_relative(one, other, GRADIENT)


@pytest.mark.parametrize("impl", IMPLS)
def test_kl_to_a_reference_is_exact_and_differentiable(impl):
    problem = Problem(1, empty=0.0)
    want, want_gradients = expected(problem, kl=True)
    hidden, weight, bias = problem.leaves()
    got = score_rows(
        hidden, weight, problem.targets, problem.support, bias=bias, transforms=problem.transforms,
        entropy="grad", ref_member_logprobs=problem.reference, impl=impl,
    )  # fmt: skip
    assert_close(got.kl, want.kl, SCORE)
    gradients = torch.autograd.grad(problem.loss(got, kl=True), [hidden, weight, bias])
    for one, other in zip(gradients, want_gradients, strict=True):
        assert_relative(one, other, GRADIENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_vocabulary_rows_are_scored_block_by_block(monkeypatch, dtype):
    monkeypatch.setattr("keepmask.replay.head_logits._BLOCK_WEIGHTS", 7 * E)  # 9 blocks of the head
    monkeypatch.setattr("keepmask.replay.full.BLOCK_FLOATS", 20)  # 2 rows at a time
    problem = Problem(17, empty=0.6, dtype=dtype, bias=False)
    want, (want_hidden, want_weight) = expected(problem)
    hidden, weight = problem.leaves()
    weight.main_grad = torch.zeros(V, E)
    got = score_rows(
        hidden, weight, problem.targets, problem.support, transforms=problem.transforms, entropy="grad",
        weight_grad="accumulate", full_log_normalizer=True,
    )  # fmt: skip
    for name in ("logprobs", "entropy", "log_normalizer", "full_log_normalizer"):
        assert_close(getattr(got, name), getattr(want, name), SCORE)
    problem.loss(got).backward()
    assert_relative(hidden.grad, want_hidden, GRADIENT if dtype == torch.float32 else GRADIENT_BF16)
    assert_relative(weight.main_grad, want_weight, GRADIENT)


def test_kl_to_the_policy_itself_is_zero():
    problem = Problem(2, empty=0.0)
    arguments = (problem.hidden, problem.weight, problem.targets, problem.support)
    own = score_rows(*arguments).member_logprobs
    assert torch.equal(score_rows(*arguments, ref_member_logprobs=own).kl, torch.zeros(T))


def test_from_logits_equals_from_hidden():
    problem = Problem(3)
    want, _ = expected(problem)
    logits = head_logits(problem.hidden, problem.weight, problem.bias).requires_grad_()
    got = logprobs_from_logits(
        logits, problem.targets, problem.support, transforms=problem.transforms, entropy="grad",
        full_log_normalizer=True,
    )  # fmt: skip
    leaf = logits.detach().clone().requires_grad_()
    dense = definition(leaf, problem.tokens)
    for name in ("logprobs", "entropy", "member_logprobs", "log_normalizer", "full_log_normalizer"):
        assert_close(getattr(got, name), getattr(want, name), SCORE)  # transforms hold float32 parameters
    assert_relative(
        torch.autograd.grad(problem.loss(got), logits)[0], torch.autograd.grad(problem.loss(dense), leaf)[0], 1e-6
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_of_45_keep_float32_accuracy(impl):
    problem = Problem(4, num_tokens=60, transforms=False, max_width=40)
    logits = head_logits(problem.hidden, problem.weight, problem.bias)
    factor = 45 / logits.abs().max()
    problem.hidden, problem.bias = problem.hidden * factor, problem.bias * factor
    want, want_gradients = expected(problem)
    hidden, weight, bias = problem.leaves()
    got = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, entropy="grad", impl=impl)
    assert head_logits(hidden, weight, bias).abs().max() > 44
    assert_close(got.logprobs, want.logprobs, SCORE)
    assert_close(got.entropy, want.entropy, SCORE)
    for one, other in zip(torch.autograd.grad(problem.loss(got), [hidden, weight, bias]), want_gradients, strict=True):
        assert_relative(one, other, GRADIENT)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_inputs_are_scored_in_float32(impl):
    problem = Problem(5, dtype=torch.bfloat16, num_tokens=40, max_width=30, bias=False)
    want, (want_hidden, want_weight) = expected(problem)
    hidden, weight = problem.leaves()
    weight.main_grad = torch.zeros(V, E)
    got = score_rows(
        hidden, weight, problem.targets, problem.support, transforms=problem.transforms, entropy="grad",
        weight_grad="accumulate", impl=impl,
    )  # fmt: skip
    assert_close(got.logprobs, want.logprobs, SCORE)
    assert_close(got.entropy, want.entropy, SCORE)
    problem.loss(got).backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert_relative(hidden.grad, want_hidden, GRADIENT_BF16)
    assert weight.grad is None
    assert_relative(weight.main_grad, want_weight, GRADIENT)


@pytest.mark.parametrize("impl", ["gather", "dense"])
def test_float64_inputs_are_scored_in_float64(impl):
    problem = Problem(6, dtype=torch.float64, transforms=False)
    want, want_gradients = expected(problem)
    leaves = problem.leaves()
    hidden, weight, bias = leaves
    got = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, entropy="grad", impl=impl)
    for name in ("logprobs", "entropy", "member_logprobs"):
        assert_close(getattr(got, name), getattr(want, name), 1e-12)
    for one, other in zip(torch.autograd.grad(problem.loss(got), leaves), want_gradients, strict=True):
        assert_relative(one, other, 1e-12)


def test_gradients_pass_gradcheck():
    problem = Problem(7, num_tokens=8, dtype=torch.float64)
    some = [*problem.tokens[:1], Token([3, 9, 11], 9), *problem.tokens[1:]]

    def scores(hidden, weight, bias):
        got = score_rows(
            hidden, weight, targets_of(some), support_of(some), bias=bias, softcap=3.0, transforms=transforms_of(some),
            entropy="grad",
        )  # fmt: skip
        return got.logprobs, got.entropy, got.member_logprobs

    hidden, weight, bias = problem.leaves()
    hidden = torch.cat([hidden, hidden[:1]]).detach().requires_grad_()
    assert torch.autograd.gradcheck(scores, (hidden, weight, bias), fast_mode=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_of_one_id_is_exactly_zero(impl):
    hidden = torch.full((3, E), torch.inf, requires_grad=True)  # nothing may be computed from it
    weight = torch.randn(V, E, requires_grad=True)
    support = Support(torch.tensor([4, 9, 4]), torch.arange(4))
    got = score_rows(
        hidden, weight, torch.tensor([4, 9, 4]), support, entropy="grad", ref_member_logprobs=torch.zeros(3), impl=impl
    )
    for values in (got.logprobs, got.entropy, got.kl, got.member_logprobs):
        assert torch.equal(values, torch.zeros(3))
    (got.logprobs + got.entropy + got.kl + got.member_logprobs).sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(3, E))
    assert torch.equal(weight.grad, torch.zeros(V, E))
    assert got.row_status.tolist() == [RowStatus.SINGLETON] * 3


def test_a_greedy_token_of_several_ids_is_refused_and_one_of_a_single_id_is_not():
    tokens = [Token([1, 2], 2), Token([5], 5, temperature=0.0), Token([1, 2], 1, temperature=0.0)]
    arguments = (torch.randn(3, E), torch.randn(V, E), targets_of(tokens), support_of(tokens))
    with pytest.raises(MaskError, match="row 2: temperature 0: must be positive, and below 1e-5 a draw is greedy"):
        score_rows(*arguments, transforms=transforms_of(tokens))
    scored = torch.tensor([True, True, False])
    got = score_rows(*arguments, transforms=transforms_of(tokens), loss_mask=scored)
    assert got.logprobs[1:].tolist() == [0, 0]
    tokens[2] = Token(None, 1, temperature=0.0)
    with pytest.raises(MaskError, match="row 2: temperature 0"):
        score_rows(*arguments[:2], targets_of(tokens), support_of(tokens), transforms=transforms_of(tokens))
    tokens[2] = Token([1, 2], 1, repetition_penalty=0.0)
    with pytest.raises(MaskError, match="row 2: repetition_penalty 0: must be positive"):
        score_rows(*arguments, transforms=transforms_of(tokens))


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_outside_the_loss_mask_cost_nothing_and_get_nothing(impl):
    problem = Problem(8)
    loss_mask = torch.arange(T) % 3 != 0
    want, want_gradients = expected(problem, scored=loss_mask)
    problem.hidden[~loss_mask] = torch.nan  # nothing may be computed from it
    targets = torch.where(loss_mask, problem.targets, -100)
    hidden, weight, bias = problem.leaves()
    got = score_rows(
        hidden, weight, targets, problem.support, bias=bias, transforms=problem.transforms, entropy="grad",
        loss_mask=loss_mask, full_log_normalizer=True, impl=impl,
    )  # fmt: skip
    for name in ("logprobs", "entropy", "member_logprobs", "log_normalizer", "full_log_normalizer"):
        assert_close(getattr(got, name), getattr(want, name), SCORE)
    assert (got.row_status == RowStatus.LOSS_MASKED).tolist() == (~loss_mask).tolist()
    for one, other in zip(torch.autograd.grad(problem.loss(got), [hidden, weight, bias]), want_gradients, strict=True):
        assert_relative(one, other, GRADIENT)


def test_empty_rows_follow_the_policy():
    problem = Problem(9)
    empty = torch.tensor([token.support is None for token in problem.tokens])
    assert 0 < empty.sum() < T
    arguments = (problem.hidden, problem.weight, problem.targets, problem.support)
    full = score_rows(*arguments)
    assert torch.equal(full.row_status == RowStatus.FULL, empty)
    assert (full.logprobs[empty] < 0).all()
    ignored = score_rows(*arguments, on_empty="ignore")
    assert torch.equal(ignored.row_status == RowStatus.IGNORED, empty)
    assert torch.equal(ignored.logprobs, torch.where(empty, 0.0, full.logprobs))
    with pytest.raises(MaskError, match=rf"row.* {empty.nonzero()[0].item()}.*whole vocabulary"):
        score_rows(*arguments, on_empty="error")
    assert score_rows(*arguments, on_empty="error", loss_mask=~empty).logprobs.isfinite().all()
    with pytest.raises(ValueError, match="no exact KL"):
        score_rows(*arguments, ref_member_logprobs=torch.zeros(problem.support.num_pairs))


def test_a_target_outside_its_row_is_refused_or_left_out():
    tokens = [Token([1, 2, 3], 2), Token([1, 2, 3], 4), Token([7], 8), Token(None, 5)]
    arguments = (torch.randn(4, E), torch.randn(V, E), targets_of(tokens), support_of(tokens))
    with pytest.raises(MaskError, match="rows 1, 2: the target is not in its row"):
        score_rows(*arguments)
    with pytest.raises(MaskError, match="row 2: the target is not in its row"):
        score_rows(*arguments, loss_mask=torch.tensor([True, False, True, True]))
    got = score_rows(*arguments, on_outside="ignore")
    assert got.row_status.tolist() == [RowStatus.SUPPORT, RowStatus.OUTSIDE, RowStatus.OUTSIDE, RowStatus.FULL]
    assert got.logprobs[1:3].tolist() == [0.0, 0.0]


def test_what_does_not_fit_together_is_refused():
    hidden, weight = torch.randn(2, E), torch.randn(V, E)
    support, targets = Support(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])), torch.tensor([1, 3])
    with pytest.raises(MaskError, match="2 rows for 3 targets"):
        score_rows(torch.randn(3, E), weight, torch.tensor([1, 3, 3]), support)
    with pytest.raises(ValueError, match="hidden has 3 rows for 2 targets"):
        score_rows(torch.randn(3, E), weight, targets, support)
    with pytest.raises(MaskError, match=r"row 1: ids must be in \[0, 3\)"):
        score_rows(hidden, weight[:3], targets, support)
    with pytest.raises(MaskError, match=r"row 1: ids must be in \[0, 60\), got -1\.\.2"):
        score_rows(hidden, weight, targets, Support(torch.tensor([1, 2, -1]), torch.tensor([0, 2, 3])))
    with pytest.raises(MaskError, match="do not belong together"):
        score_rows(hidden, weight, targets, Support(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 4])))
    with pytest.raises(ValueError, match="both or neither float64"):
        score_rows(hidden, weight.double(), targets, support)
    with pytest.raises(ValueError, match="hidden must be"):
        score_rows(hidden[:, :3], weight, targets, support)
    with pytest.raises(ValueError, match="E = 0"):
        score_rows(hidden[:, :0], weight[:, :0], targets, support)
    with pytest.raises(MaskError, match="mask: must be a SamplingMask or a Support, got list"):
        score_rows(hidden, weight, targets, [[1, 2], [3]])
    with pytest.raises(ValueError, match="bias"):
        score_rows(hidden, weight, targets, support, bias=torch.zeros(3))
    with pytest.raises(MaskError, match="loss_mask"):
        score_rows(hidden, weight, targets, support, loss_mask=torch.ones(2))
    with pytest.raises(MaskError, match=r"row 0: targets must be in \[0, 60\)"):
        score_rows(hidden[:1], weight, torch.tensor([60]), SamplingMask([], [0, 0]))
    for name in ("impl", "entropy", "on_empty", "on_outside", "weight_grad"):
        with pytest.raises(ValueError, match=f"{name}='best'"):
            score_rows(hidden, weight, targets, support, **{name: "best"})
    for name, value in (("softcap", 0.0), ("scale", 0.0), ("rounding", "fp16"), ("max_pairs", 0)):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            score_rows(hidden, weight, targets, support, **{name: value})
    with pytest.raises(ValueError, match="numba"):
        score_rows(hidden.double(), weight.double(), targets, support, impl="numba")


@pytest.mark.parametrize("impl", ["gather", "numba", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_of_the_weight_gradient_holds_the_same_numbers(impl, dtype):
    problem = Problem(10, empty=0.0, dtype=dtype, bias=False)

    def run(weight, **options):
        hidden = problem.hidden.clone().requires_grad_()
        score_rows(hidden, weight, problem.targets, problem.support, impl=impl, **options).logprobs.sum().backward()
        return hidden.grad

    dense = problem.weight.clone().requires_grad_()
    want_hidden = run(dense)
    used = torch.tensor(sorted({i for token in problem.tokens if len(token.support) > 1 for i in token.support}))

    sparse = problem.weight.clone().requires_grad_()
    assert torch.equal(run(sparse, weight_grad="sparse_rows"), want_hidden)
    assert sparse.grad.is_sparse
    assert torch.equal(sparse.grad.coalesce().indices()[0], used)
    assert_relative(sparse.grad.to_dense(), dense.grad, GRADIENT)

    added = problem.weight.clone().requires_grad_()
    run(added, weight_grad="accumulate")
    assert torch.equal(added.grad, dense.grad)
    buffer = added.grad
    run(added, weight_grad="accumulate")
    assert added.grad is buffer
    assert_relative(added.grad, 2 * dense.grad.float(), GRADIENT if dtype == torch.float32 else 2 * GRADIENT_BF16)

    frozen = problem.weight.clone().requires_grad_()
    assert torch.equal(run(frozen, weight_grad="none"), want_hidden)
    assert frozen.grad is None


def test_sparse_rows_refuse_empty_rows():
    tokens = [Token(None, 3), Token([1, 2], 1)]
    weight = torch.randn(V, E, requires_grad=True)
    with pytest.raises(ValueError, match="every row of the head"):
        score_rows(torch.randn(2, E), weight, targets_of(tokens), support_of(tokens), weight_grad="sparse_rows")


@pytest.mark.parametrize("impl", ["gather", "dense"])
def test_chunks_of_pairs_change_nothing(impl):
    problem = Problem(11, dtype=torch.bfloat16, bias=False)

    def run(**options):
        hidden, weight = problem.leaves()
        got = score_rows(hidden, weight, problem.targets, problem.support, impl=impl, **options)
        got.logprobs.sum().backward()
        return got.logprobs, hidden.grad, weight.grad

    for one, other in zip(run(max_pairs=1), run(), strict=True):
        torch.testing.assert_close(one, other)


def test_rounding_scores_what_a_bfloat16_head_computes():
    problem = Problem(12, dtype=torch.bfloat16, transforms=False, empty=0.1)
    logits = (problem.hidden.float() @ problem.weight.float().T + problem.bias.float()).bfloat16()
    want = definition(logits.double(), problem.tokens)
    for impl in IMPLS:
        hidden, weight, bias = problem.leaves()
        got = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, rounding="bf16", impl=impl)
        assert_close(got.logprobs, want.logprobs, SCORE)
        got.logprobs.sum().backward()
        assert hidden.grad.abs().sum() > 0
    exact = score_rows(problem.hidden, problem.weight, problem.targets, problem.support, bias=problem.bias)
    assert (exact.logprobs - want.logprobs).abs().max() > 1e-3


def test_replayed_ratio_is_one_where_the_full_vocabulary_ratio_is_the_kept_mass():
    problem = Problem(13, empty=0.0, single=0.0)
    logits = head_logits(problem.hidden, problem.weight).numpy()
    got = score_rows(
        problem.hidden, problem.weight, problem.targets, problem.support, transforms=problem.transforms,
        full_log_normalizer=True,
    )  # fmt: skip
    for t, token in enumerate(problem.tokens):
        rollout = oracle.replayed(logits[t], token.params, token.prompt, token.output, token.support)
        drawn = rollout[token.support.index(token.target)]
        mass = oracle.kept_mass(logits[t], token.params, token.prompt, token.output, token.support)
        assert got.logprobs[t].item() == pytest.approx(drawn, abs=1e-5)
        assert got.kept_mass[t].item() == pytest.approx(mass, rel=1e-4)
        assert (got.full_logprobs[t] - drawn).exp().item() == pytest.approx(mass, rel=1e-4)
        assert got.row_status[t] == RowStatus.SUPPORT


def test_values_without_gradients_and_in_inference_mode():
    problem = Problem(14)
    hidden, weight, bias = problem.leaves()
    got = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, entropy="value")
    assert got.logprobs.requires_grad
    assert not got.entropy.requires_grad
    assert not got.log_normalizer.requires_grad
    assert got.full_log_normalizer is None
    assert got.kl is None
    with pytest.raises(ValueError, match="full_log_normalizer=True"):
        _ = got.kept_mass
    with torch.inference_mode():
        again = score_rows(hidden, weight, problem.targets, problem.support, bias=bias)
    assert torch.equal(again.logprobs, got.logprobs)
    assert again.entropy is None


def test_autocast_does_not_lower_the_precision():
    problem = Problem(15)
    arguments = (problem.hidden, problem.weight, problem.targets, problem.support)
    want = score_rows(*arguments, impl="dense")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = score_rows(*arguments, impl="dense")
    assert torch.equal(got.logprobs, want.logprobs)


def test_minus_infinity_among_logits_is_probability_zero():
    logits = torch.randn(2, 6)
    logits[0, [1, 3]] = -torch.inf
    logits[1, 5] = -torch.inf
    logits.requires_grad_()
    mask = SamplingMask.from_lists([[0, 1, 2], []])
    got = logprobs_from_logits(logits, torch.tensor([2, 0]), mask, entropy="grad", full_log_normalizer=True)
    (got.logprobs + got.entropy).sum().backward()
    kept = [logits.detach()[0, [0, 2]], logits.detach()[1, :5]]
    assert_close(got.logprobs, torch.stack([kept[0].log_softmax(0)[1], kept[1].log_softmax(0)[0]]), 1e-6)
    for t, row in enumerate(kept):
        probs = row.double().softmax(0)
        assert got.entropy[t].item() == pytest.approx(-(probs * probs.log()).sum().item(), abs=1e-6)
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == logits.grad[1, 5] == 0


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    num_tokens=st.integers(1, 12),
    shape=st.sampled_from([{}, {"empty": 0.0}, {"empty": 1.0}, {"single": 1.0, "empty": 0.0}, {"max_width": 3}]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    ids=st.sampled_from([torch.int32, torch.int64]),
    impl=st.sampled_from(["auto", "gather", "dense"]),
)
def test_any_ragged_rows_of_any_dtype_score_as_dense_rows_do(seed, num_tokens, shape, dtype, ids, impl):
    problem = Problem(seed, num_tokens=num_tokens, dtype=dtype, scale=0.5, **shape)
    want, want_gradients = expected(problem)
    leaves = problem.leaves()
    hidden, weight, bias = leaves
    got = score_rows(
        hidden, weight, problem.targets, support_of(problem.tokens, ids), bias=bias, transforms=problem.transforms,
        entropy="grad", impl=impl,
    )  # fmt: skip
    assert_close(got.logprobs, want.logprobs, SCORE)
    assert_close(got.entropy, want.entropy, SCORE)
    assert_close(got.member_logprobs, want.member_logprobs, SCORE)
    gradients = torch.autograd.grad(problem.loss(got), leaves)
    rounding = gradient_error(E, LARGEST, V, dtype)
    for one, other in zip(gradients, want_gradients, strict=True):
        assert (one.double() - other).norm().item() <= rounding * (other.norm().item() + 1)


def test_a_batch_of_no_tokens_has_scores_of_no_tokens():
    got = score_rows(torch.zeros(0, E), torch.zeros(V, E), torch.zeros(0, dtype=torch.int64), SamplingMask([], [0]))
    assert got.logprobs.shape == got.row_status.shape == (0,)


@pytest.mark.parametrize("impl", ["auto", "gather"])
def test_cost_is_that_of_the_pairs_whatever_the_vocabulary_and_the_widest_row(impl):
    # [T, V] would be 240 GB, [T, K of the widest row, E] 64 GB.
    num_tokens, vocab_size, widest = 20_000, 3_000_000, 400_000
    counts = torch.full((num_tokens,), 2)
    counts[7] = widest
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ids = torch.arange(int(offsets[-1])) % vocab_size
    hidden = torch.randn(num_tokens, 2, requires_grad=True)
    weight = torch.randn(vocab_size, 2, requires_grad=True)
    got = score_rows(hidden, weight, ids[offsets[:-1]], Support(ids, offsets), entropy="grad", impl=impl)
    (got.logprobs.sum() + got.entropy.sum() + got.member_logprobs[:5].sum()).backward()
    z = head_logits(hidden.detach()[:1], weight.detach()[:2])[0]
    assert got.logprobs[0].item() == pytest.approx(z.log_softmax(0)[0].item(), abs=1e-6)
    assert got.entropy[7].item() == pytest.approx(
        torch.distributions.Categorical(
            logits=head_logits(hidden.detach()[7:8], weight.detach()[ids[offsets[7] : offsets[8]]])[0]
        )
        .entropy()
        .item(),
        abs=1e-5,
    )
    assert weight.grad.count_nonzero() <= 2 * ids.numel()


def test_wide_supports_are_scored_by_dense_products():
    tokens = [Token(list(range(t, t + 30)), t + 3) for t in range(20)]
    arguments = (torch.randn(20, E), torch.randn(V, E), targets_of(tokens), support_of(tokens))
    assert torch.equal(score_rows(*arguments).logprobs, score_rows(*arguments, impl="dense").logprobs)


def test_numba_is_optional(monkeypatch):
    problem = Problem(16)
    arguments = (problem.hidden, problem.weight, problem.targets, problem.support)
    want = score_rows(*arguments, impl="reference").logprobs
    monkeypatch.setattr("keepmask.head.pair_products._has_numba", lambda: False)
    torch.testing.assert_close(score_rows(*arguments).logprobs, want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match='impl="numba": needs numba'):
        score_rows(*arguments, impl="numba")
