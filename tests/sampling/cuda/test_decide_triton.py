"""`decide` in Triton decides as the definition does, over candidates and over all ids, and supports follow."""

import cuda_oracles
import numpy as np
import pytest
import torch
from kernel_rows import FILTERS, close_scores, interpreted, on_device, row, table

from keepmask.sampling.cuda import capture_triton, decide_triton, select_triton
from keepmask.sampling.records import NOT_FINITE, OK, TOO_MANY, UNCERTAIN

pytestmark = interpreted

V = 150
FORMS = {"triton": (select_triton, decide_triton, capture_triton), "torch": (cuda_oracles,) * 3}


def decided(logits, rows, form, *, over_all=False):
    """Of each row: status, token, its rank, ids of the support, s and log-prob of the token, log-probs of the ids."""
    select, decide, capture = FORMS[form]
    words, V = table(rows), logits.shape[1]
    found = select.select(logits, words, capacity=512)
    status = found.field("status")
    if over_all:
        status.masked_fill_(status == OK, TOO_MANY)
    decide.decide(found, words, V)
    decide.decide_all(logits, found, words)
    counts = torch.where(status == OK, found.field("count"), 0)
    offsets = torch.cat([counts[:0], counts.new_zeros(1), counts.cumsum(0)])
    out = torch.empty(int(offsets[-1]), dtype=torch.int32), torch.empty(int(offsets[-1]))
    out = out[0].to(logits.device), out[1].to(logits.device)
    for way in (False, True):
        capture.capture(logits, found, words, offsets, out, over_all=way)
    results = []
    for m in range(len(rows)):
        ids, logprobs = (array[offsets[m] : offsets[m + 1]] for array in out)
        token_id, rank, *numbers = (float(found.field(f)[m]) for f in ("token_id", "rank", "token_s", "token_logprob"))
        results.append((int(status[m]), int(token_id), int(rank), ids.tolist(), numbers, logprobs.cpu().numpy()))
    return results


