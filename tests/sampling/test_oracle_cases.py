"""Small inputs with known answers, from public reports on samplers of this kind."""

import numpy as np
import pytest
import torch

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.sampling import DenseHead, Sampler
from oracle_cases import IMPLS, Request, World, assert_batch, sampled

pytestmark = pytest.mark.parametrize("impl", IMPLS)


def logits(*probabilities):
    return np.log(np.asarray(probabilities)).astype(np.float32)


def request(z, **fields):
    return Request(np.asarray(z, np.float32), SamplingParams(logprobs=20, return_sampling_mask_logprobs=True, **fields))


def supports(impl, requests, **world):
    """Ids of each row, checked against the oracle on the way."""
    world = World(requests[0].logits.size, **world)
    assert_batch(world, requests, impl)
    batch = sampled(Sampler(world.spec(), impl=impl), requests)
    return [batch.mask.wait().row(i)[0].tolist() for i in range(len(requests))]


@pytest.mark.parametrize(("semantics", "kept"), [("vllm", [0]), ("sglang", [0, 1, 2]), ("sglang-torch", [0, 1])])
def test_c1_one_answer_on_every_one_of_256_identical_rows(impl, semantics, kept):
    batch = [request(logits(0.4, 0.2, 0.2, 0.1, 0.1), top_k=2, top_p=0.45) for _ in range(256)]
    for i, one in enumerate(batch):
        one.seed = i
    assert supports(impl, batch, semantics=semantics) == [kept] * 256


@pytest.mark.parametrize(("semantics", "kept"), [("vllm", 3), ("sglang", 4)])
def test_c2_the_same_cut_in_plain_min_p_seeded_and_mixed_greedy_batches(impl, semantics, kept):
    z = logits(0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03)
    batch = [
        request(z, top_k=4, top_p=0.82),
        request(z, top_k=4, top_p=0.82, min_p=0.01),
        request(z, top_k=4, top_p=0.82, seed=5),
        request(z, temperature=0, top_k=4, top_p=0.82),
        request(z, top_k=4, top_p=0.82),
    ]
    rows = supports(impl, batch, semantics=semantics)
    assert [len(row) for row in rows] == [kept, kept, kept, 1, kept]
    assert supports(impl, batch[:1], semantics=semantics) == rows[:1]


def test_c3_temperature_before_the_filters(impl):
    z = logits(0.55, 0.25, 0.15, 0.05, 0.05)
    assert supports(impl, [request(z, temperature=0.5, top_p=0.9, min_p=0.1)]) == [[0, 1]]


def test_c4_never_an_empty_row(impl):
    assert supports(impl, [request(logits(0.4, 0.35, 0.25), top_k=1, top_p=0.8, temperature=0.01)]) == [[0]]


EXACT_COUNT = [("vllm", True), ("vllm-torch", False), ("sglang", False), ("sglang-torch", True), ("hf", False)]


@pytest.mark.parametrize(("semantics", "exact_count"), EXACT_COUNT)
def test_c5_of_ties_with_the_kth_the_lowest_ids_stay_or_all(impl, semantics, exact_count):
    z = [5.0, 4.0, 3.0] + [2.0] * 9 + [1.0]
    spread = [-5.0, -1.0, 2.0, -1.0, -5.0, 2.0, 3.0, 2.0]
    kept = [0, 1, 2, 3] if exact_count else list(range(12))
    assert supports(impl, [request(z, top_k=4)], semantics=semantics) == [kept]
    kept = [2, 6] if exact_count else [2, 5, 6, 7]
    assert supports(impl, [request(spread, top_k=2)], semantics=semantics) == [kept]


@pytest.mark.parametrize(("semantics", "exact_count"), EXACT_COUNT)
def test_c5_more_ties_than_candidates_are_held(impl, semantics, exact_count):
    z = np.zeros(10_000)
    z[::2] = 3.0
    kept = [0, 2, 4, 6] if exact_count else list(range(0, 10_000, 2))
    assert supports(impl, [request(z, top_k=4)], semantics=semantics) == [kept]


def test_c6_top_k_and_top_p_give_the_intersection(impl):
    z = logits(*[0.3, 0.25] + [0.45 / 28] * 28)
    assert supports(impl, [request(z, top_k=20, top_p=0.5)]) == [[0, 1]]


def test_c7_the_whole_vocabulary_is_an_empty_row(impl):
    z = logits(0.5, 0.3, 0.2)
    whole = [request(z, top_p=1.0, top_k=0), request(z, top_k=-1), request(z, top_k=3), request(z, min_p=1e-6)]
    assert supports(impl, whole) == [[]] * 4
    assert supports(impl, [request(z, allowed_token_ids=[0, 1])]) == [[0, 1]]


