"""A head spread over the ranks of a group gives what one process with the whole head gets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_cases import ParallelProblem, score_rows

from keepmask.replay.parallel import VocabParallel

HERE = Path(__file__).parent
FORMS = ("contiguous", "strided", "dtensor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where three ranks have noted what they got, in a group of 2 and in one of 3."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, str(HERE / "vocab_parallel_rank.py"), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, folder):
    """What each of 2 or 3 ranks got, by case."""
    return [dict(np.load(folder / f"{rank} of {request.param}.npz")) for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone():
    """What one process with the whole head gets, by problem."""
    results = {}
    for name, problem in ParallelProblem.all().items():
        leaves = [t.clone().requires_grad_() for t in (problem.hidden, problem.weight, problem.bias)]
        hidden, weight, bias = leaves
        scores = score_rows(hidden, weight, problem.targets, problem.support, bias=bias, **problem.options)
        problem.loss(scores).backward()
        results[name] = {value: getattr(scores, value).detach().numpy() for value in problem.values}
        results[name] |= {"hidden_grad": hidden.grad, "weight_grad": weight.grad, "bias_grad": bias.grad}
    return results


def ids_of(form, rank, size, vocab_size):
    if form == "strided":
        return list(range(rank, vocab_size, size))
    width = -(-vocab_size // size)
    return list(range(vocab_size))[rank * width : (rank + 1) * width]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ParallelProblem.all())
def test_every_rank_gets_the_scores_of_the_whole_head(ranks, alone, name, form):
    for rank in ranks:
        for value in ParallelProblem.all()[name].values:
            np.testing.assert_allclose(rank[f"{name} {form}/{value}"], alone[name][value], rtol=0, atol=2e-6)
            np.testing.assert_array_equal(rank[f"{name} {form}/{value}"], ranks[0][f"{name} {form}/{value}"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ParallelProblem.all())
def test_gradients_are_whole_for_hidden_states_and_local_for_the_head(ranks, alone, name, form):
    want = alone[name]
    vocab_size = want["bias_grad"].numel()
    for number, rank in enumerate(ranks):
        ids = ids_of(form, number, len(ranks), vocab_size)
        np.testing.assert_allclose(rank[f"{name} {form}/hidden_grad"], want["hidden_grad"], rtol=0, atol=1e-5)
        for leaf in ("weight_grad", "bias_grad"):
            np.testing.assert_allclose(rank[f"{name} {form}/{leaf}"], want[leaf][ids], rtol=0, atol=1e-5)


def test_gradients_add_up_in_place(ranks, alone):
    for number, rank in enumerate(ranks):
        ids = ids_of("strided", number, len(ranks), 61)
        added = rank["ragged accumulate/weight_grad"] - 1
        np.testing.assert_allclose(added, alone["ragged"]["weight_grad"][ids], rtol=0, atol=1e-5)
        ids = ids_of("dtensor", number, len(ranks), 61)
        added = rank["ragged accumulate dtensor/weight_grad"]
        np.testing.assert_allclose(added, alone["ragged"]["weight_grad"][ids], rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["numba", "dense"])
@pytest.mark.parametrize("name", ["ragged", "tiny"])
def test_compiled_and_dense_products_of_a_share_give_the_same(ranks, alone, name, impl):
    want = alone[name]
    for number, rank in enumerate(ranks):
        ids = ids_of("contiguous", number, len(ranks), want["bias_grad"].numel())
        for value in ParallelProblem.all()[name].values:
            np.testing.assert_allclose(rank[f"{name} {impl}/{value}"], want[value], rtol=0, atol=2e-6)
        np.testing.assert_allclose(rank[f"{name} {impl}/hidden_grad"], want["hidden_grad"], rtol=0, atol=1e-5)
        for leaf in ("weight_grad", "bias_grad"):
            np.testing.assert_allclose(rank[f"{name} {impl}/{leaf}"], want[leaf][ids], rtol=0, atol=1e-5)


def test_processes_with_batches_of_their_own_are_refused(ranks):
    for rank in ranks:
        assert rank["refused/messages"].tolist() == [True, True]


def test_parts_of_the_hidden_gradient_can_be_left_to_the_caller(ranks, alone):
    parts = sum(rank["ragged part/hidden_grad"] for rank in ranks)
    np.testing.assert_allclose(parts, alone["ragged"]["hidden_grad"], rtol=0, atol=1e-5)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout='random': must be contiguous or strided"):
        VocabParallel(group=None, vocab_size=4, layout="random")


def test_reference_takes_a_whole_head():
    problem = ParallelProblem(0, vocab_size=61)
    parallel = VocabParallel(group=None, vocab_size=61)
    object.__setattr__(parallel, "ids", range(61))
    with pytest.raises(ValueError, match="takes a whole head"):
        score_rows(
            problem.hidden, problem.weight, problem.targets, problem.support, vocab_parallel=parallel, impl="reference"
        )


def test_a_share_of_another_size_is_refused():
    problem = ParallelProblem(0, vocab_size=61)
    parallel = VocabParallel(group=None, vocab_size=61)
    object.__setattr__(parallel, "ids", range(31))
    with pytest.raises(ValueError, match=r"weight has 61 rows.*share of the vocabulary is 31 ids"):
        score_rows(problem.hidden, problem.weight, problem.targets, problem.support, vocab_parallel=parallel)


def test_strided_shares_are_even_where_contiguous_ones_are_not():
    # Ids distributed as 1 / rank, as those of tokenizers ordered by frequency are.
    ids = torch.distributions.Categorical(1 / torch.arange(1.0, 50001)).sample((20000,))
    shares = {
        "contiguous": torch.bincount(ids // 12500, minlength=4),
        "strided": torch.bincount(ids % 4, minlength=4),
    }
    assert shares["contiguous"].max() > 3 * 20000 / 4
    assert shares["strided"].max() < 1.5 * 20000 / 4
