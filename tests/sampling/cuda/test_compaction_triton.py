"""`capture.compact`, in both forms, is a search for the kept ids: ids up to the width, bits above it, nothing else."""

import numpy as np
import pytest
import torch
from kernel_rows import DEVICE, bits_to_ids, interpreted, on_device, room, row, table

from keepmask.sampling.cuda.compaction import Cut, compact, wide_logprobs

pytestmark = interpreted
IMPLS = ["triton", "torch"]


def cut_of(bounds, *, first=None, last=None, highest=None, log_weight=None):
    M = len(bounds)
    columns = [(bounds, np.float32), (first or [1] * M, np.int32), (last or [0] * M, np.int32)]
    columns += [(highest or [0.0] * M, np.float64), (log_weight or [0.0] * M, np.float64)]
    return Cut(*(on_device(np.asarray(values, dtype)) for values, dtype in columns))


def naive(s, bound, first, last):
    return [i for i, value in enumerate(s) if bound < value < np.inf or (value == bound and first <= i <= last)]


def run(impl, logits, cut, *, width, rows=None, wanted=None, **given):
    M = cut.bound.numel()
    parameters = table(rows or [row()] * M, **given)
    out, counts = room(M, width, logits.shape[1]), torch.full((M,), -7, dtype=torch.int32, device=DEVICE)
    wanted = on_device(np.asarray(wanted or [1] * M, np.int32))
    compact(logits, parameters, cut, wanted, counts, out, impl=impl)
    return counts.tolist(), out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("V", [1, 31, 32, 33, 100, 5000])
def test_ids_up_to_the_width_and_bits_above_it(impl, V):
    rng = np.random.default_rng(V)
    z = rng.choice([0.0, 1.0, 2.0, 3.0, -np.inf, np.inf, np.nan], (6, V)).astype(np.float32)
    bounds, first, last = [0.5, -np.inf, 1.0, 1.0, 2.0, 9.0], [1, 1, V // 3, 0, 0, 1], [0, 0, V, V // 2, V, 0]
    width = max(1, V // 3)
    cut = cut_of(bounds, first=first, last=last, highest=[3.0] * 6, log_weight=[0.25] * 6)
    counts, out = run(impl, on_device(z), cut, width=width)
    for m in range(6):
        expected = naive(z[m], bounds[m], first[m], last[m])
        assert counts[m] == len(expected) % V
        if 0 < len(expected) <= width and len(expected) < V:
            assert out.ids[m, : len(expected)].tolist() == expected
            assert (out.ids[m, len(expected) :] == -7).all()
            np.testing.assert_array_equal(out.logprobs[m, : len(expected)].cpu(), z[m, expected] - np.float32(3.25))
            assert (out.bits[m] == -7).all()
        elif width < len(expected) < V:
            assert bits_to_ids(out.bits[m], V) == expected
            assert (out.ids[m] == -7).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_keeps_everything_is_only_counted(impl):
    counts, out = run(impl, on_device(np.zeros((1, 40), np.float32)), cut_of([-1.0]), width=4)
    assert counts == [0]
    assert (out.ids == -7).all()
    assert (out.bits == -7).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_are_not_wanted_and_rows_without_a_slot_are_left_alone(impl):
    z = on_device(np.arange(20, dtype=np.float32)[None].repeat(4, 0))
    cut = cut_of([16.5] * 4)
    slots = {"slots": [2, 0, -1, 1], "logprobs_slots": [-1, 0, -1, 1]}
    counts, out = run(impl, z, cut, width=8, wanted=[1, 0, 1, 1], **slots)
    assert counts == [3, -7, 3, 3]
    assert out.ids[:, :4].tolist() == [[-7] * 4, [17, 18, 19, -7], [17, 18, 19, -7], [-7] * 4]
    assert (out.logprobs[[0, 2, 3]] == 7).all()
    assert out.logprobs[1, :3].tolist() == [17, 18, 19]


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_are_read_by_row_stride_and_over_the_temperature(impl):
    padded = on_device(np.random.default_rng(0).normal(0, 2, (3, 70)).astype(np.float32))
    logits = padded[:, 5:55]
    rows = [row(temperature=0.5), row(temperature=0.7)]
    counts, out = run(impl, logits, cut_of([1.0, 1.0]), width=64, rows=rows, source=[2, 0])
    for m, (source, temperature) in enumerate([(2, 0.5), (0, 0.7)]):
        s = logits[source].cpu().numpy() / np.float32(temperature)
        assert out.ids[m, : counts[m]].tolist() == np.flatnonzero(s > 1).tolist()
        np.testing.assert_array_equal(out.logprobs[m, : counts[m]].cpu(), s[s > 1])


@pytest.mark.parametrize("impl", IMPLS)
def test_log_probs_keep_their_digits_where_logits_are_large_and_are_never_infinite(impl):
    large = np.float32(1e20)
    z = on_device(np.asarray([[large, large, 0.0, -2.0]], np.float32))
    _, out = run(impl, z, cut_of([-1.0], highest=[float(large)], log_weight=[np.log(2.0)]), width=3)
    np.testing.assert_allclose(out.logprobs[0].cpu(), np.float32([-np.log(2), -np.log(2), -large]))
    far = np.float32(3e38)
    counts, out = run(
        impl,
        on_device(np.asarray([[-np.inf, far, -far]], np.float32)),
        cut_of([-np.inf], highest=[float(far)]),
        width=2,
    )
    assert counts == [2]
    assert out.logprobs.tolist() == [[0.0, -float(np.finfo(np.float32).max)]]


def test_log_probs_of_a_wide_row_are_those_of_its_ids_in_order():
    z = np.random.default_rng(0).normal(0, 2, (1, 300)).astype(np.float32)
    cut = cut_of([-1.0], highest=[float(z.max())], log_weight=[1.5])
    parameters = table([row()])
    count = int((z > -1).sum())
    logprobs = wide_logprobs(on_device(z[0]), parameters, cut, 0, count)
    np.testing.assert_allclose(logprobs.cpu(), z[z > -1] - z.max() - 1.5, rtol=1e-6)


def test_no_rows_are_no_trouble():
    counts, _ = run("triton", torch.zeros((0, 9), device=DEVICE), cut_of([]), width=2)
    assert counts == []