def test_c8_greedy_and_random_rows_share_a_batch(impl):
    z = np.array([1.0, 3.0, 3.0, -50.0])
    batch = [request(z, temperature=T) for T in (1e-4, 0.0, 1.0, 9e-6, 1e-5)]
    rows = supports(impl, batch)
    assert rows == [[], [1], [], [1], []]
    for i, one in enumerate(batch):
        assert supports(impl, [one]) == [rows[i]]


def test_c9_a_peaked_row_at_full_width(impl):
    V = 151_936
    z = np.random.default_rng(0).normal(0, 3, V).astype(np.float32)
    z[777] = 25
    p = np.exp(z.astype(np.float64) - 25)
    p /= p.sum()
    order = np.lexsort((np.arange(V), -p))
    count = next(n for n in range(1, V) if p[order[:n]].sum() >= 0.999)
    assert supports(impl, [request(z, top_p=0.999)]) == [sorted(order[:count].tolist())]


@pytest.mark.parametrize(
    ("semantics", "expected"),
    [
        ("vllm", lambda n: list(range(n))),
        ("vllm-torch", lambda n: list(range(n))),
        ("sglang", lambda n: []),  # all of 16 tied
        ("sglang-torch", lambda n: list(range(n + 1)) if n < 15 else []),
        ("hf", lambda n: list(range(16 - n, 16))),
    ],
)
def test_flat_rows_are_cut_exactly(impl, semantics, expected):
    batch = [request(np.full(16, -2.5), top_p=n / 16) for n in range(1, 16)]
    assert supports(impl, batch, semantics=semantics) == [expected(n) for n in range(1, 16)]


def test_an_id_with_exactly_top_p_before_it_goes_in_profile_vllm_and_stays_in_sglang(impl):
    top_p = 1 / (1 + np.exp(-1.0))
    assert top_p * (1 + np.exp(-1.0)) == 1.0
    batch = [request([0.0, -1.0, -np.inf], top_p=top_p, sampling_semantics=name) for name in ("vllm", "sglang")]
    got = sampled(Sampler(World(3).spec(), impl=impl), batch).mask.wait()
    assert [got.row(i)[0].tolist() for i in (0, 1)] == [[0], [0, 1]]


