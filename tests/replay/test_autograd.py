"""Gradients whatever the caller does: parts frozen, recomputed, used twice, compiled, mixed types, any strides."""

import pytest
import torch
from replay_cases import definition, head_logits, score_rows, targets_of
from test_logprobs import GRADIENT, GRADIENT_BF16, E, Problem, T, V, assert_relative
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from keepmask.replay import autograd, logprobs_from_logits
from keepmask.replay.support import Support

IMPLS = ["gather", "numba", "triton", "dense"]


def scores_of(problem, hidden, weight, **options):
    options = {"transforms": problem.transforms, "entropy": "grad"} | options
    return score_rows(hidden, weight, problem.targets, problem.support, **options)


def loss_of(scores, problem):
    return (scores.logprobs * problem.weights[0]).sum() + (scores.entropy * problem.weights[1]).sum()


def wanted(problem, hidden=None, weight=None, bias=None):
    """The gradients by definition, in float64, of whatever is given."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    loss_of(definition(head_logits(*leaves), problem.tokens), problem).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("needed", ["h", "w", "b", "hw", "hb", "wb", "hwb"])
def test_any_of_hidden_weight_and_bias_may_be_frozen(impl, needed):
    problem = Problem(20)
    leaves = dict(zip("hwb", problem.leaves(), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    got = scores_of(problem, leaves["h"], leaves["w"], bias=leaves["b"], impl=impl)
    loss_of(got, problem).backward()
    for (name, leaf), want in zip(leaves.items(), wanted(problem, *leaves.values()), strict=True):
        if name in needed:
            assert_relative(leaf.grad, want, GRADIENT)
        else:
            assert leaf.grad is None


def test_nothing_is_differentiable_where_nothing_needs_it():
    problem = Problem(20)
    got = scores_of(problem, problem.hidden, problem.weight)
    assert not any(t.requires_grad for t in (got.logprobs, got.entropy, got.member_logprobs))


@pytest.mark.parametrize("impl", ["auto", "gather", "dense", "reference"])
def test_strides_do_not_matter(impl):
    problem = Problem(21)
    wide = torch.randn(T, 3, 2 * E, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = problem.weight.T.contiguous().requires_grad_()
    hidden = wide[:, 1, ::2]
    bias = torch.stack([problem.bias] * 3, 1)[:, 1]
    targets = torch.stack([problem.targets] * 2, 1)[:, 1]
    got = score_rows(
        hidden, head.T, targets, problem.support, bias=bias, transforms=problem.transforms, entropy="grad", impl=impl
    )
    loss_of(got, problem).backward()
    want_hidden, want_weight, _ = wanted(problem, hidden, head.T, bias)
    assert_relative(wide.grad[:, 1, ::2], want_hidden, GRADIENT)
    assert wide.grad.count_nonzero() == wide.grad[:, 1, ::2].count_nonzero()
    assert_relative(head.grad.T, want_weight, GRADIENT)


def test_logits_of_any_strides_and_expanded_ones():
    problem = Problem(22)
    table = torch.randn(V, T, generator=torch.Generator().manual_seed(0), requires_grad=True)
    one = torch.randn(1, V, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for leaf, logits in ((table, table.T), (one, one.expand(T, V))):
        got = logprobs_from_logits(
            logits, problem.targets, problem.support, transforms=problem.transforms, entropy="grad"
        )
        loss_of(got, problem).backward()
        double = leaf.detach().double().requires_grad_()
        loss_of(definition(double.T if leaf is table else double.expand(T, V), problem.tokens), problem).backward()
        assert_relative(leaf.grad, double.grad, GRADIENT)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_hidden_states_and_head_may_have_types_of_their_own(impl, dtypes):
    problem = Problem(23)
    hidden, weight = (t.to(d).requires_grad_() for t, d in zip((problem.hidden, problem.weight), dtypes, strict=True))
    loss_of(scores_of(problem, hidden, weight, impl=impl), problem).backward()
    want_hidden, want_weight = wanted(problem, hidden, weight)
    for leaf, want in ((hidden, want_hidden), (weight, want_weight)):
        assert leaf.grad.dtype == leaf.dtype
        assert_relative(leaf.grad, want, GRADIENT if leaf.dtype == torch.float32 else GRADIENT_BF16)


@pytest.mark.parametrize("impl", ["gather", "numba", "dense"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_scores_have_the_same_gradients(impl, reentrant):
    problem = Problem(24)
    plain, again = problem.leaves()[:2], problem.leaves()[:2]
    loss_of(scores_of(problem, *plain, impl=impl), problem).backward()

    def loss(hidden, weight):
        return loss_of(scores_of(problem, hidden, weight, impl=impl), problem)

    checkpoint(loss, *again, use_reentrant=reentrant).backward()
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("impl", ["gather", "numba", "dense"])
def test_a_graph_that_is_kept_gives_its_gradients_again(impl):
    problem = Problem(25)
    hidden, weight, _ = problem.leaves()
    loss = loss_of(scores_of(problem, hidden, weight, impl=impl), problem)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * first[0])
    torch.testing.assert_close(weight.grad, 2 * first[1])


@pytest.mark.parametrize("impl", ["gather", "numba", "dense"])
def test_a_support_scored_in_inference_mode_trains_afterwards(impl):
    problem = Problem(26, empty=0.0)
    with torch.inference_mode():
        problem.support = Support(problem.support.ids.clone(), problem.support.offsets.clone())
        problem.targets = targets_of(problem.tokens)
        reference = scores_of(problem, problem.hidden, problem.weight, impl=impl)
    hidden, weight, _ = problem.leaves()
    got = scores_of(problem, hidden, weight, impl=impl, ref_member_logprobs=reference.member_logprobs)
    loss_of(got, problem).backward()
    assert torch.equal(got.logprobs, reference.logprobs)
    for leaf, want in zip((hidden, weight), wanted(problem, hidden, weight), strict=True):
        assert_relative(leaf.grad, want, GRADIENT)


@pytest.mark.parametrize("impl", ["gather", "dense"])
def test_autocast_changes_neither_scores_nor_gradients(impl):
    problem, results = Problem(27), []
    for enabled in (False, True):
        hidden, weight, _ = problem.leaves()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            got = scores_of(problem, hidden, weight, impl=impl, full_log_normalizer=True)
            loss_of(got, problem).backward()
        results.append((got.logprobs, got.full_log_normalizer, hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own look at tensors
def test_callers_may_be_compiled():
    problem, results = Problem(28), []

    def loss(hidden, weight):
        inside = scores_of(problem, hidden.tanh(), weight)
        table = logprobs_from_logits(hidden.tanh() @ weight.T, problem.targets, problem.support)
        return loss_of(inside, problem) + table.logprobs.sum()

    for function in (loss, torch.compile(loss, backend="eager")):
        hidden, weight, _ = problem.leaves()
        function(hidden, weight).backward()
        results.append((hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("from_logits", [True, False])
def test_second_derivatives_are_refused_by_name(from_logits):
    problem = Problem(35)
    hidden, weight, _ = problem.leaves()
    if from_logits:
        scores = logprobs_from_logits(hidden @ weight.T, problem.targets, problem.support)
    else:
        scores = score_rows(hidden, weight, problem.targets, problem.support)
    loss = scores.logprobs.sum()
    with pytest.raises(RuntimeError, match="first derivatives only, so create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize("reshard", [True, False])
def test_scores_in_the_forward_of_a_sharded_module_train_it(tmp_path, reshard):
    problem = Problem(36)

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(E, E, bias=False), torch.nn.Linear(E, V, bias=False)
            self.body.weight.data.copy_(torch.eye(E))
            self.head.weight.data.copy_(problem.weight)

        def forward(self, states):
            return scores_of(problem, self.body(states), self.head.weight, impl="numba").logprobs

    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "ranks"), 1), rank=0,
                                         world_size=1)  # fmt: skip
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        policy = fully_shard(Policy(), mesh=mesh, reshard_after_forward=reshard)
        for step in range(1, 3):  # the second forward gathers the weight anew
            policy(problem.hidden).sum().backward()
            double = problem.hidden.double(), problem.weight.double().requires_grad_()
            definition(head_logits(*double), problem.tokens).logprobs.sum().backward()
            assert_relative(policy.head.weight.grad.full_tensor(), step * double[1].grad, GRADIENT)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "num_touched", "huge"), [((49152, 576), 300, False), ((49152, 576), 20000, True)])
def test_a_fresh_gradient_is_zeros_in_pages_that_fit_what_will_be_touched(dtype, shape, num_touched, huge):
    weight = torch.zeros(1, dtype=dtype).expand(shape)
    assert autograd._wants_huge_pages(weight, num_touched) == huge
    zeros = autograd._zeros_like(weight, num_touched)
    assert zeros.dtype == dtype
    assert zeros.shape == shape
    assert not zeros[::97].any()
    zeros[5] = 1  # it can be written to


# --- gradients added in place


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_buffer_may_have_any_type_and_strides(impl, dtype, transposed):
    problem = Problem(29)
    hidden, weight, _ = problem.leaves()
    weight.main_grad = torch.ones(E, V, dtype=dtype).T if transposed else torch.ones(V, E, dtype=dtype)
    loss_of(scores_of(problem, hidden, weight, impl=impl, weight_grad="accumulate"), problem).backward()
    want = 1 + wanted(problem, hidden, weight)[1]
    # Pairs and whole-vocabulary rows are added one after the other, each rounding once.
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 2**-23) * 2
    assert ((weight.main_grad.double() - want).abs() <= rounding * (want.abs() + 1) + 2e-6).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(V - 1, E), (V, E + 1), (V * E,)])
def test_a_gradient_buffer_of_another_shape_is_refused(impl, shape):
    problem = Problem(30)
    hidden, weight, _ = problem.leaves()
    weight.main_grad = torch.zeros(shape)
    got = scores_of(problem, hidden, weight, impl=impl, weight_grad="accumulate")
    with pytest.raises(ValueError, match="the gradient buffer is"):
        loss_of(got, problem).backward()


def test_a_gradient_is_not_added_to_what_no_one_reads():
    problem = Problem(31)
    hidden, weight, _ = problem.leaves()
    with pytest.raises(ValueError, match="the weight is the result of another operation"):
        scores_of(problem, hidden, weight * 1, weight_grad="accumulate")


def test_a_tied_embedding_gets_both_of_its_gradients():
    problem, results = Problem(32), []
    ids = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(0))
    for form in ("dense", "accumulate"):
        weight = problem.weight.clone().requires_grad_()
        loss_of(scores_of(problem, weight[ids] * 0.5, weight, weight_grad=form), problem).backward()
        results.append(weight.grad)
    double = problem.weight.double().requires_grad_()
    loss_of(definition(head_logits(double[ids] * 0.5, double), problem.tokens), problem).backward()
    for got in results:
        assert_relative(got, double.grad, GRADIENT)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
def test_head_rows_that_no_support_holds_may_be_anything(impl, padding):
    problem = Problem(34, empty=0.0)
    unused = torch.ones(V, dtype=torch.bool)
    unused[problem.support.ids.long()] = False
    assert unused.any()
    hidden, weight, _ = problem.leaves()
    want_hidden, want_weight = wanted(problem, hidden, weight)
    with torch.no_grad():
        weight[unused] = padding
    loss_of(scores_of(problem, hidden, weight, impl=impl), problem).backward()
    assert_relative(hidden.grad, want_hidden, GRADIENT)
    assert_relative(weight.grad, want_weight, GRADIENT)


def test_tensors_on_several_devices_are_refused():
    problem = Problem(33)
    with pytest.raises(ValueError, match="hidden is on cpu, weight on meta"):
        scores_of(problem, problem.hidden, problem.weight.to("meta"))
    with pytest.raises(ValueError, match="logits is on meta, targets on cpu"):
        logprobs_from_logits(torch.zeros(T, V, device="meta"), problem.targets, problem.support)
