"""`capture`, in both forms, is a search for the kept ids of the rows that have a place, in CSR, and nothing else."""

import itertools

import cuda_oracles
import numpy as np
import pytest
import torch
from kernel_rows import DEVICE, interpreted, on_device, row, table

from keepmask.sampling.cuda import capture_triton
from keepmask.sampling.cuda.draw_records import Candidates

pytestmark = interpreted
FORMS = [capture_triton, cuda_oracles]


def naive(s, bound, first, last):
    return [i for i, value in enumerate(s) if bound < value < np.inf or (value == bound and first <= i <= last)]


def drawn(M, C=1, **fields):
    """Candidates of M rows, drawn over all ids unless `fields` of the draws say otherwise."""
    found = Candidates.empty(M, C, DEVICE)
    for name, values in ({"first": 1, "last": 0, "over_all": 1} | fields).items():
        found.field(name).copy_(on_device(np.broadcast_to(values, M).copy()))
    return found


def run(form, logits, found, counts, *, rows=None, over_all=True, **given):
    """Rows of (ids, log-probs)."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    out = torch.full((offsets[-1],), -7, dtype=torch.int32), torch.full((offsets[-1],), 7.0)
    out = out[0].to(DEVICE), out[1].to(DEVICE)
    words = table(rows or [row()] * len(counts), **given)
    form.capture(logits, found, words, on_device(offsets), out, over_all=over_all)
    return [tuple(array[a:b].cpu().numpy() for array in out) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("V", [1, 31, 64, 65, 5000])
def test_every_kept_id_and_its_log_prob(form, V):
    z = np.random.default_rng(V).choice([0.0, 1.0, 2.0, 3.0, -np.inf, np.inf, np.nan], (6, V)).astype(np.float32)
    bounds, first, last = [0.5, -np.inf, 1.0, 1.0, 2.0, 9.0], [1, 1, V // 3, 0, 0, 1], [0, 0, V, V // 2, V, 0]
    expected = [naive(z[m], bounds[m], first[m], last[m]) for m in range(6)]
    found = drawn(6, bound=bounds, first=first, last=last, highest=3.0, log_weight=0.25)
    for m, (ids, logprobs) in enumerate(run(form, on_device(z), found, [len(ids) for ids in expected])):
        assert ids.tolist() == expected[m]
        np.testing.assert_array_equal(logprobs, z[m, expected[m]] - np.float32(3.25))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("over_all", [False, True])
def test_rows_without_a_place_and_rows_drawn_the_other_way_are_left_alone(form, over_all):
    z = np.arange(20, dtype=np.float32)[None].repeat(3, 0)
    found = drawn(3, C=20, bound=16.5, over_all=[1, 1, 0], num_candidates=20)
    found.z.copy_(on_device(z))
    found.ids.copy_(on_device(np.arange(100, 120, dtype=np.int32)))
    nothing, one, other = run(form, on_device(z), found, [0, 3, 3], over_all=over_all)
    assert nothing[0].size == 0
    assert one[0].tolist() == ([17, 18, 19] if over_all else [-7] * 3)
    assert other[0].tolist() == ([-7] * 3 if over_all else [117, 118, 119])


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_read_by_row_stride_and_over_the_temperature(form):
    padded = on_device(np.random.default_rng(0).normal(0, 2, (3, 70)).astype(np.float32))
    logits = padded[:, 5:55]
    scaled = [logits[source].cpu().numpy() / np.float32(t) for source, t in ((2, 0.5), (0, 0.7))]
    rows, counts = [row(temperature=0.5), row(temperature=0.7)], [int((s > 1).sum()) for s in scaled]
    captured = run(form, logits, drawn(2, bound=1.0), counts, rows=rows, source=[2, 0])
    for s, (ids, logprobs) in zip(scaled, captured, strict=True):
        assert ids.tolist() == np.flatnonzero(s > 1).tolist()
        np.testing.assert_array_equal(logprobs, s[s > 1])


@pytest.mark.parametrize("form", FORMS)
def test_log_probs_keep_their_digits_where_logits_are_large_and_are_never_infinite(form):
    large, far = np.float32(1e20), np.float32(3e38)
    z = on_device(np.asarray([[large, large, 0.0, -2.0]], np.float32))
    ((_, logprobs),) = run(form, z, drawn(1, bound=-1.0, highest=float(large), log_weight=np.log(2.0)), [3])
    np.testing.assert_allclose(logprobs, np.float32([-np.log(2), -np.log(2), -large]))
    z = on_device(np.asarray([[-np.inf, far, -far]], np.float32))
    ((_, logprobs),) = run(form, z, drawn(1, bound=-np.inf, highest=float(far)), [2])
    assert logprobs.tolist() == [0.0, -float(np.finfo(np.float32).max)]


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_ask_for_no_log_probs_get_none(form):
    z = on_device(np.arange(4, dtype=np.float32)[None])
    ((ids, logprobs),) = run(form, z, drawn(1, bound=1.0), [2], with_logprobs=False)
    assert ids.tolist() == [2, 3]
    assert logprobs.tolist() == [7.0, 7.0]


def test_no_rows_are_no_trouble():
    assert run(capture_triton, torch.zeros((0, 9), device=DEVICE), drawn(0), []) == []
