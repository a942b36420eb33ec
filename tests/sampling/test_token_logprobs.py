"""Entries of generated and prompt tokens: the token first, no id twice, ranks by value then id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepmask.sampling import prompt_logprobs
from keepmask.sampling.token_logprobs import BatchLogprobs, best_ids


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 45), st.integers(0, 2**32), st.booleans())
def test_prompt_entries_are_a_log_softmax_over_all_ids(T, V, k, seed, tied):
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 3, (T, V))
    z = (np.round(z) if tied else z).astype(np.float32)
    targets = rng.integers(0, V, T)
    entries = prompt_logprobs(torch.from_numpy(z), torch.from_numpy(targets), k)
    assert len(entries) == T
    for row, target, entry in zip(z.astype(float), targets, entries, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(-row, kind="stable")
        best = [i for i in order[:k].tolist() if i != target]
        assert entry.ids.tolist() == [target, *best]
        np.testing.assert_allclose(entry.values, expected[entry.ids], atol=1e-6)
        assert [order[rank - 1] for rank in entry.ranks] == entry.ids.tolist()


def test_bfloat16_prompt_logits_are_upcast_first():
    z = torch.randn(2, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    (entry, _) = prompt_logprobs(z, torch.tensor([3, 4]), 2)
    assert entry.values[0] == pytest.approx(float(z[0].double().log_softmax(-1)[3]), abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_best_ids_are_those_of_a_stable_sort(tied):
    z = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    z = z.round() if tied else z
    for k in (0, 1, 7, 199, 200):
        assert best_ids(z, k).tolist() == z.sort(dim=-1, descending=True, stable=True).indices[:, :k].tolist()


def test_entries_are_padded_apart_and_failed_or_unasked_rows_have_none():
    entries = BatchLogprobs.empty(3, 2)
    rows, top = np.asarray([2, 0]), np.asarray([[4, 5], [6, 7]])
    values = np.asarray([[-0.5, -1.0], [-0.25, -np.inf]], np.float32)
    own = np.asarray([-1.0, -9.0], np.float32)
    entries.put(rows, np.asarray([5, 9]), own, np.asarray([2, 8]), top, values, np.asarray([2, 1]))
    assert entries.row_logprobs(1) is None
    first, last = entries.row_logprobs(0), entries.row_logprobs(2)
    assert (first.ids.tolist(), first.values.tolist(), first.ranks.tolist()) == ([9, 6], [-9.0, -0.25], [8, 1])
    assert (last.ids.tolist(), last.values.tolist(), last.ranks.tolist()) == ([5, 4], [-1.0, -0.5], [2, 1])


def test_no_entry_is_infinite():
    z = torch.tensor([[0.0, -torch.inf, 3e38]])
    (entry,) = prompt_logprobs(z, torch.tensor([1]), 3)
    assert np.isfinite(entry.values).all()
    assert entry.ids.tolist() == [1, 2, 0]