def test_min_p_of_one_keeps_the_ties_of_the_highest(impl):
    assert supports(impl, [request([1.0, 3.0, 3.0, 2.9999998], min_p=1.0)]) == [[1, 2]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_c10_nan_or_infinity_fails_its_request_only(impl, bad):
    z = np.zeros((3, 5), np.float32)
    z[1, 2] = bad
    rows = [request(row, top_k=2) for row in z]
    batch = sampled(Sampler(World(5).spec(), impl=impl), rows)
    assert set(batch.errors) == {1}
    assert batch.token_ids[1] == -1
    assert batch.token_ids[0] >= 0
    with pytest.raises(KeyError):
        batch.mask.wait().row(1)


def test_c11_eos_is_outside_the_support_for_min_tokens_steps(impl):
    world = World(6, eos_token_ids=(5,))
    sampler = Sampler(world.spec(), impl=impl)
    one = request(np.zeros(6), min_tokens=5, stop_token_ids=[3])
    row = one.open(sampler)
    for length in range(7):
        ids = sampled(sampler, [one], [row]).mask.wait().row(0)[0].tolist()
        assert ids == ([0, 1, 2, 4] if length < 5 else [])
        row.append(1)


def test_c12_a_finished_request_leaves_nothing_behind(impl):
    sampler = Sampler(World(8).spec(), impl=impl)
    z = np.random.default_rng(0).normal(0, 1, 8)
    first = request(z, allowed_token_ids=[1], logit_bias={2: 9.0}, repetition_penalty=2.0, presence_penalty=1.0)
    row = first.open(sampler)
    for _ in range(3):
        sampled(sampler, [first], [row])
        row.append(1)
    later = request(z, top_p=0.99)
    got = sampled(sampler, [later])
    untouched = sampled(Sampler(World(8).spec(), impl=impl), [later])
    for mine, yours in zip(got.mask.wait().row(0), untouched.mask.wait().row(0), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert_batch(World(8), [later], impl)


def test_c13_penalties_equal_a_recount_from_the_history_each_step(impl):
    V = 30
    rng = np.random.default_rng(4)
    world = World(V)
    sampler = Sampler(world.spec(), impl=impl)
    one = request(np.zeros(V), repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.95)
    one.prompt = [3, 3, 4, 29]
    row = one.open(sampler)
    for _ in range(20):
        one.logits = rng.normal(0, 2, V).astype(np.float32)
        assert_batch(world, [one], impl)
        fresh, kept = sampled(sampler, [one]), sampled(sampler, [one], [row])
        assert fresh.token_ids[0] == kept.token_ids[0]
        for mine, yours in zip(fresh.mask.wait().row(0), kept.mask.wait().row(0), strict=True):
            np.testing.assert_array_equal(mine, yours)
        token_id = int(kept.token_ids[0])
        row.append(token_id)
        one.output = [*one.output, token_id]


@pytest.mark.parametrize(
    ("fields", "drawn"),
    [
        # Each line: greedy over [2, 0, -1], prompt [0], output [0]; the other order of the two steps draws another id.
        ({"logit_bias": {0: 4.0, 1: 2.5}, "repetition_penalty": 3.0}, 1),  # (2 + 4) / 3 = 2, not 2 / 3 + 4
        ({"logit_bias": {1: 0.9}, "repetition_penalty": 2.0, "presence_penalty": 0.2}, 1),  # 2 / 2 - .2, not 1.8 / 2
        ({"logit_bias": {1: 0.9}, "repetition_penalty": 2.0, "frequency_penalty": 0.2}, 1),
        ({"logit_bias": {0: 100.0}, "allowed_token_ids": [1, 2]}, 1),  # a ban is not biased away
        ({"logit_bias": {0: 100.0}, "stop_token_ids": [0], "min_tokens": 5}, 1),
    ],
)
def test_steps_come_in_the_documented_order(impl, fields, drawn):
    one = request([2.0, 0.0, -1.0], temperature=0, **fields)
    one.prompt, one.output = [0], [0]
    assert supports(impl, [one]) == [[drawn]]


def test_penalties_come_before_the_temperature(impl):
    # (1 - .9) / .5 = .2 is within ln 2 of 0; 1 / .5 - .9 = 1.1 would leave id 1 behind.
    one = request([1.0, 0.0, -9.0], temperature=0.5, min_p=0.5, presence_penalty=0.9)
    one.output = [0]
    assert supports(impl, [one]) == [[0, 1]]


@pytest.mark.parametrize(
    ("field", "legal", "illegal"),
    [
        ("logit_bias", {9: 1.0}, {3: 1.0, 10: 1.0}),
        ("allowed_token_ids", [9], [3, 10]),
        ("stop_token_ids", [9], [2**40]),
    ],
)
def test_c14_ids_beyond_the_vocabulary_are_refused_with_the_fields_name(impl, field, legal, illegal):
    sampler = Sampler(World(10).spec(), impl=impl)
    sampler.check(SamplingParams(**{field: legal}))
    with pytest.raises(RequestError, match=field) as caught:
        sampler.check(SamplingParams(**{field: illegal}))
    assert caught.value.param == field


def test_c14_bad_words_beyond_the_vocabulary_are_refused(impl):
    sampler = Sampler(World(10).spec(), impl=impl)
    one = request(np.zeros(10))
    one.bad_words = [[3], [9, 10]]
    with pytest.raises(RequestError, match="bad_words") as caught:
        one.open(sampler)
    assert caught.value.param == "bad_words"


def test_a_row_of_minus_infinity_alone_fails_its_request_only(impl):
    z = np.zeros((2, 4), np.float32)
    z[0] = -np.inf
    batch = sampled(Sampler(World(4).spec(), impl=impl), [request(row, top_k=2) for row in z])
    assert set(batch.errors) == {0}


def test_strided_logits_are_taken(impl):
    rng = np.random.default_rng(9)
    wide = torch.tensor(rng.normal(0, 2, (6, 80)), dtype=torch.float32)
    view = wide[::2, ::2]
    requests = [request(row.numpy(), top_p=0.9, top_k=7) for row in view]
    sampler = Sampler(World(40).spec(), impl=impl)
    got = sampler.sample(DenseHead(view), [one.open(sampler) for one in requests])
    expected = sampled(sampler, requests)
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    assert_batch(World(40), requests, impl)
    assert torch.equal(wide[::2, ::2], view)  # the caller's logits are left as they were


def test_no_rows_make_an_empty_batch(impl):
    batch = Sampler(World(5).spec(), impl=impl).sample(DenseHead(torch.zeros(0, 5)), [])
    assert batch.token_ids.shape == (0,)
    assert batch.errors == {}
