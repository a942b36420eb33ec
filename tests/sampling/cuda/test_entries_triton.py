"""The best of a support, and ranks over all ids, in both forms."""

import cuda_oracles
import numpy as np
import pytest
import torch
from kernel_rows import interpreted, on_device, row, table

from keepmask.sampling.cuda import entries_triton
from keepmask.sampling.cuda.draw_records import Candidates
from keepmask.sampling.records import OK, TOO_MANY

pytestmark = interpreted
FORMS = [entries_triton, cuda_oracles]


def found_above(bounds, z, ids, *, over_all=0, statuses=None):
    """Candidates z, ids [M, C] whose supports are the numbers above the bounds."""
    found = Candidates.empty(len(bounds), z.shape[1], on_device(z).device)
    found.z.copy_(on_device(z))
    found.ids.copy_(on_device(ids))
    fields = {"bound": bounds, "first": 1, "last": 0, "log_weight": 0.5, "over_all": over_all}
    for name, value in (fields | {"status": statuses or OK}).items():
        found.field(name).copy_(on_device(np.broadcast_to(value, len(bounds)).copy()))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_best_of_all_ids_come_in_order_ties_by_id(form):
    z = np.random.default_rng(0).choice([0.0, 1.0, 2.0, 2.5, -np.inf], (4, 90)).astype(np.float32)
    rows = [row(num_logprobs=k, temperature=t, top_k=99) for k, t in ((5, 1.0), (3, 0.5), (-1, 1.0), (9, 1.0))]
    bounds = [-np.inf, 1.0, 0.0, 0.0]
    found = found_above(bounds, z, np.zeros(z.shape, np.int32), over_all=1, statuses=[OK, OK, OK, TOO_MANY])
    best = form.best(on_device(z), found, table(rows), max_top=9)
    for m, (k, t) in enumerate(((5, 1.0), (3, 0.5), (0, 1.0), (0, 1.0))):
        s = z[m] / np.float32(t)
        kept = [i for i in np.argsort(-s, kind="stable") if s[i] > bounds[m]][:k]
        assert int(best.num[m]) == len(kept)
        assert best.ids[m, : len(kept)].tolist() == kept
        np.testing.assert_array_equal(best.s[m, : len(kept)].cpu(), s[kept])
        np.testing.assert_array_equal(best.logprobs[m, : len(kept)].cpu(), s[kept] - np.float32(0.5))


@pytest.mark.parametrize("form", FORMS)
def test_fewer_than_asked_for_are_all_there_are(form):
    z = np.asarray([[4.0, 1.0, 3.0, 9.0]], np.float32)
    found = found_above([0.0], z, np.asarray([[2, 5, 8, 9]], np.int32))
    found.field("num_candidates").fill_(3)
    best = form.best(on_device(np.zeros((1, 10), np.float32)), found, table([row(num_logprobs=6, top_k=3)]), max_top=6)
    assert best.num.tolist() == [3]
    assert best.ids[0, :3].tolist() == [2, 8, 5]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("V", [1, 70, 5000])
def test_ranks_count_what_comes_before(form, V):
    z = np.random.default_rng(V).choice([0.0, -0.0, 1.0, -np.inf], (3, V)).astype(np.float32)
    tokens = np.asarray([0, V // 2, V - 1])
    ranks = form.ranks(on_device(z), table([row()] * 3, source=[1, 0, 2]), on_device(tokens))
    for m, source in enumerate((1, 0, 2)):
        order = np.argsort(-z[source], kind="stable").tolist()
        assert ranks[m] == 1 + order.index(tokens[m])


def test_rows_without_a_token_have_some_rank():
    z = on_device(np.zeros((1, 9), np.float32))
    assert entries_triton.ranks(z, table([row()]), torch.full((1,), -1, device=z.device)).shape == (1,)
