"""The best of a support, and ranks over all ids, in both forms."""

import numpy as np
import pytest
import torch
from kernel_rows import interpreted, on_device, row, table

from keepmask.sampling.cuda import candidates
from keepmask.sampling.cuda.compaction import Cut

pytestmark = interpreted
IMPLS = ["triton", "torch"]


def cut_above(bounds):
    M = len(bounds)
    nothing = np.zeros(M, np.int32)
    return Cut(*map(on_device, (np.float32(bounds), nothing + 1, nothing, np.zeros(M), np.full(M, 0.5))))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_best_of_all_ids_come_in_order_ties_by_id(impl):
    z = np.random.default_rng(0).choice([0.0, 1.0, 2.0, 2.5, -np.inf], (4, 90)).astype(np.float32)
    rows = [row(num_top=k, temperature=t) for k, t in ((5, 1.0), (3, 0.5), (-1, 1.0), (9, 1.0))]
    wanted = on_device(np.asarray([1, 1, 1, 0], np.int32))
    bounds = [-np.inf, 1.0, 0.0, 0.0]
    best = candidates.best(on_device(z), None, None, table(rows), cut_above(bounds), wanted, max_top=9, impl=impl)
    for m, (k, t) in enumerate(((5, 1.0), (3, 0.5), (0, 1.0), (0, 1.0))):
        s = z[m] / np.float32(t)
        kept = [i for i in np.argsort(-s, kind="stable") if s[i] > bounds[m]][:k]
        assert int(best.num[m]) == len(kept)
        assert best.ids[m, : len(kept)].tolist() == kept
        np.testing.assert_array_equal(best.s[m, : len(kept)].cpu(), s[kept])
        np.testing.assert_array_equal(best.logprobs[m, : len(kept)].cpu(), s[kept] - np.float32(0.5))


@pytest.mark.parametrize("impl", IMPLS)
def test_fewer_than_asked_for_are_all_there_are(impl):
    z = on_device(np.asarray([[4.0, 1.0, 3.0, 9.0]], np.float32))
    ids, num = on_device(np.asarray([[2, 5, 8, 9]], np.int32)), on_device(np.asarray([3], np.int32))
    wanted = on_device(np.ones(1, np.int32))
    best = candidates.best(z, ids, num, table([row(num_top=6)]), cut_above([0.0]), wanted, max_top=6, impl=impl)
    assert best.num.tolist() == [3]
    assert best.ids[0, :3].tolist() == [2, 8, 5]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("V", [1, 70, 5000])
def test_ranks_count_what_comes_before(impl, V):
    z = np.random.default_rng(V).choice([0.0, -0.0, 1.0, -np.inf], (3, V)).astype(np.float32)
    tokens = np.asarray([0, V // 2, V - 1])
    ranks = candidates.ranks(on_device(z), table([row()] * 3, source=[1, 0, 2]), on_device(tokens), impl=impl)
    for m, source in enumerate((1, 0, 2)):
        order = np.argsort(-z[source], kind="stable").tolist()
        assert ranks[m] == 1 + order.index(tokens[m])


def test_rows_without_a_token_have_some_rank():
    z = on_device(np.zeros((1, 9), np.float32))
    assert candidates.ranks(z, table([row()]), torch.full((1,), -1, device=z.device), impl="triton").shape == (1,)
