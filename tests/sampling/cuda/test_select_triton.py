"""`select` in Triton finds every id that the definition finds, whatever the shape and the numbers."""

import cuda_oracles
import numpy as np
import pytest
import torch
from kernel_rows import DEVICE, FILTERS, interpreted, on_device, row, table

from keepmask.sampling.cuda import select_triton
from keepmask.sampling.records import EMPTY, NOT_FINITE, OK, TOO_MANY

pytestmark = interpreted


def select(logits, rows, *, capacity=512, **given):
    """Both forms, each with what it found for each row: ids, logits."""
    parameters = table(rows, **given)
    both = []
    for form in (select_triton, cuda_oracles):
        found = form.select(logits, parameters, capacity=capacity)
        counts = found.field("num_candidates").tolist()
        lists = [(found.ids[m, :n].tolist(), found.z[m, :n].tolist()) for m, n in enumerate(counts)]
        both.append((found, lists))
    return both


def assert_holds(logits, rows, source, **given):
    (found, lists), (defined, needed) = select(logits, rows, source=source, **given)
    assert found.field("status").tolist() == defined.field("status").tolist()
    assert found.field("num_possible").tolist() == defined.field("num_possible").tolist()
    for m, columns in enumerate(rows):
        ids, z = lists[m]
        assert set(needed[m][0]) <= set(ids), columns
        assert ids == sorted(set(ids)), "ascending, no id twice"
        assert z == logits[source[m], ids].tolist(), "the logits of these ids"
        if found.field("status")[m] != OK:
            continue
        s = (logits[source[m]].double() / float(columns["temperature"])).float().double()
        weights = torch.exp(s - s.max())
        assert found.field("highest")[m] == s.max()
        torch.testing.assert_close(found.field("weight")[m], weights[ids].sum(), rtol=1e-12, atol=0)
        if columns["weighs"]:
            torch.testing.assert_close(found.field("total")[m], weights.sum(), rtol=1e-12, atol=0)
    return lists


@pytest.mark.parametrize("V", [1, 3, 64, 65, 1000, 9001])
def test_any_width_and_any_mix_of_filters(V):
    rng = np.random.default_rng(V)
    rows = [row(seed=m, **given) for m, given in enumerate(FILTERS if V in (65, 9001) else FILTERS[1::3])]
    logits = on_device(rng.normal(0, 3, (len(rows), V)).astype(np.float32))
    lists = assert_holds(logits, rows, list(range(len(rows))), capacity=4096)
    if V == 9001:
        counts = [len(ids) for ids, _ in lists]
        assert counts[0] <= 40
        assert counts[8] == 1
        assert counts[9] <= 3, "of an unfiltered row only those that may win"


def test_rows_are_read_where_they_are():
    rng = np.random.default_rng(0)
    padded = on_device(rng.normal(0, 3, (5, 300)).astype(np.float32))
    logits = padded[:, 3:260]  # neither contiguous nor aligned
    assert logits.stride(0) == 300
    assert_holds(logits, [row(top_k=5), row(top_p=0.5), row(), row(min_p=0.1)], [4, 0, 0, 2])


@pytest.mark.parametrize("given", [{"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.5}, {}, {"top_k": 7, "top_p": 0.3}])
def test_ties_and_bans(given):
    rng = np.random.default_rng(0)
    tied = rng.choice([0.0, -0.0, 1.0, 2.5, -np.inf], (1, 200))
    few = np.full((1, 200), -np.inf)
    few[0, [3, 150]] = [1.0, -2.0]
    flat = np.full((1, 200), -3.25)
    logits = on_device(np.concatenate([tied, few, flat]).astype(np.float32))
    assert_holds(logits, [row(seed=m, **given) for m in range(3)], [0, 1, 2])


def test_rows_without_numbers_to_draw_from_say_so():
    logits = np.zeros((7, 130), np.float32)
    logits[0, 129] = np.nan
    logits[1, 0] = -np.nan
    logits[2, 77] = np.inf
    logits[3] = -np.inf
    logits[4, 5] = 3e38  # over the temperature it is +inf
    logits[5, 5] = -3e38  # and this is a ban
    rows = [row(top_k=3), row(), row(top_p=0.5), row(min_p=0.1), row(temperature=0.5), row(temperature=0.5), row()]
    (found, _), (defined, _) = select(on_device(logits), rows)
    assert found.field("status").tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, EMPTY, NOT_FINITE, OK, OK]
    assert found.field("status").tolist() == defined.field("status").tolist()
    assert found.field("num_candidates")[:5].tolist() == [0] * 5
    assert found.field("num_possible")[5:].tolist() == [129, 130]


def test_more_candidates_than_there_is_room_for_are_reported():
    logits = on_device(np.zeros((3, 100), np.float32))
    logits[1, :40] = 1
    (found, _), _ = select(logits, [row(top_k=2), row(top_k=2), row(top_p=0.7)], capacity=40)
    assert found.field("status").tolist() == [TOO_MANY, OK, TOO_MANY]
    assert found.field("num_candidates").tolist() == [0, 40, 0]


def test_a_mass_cut_takes_more_until_it_is_reached():
    logits = on_device(np.random.default_rng(0).normal(0, 0.5, (2, 3000)).astype(np.float32))
    (found, lists), _ = select(logits, [row(top_p=0.05), row(top_p=0.5)], capacity=4096)
    assert found.field("status").tolist() == [OK, OK]
    for (ids, _), share in zip(lists, (0.05, 0.5), strict=True):
        assert 32 < len(ids) < 3000
        assert torch.softmax(logits.double(), -1)[0 if share == 0.05 else 1, ids].sum() >= share


def test_no_rows_are_no_trouble():
    found = select_triton.select(torch.zeros((0, 9), device=DEVICE), table([]), capacity=4)
    assert found.field("status").numel() == 0