def assert_same(logits, rows, **given):
    """Rows that either form is unsure of are left out; returns how many were compared."""
    compared = 0
    for m, (one, other) in enumerate(
        zip(decided(logits, rows, "triton", **given), decided(logits, rows, "torch", **given), strict=True)
    ):
        if UNCERTAIN in (one[0], other[0]):
            continue
        assert one[0] == other[0], (m, rows[m])
        if one[0] != OK:
            continue
        compared += 1
        assert one[1] == other[1], (m, rows[m])
        assert one[3] == other[3], (m, rows[m])
        if not rows[m]["whole"] or given.get("over_all"):
            assert one[2] == other[2], "rank"
            np.testing.assert_allclose(one[4], other[4], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(one[5], other[5], rtol=1e-6, atol=1e-6)
    return compared


@pytest.mark.parametrize("over_all", [False, True], ids=["candidates", "all ids"])
def test_every_filter(over_all):
    rows = [row(seed=m, position=m, **given) for m, given in enumerate(FILTERS)]
    logits = on_device(np.random.default_rng(1).normal(0, 2, (len(rows), V)).astype(np.float32))
    assert assert_same(logits, rows, over_all=over_all) == len(rows)


@pytest.mark.parametrize("profile", ["sglang", "hf"])
@pytest.mark.parametrize("over_all", [False, True], ids=["candidates", "all ids"])
def test_the_other_profiles(profile, over_all):
    rows = [row(profile=profile, seed=m, **given) for m, given in enumerate(FILTERS[1 : 7 : 1 + over_all])]
    logits = on_device(np.random.default_rng(1).normal(0, 2, (len(rows), V)).astype(np.float32))
    assert assert_same(logits, rows, over_all=over_all) == len(rows)


@pytest.mark.parametrize("profile", ["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"])
def test_ties_are_cut_as_the_profile_says(profile):
    rng = np.random.default_rng(2)
    levels = rng.choice([0.0, -0.0, 1.0, 1.5, -np.inf], (6, V)).astype(np.float32)
    filters = [{"top_p": 0.33}, {"top_p": 0.71, "top_k": 4}, {"top_k": 9}, {"min_p": 0.3}, {"top_p": 0.5, "min_p": 0.4}]
    rows = [row(profile=profile, seed=m, **given) for m, given in enumerate([*filters, {"top_p": 0.013}])]
    assert assert_same(on_device(levels), rows) >= 4


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("top_p", [0.8, 0.5, 0.1, 0.25, 0.999])
def test_hf_cuts_a_flat_row_from_the_low_end(impl, top_p):
    n = 100  # in float64, 1 - 0.8 is less than 0.2, so one id more than 0.8 of them stays
    logits = on_device(np.full((1, n), 3.0, np.float32))
    status, _, _, ids, _, _ = decided(logits, [row(profile="hf", top_p=top_p)], impl)[0]
    dropped = [i for i in range(n) if i + 1 <= (1 - top_p) * n]
    assert status == OK
    assert ids == (list(range(len(dropped), n)) if dropped else [])


@pytest.mark.parametrize("profile", ["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"])
def test_flat_rows_are_cut_exactly(profile):
    rows = [row(profile=profile, top_p=top_p) for top_p in (0.5, 0.1, 1 - 2**-53, 0.999)]
    logits = on_device(np.full((4, 40), -1.75, np.float32))
    for (status, _, _, ids, _, _), count in zip(
        decided(logits, rows, "triton"),
        (21, 5, 40, 40) if profile.startswith("sglang") else (20, 4, 40, 40),
        strict=True,
    ):
        if profile == "sglang":
            count = 40  # ties with the last stay
        expected = range(40 - count, 40) if profile == "hf" else range(count)
        assert status == OK
        assert ids == (list(expected) if count < 40 else [])


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_candidates_that_do_not_reach_the_mass_cut_are_not_drawn_from(impl):
    words = table([row(top_p=0.9)])
    logits = on_device(np.random.default_rng(6).normal(0, 1, (1, V)).astype(np.float32))
    found = cuda_oracles.select(logits, words, capacity=V)
    n = int(found.field("num_candidates")[0])
    best = found.z[0, :n].sort(descending=True).indices[:5].sort().values  # far from 0.9 of the weight
    found.z[0, :5], found.ids[0, :5] = found.z[0, best].clone(), found.ids[0, best].clone()
    found.field("weight")[0] = torch.exp(found.z[0, :5].double() - found.field("highest")[0]).sum()
    found.field("num_candidates")[0] = 5
    FORMS[impl][1].decide(found, words, V)
    assert found.field("status").tolist() == [TOO_MANY]


def test_banned_ids_leave_an_unfiltered_row_an_explicit_support():
    z = np.random.default_rng(4).normal(0, 1, (2, V)).astype(np.float32)
    z[0, ::3] = -np.inf
    results = decided(on_device(z), [row(weighs=True), row()], "triton")
    assert results[0][3] == [i for i in range(V) if i % 3]
    kept = z[0, results[0][3]].astype(float)
    np.testing.assert_allclose(results[0][5], kept - np.log(np.exp(kept).sum()), rtol=1e-6)
    assert results[1][3] == [], "the whole vocabulary"


def test_rows_that_cannot_be_drawn_from_keep_their_status_and_have_no_token():
    z = np.zeros((3, V), np.float32)
    z[0, 3], z[1] = np.nan, -np.inf
    words = table([row(top_k=2)] * 3)
    found = select_triton.select(on_device(z), words, capacity=512)
    statuses = found.field("status").tolist()
    decide_triton.decide(found, words, V)
    assert found.field("status").tolist()[:2] == statuses[:2]
    assert statuses[0] == NOT_FINITE
    assert found.field("token_id").tolist()[:2] == [-1, -1]
    assert found.field("count").tolist()[:2] == [0, 0]


@pytest.mark.parametrize("given", [{"top_k": 2}, {}], ids=["candidates", "contenders"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_two_best_scores_may_differ_by_less_than_logarithms_do(impl, given):
    z, distance = close_scores()
    assert 0 < distance < 5e-10
    assert decided(on_device(z[None]), [row(seed=9, **given)], impl)[0][0] == UNCERTAIN


def test_scores_too_close_to_tell_are_said_to_be():
    # Noise is lost beside logits of this size: the scores of both are equal.
    logits = on_device(np.asarray([[1e30, 1e30, 0.0]], np.float32))
    assert [result[0] for result in decided(logits, [row(top_k=2)], "triton")] == [UNCERTAIN]


def test_a_mass_cut_within_rounding_of_a_sum_is_said_to_be():
    z = np.log(np.asarray([[0.5, 0.25, 0.125, 0.125]])).astype(np.float32)
    top_p = float(torch.softmax(torch.tensor(z).double(), -1)[0, :2].sum())
    statuses = [r[0] for r in decided(on_device(z.repeat(3, 0)), [row(top_p=p) for p in (top_p, 0.7, 0.8)], "triton")]
    assert statuses == [UNCERTAIN, OK, OK]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_any_number_of_rows_at_once(n):
    rows = [row(top_k=3, seed=m, completion=m) for m in range(n)]
    assert assert_same(on_device(np.random.default_rng(5).normal(0, 1, (n, 20)).astype(np.float32)), rows) == n
