"""The oracle itself, against published vectors, cases worked by hand, and the warpers of transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import oracle

DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "stop_token_ids": (),
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "thinking_token_budget": None,
    "sampling_semantics": None,
}


def params(**fields):
    return SimpleNamespace(**DEFAULTS | fields)


def logits(*probabilities):
    return np.log(np.asarray(probabilities)).astype(np.float32)


def step(z, output=(), prompt=(), seed=0, completion_index=0, semantics="vllm", **fields):
    return oracle.step(
        z, params(**fields), prompt, output, seed=seed, completion_index=completion_index, semantics=semantics
    )


def support(z, **fields):
    return step(z, **fields).ids.tolist()


# Known-answer vectors of Random123 1.14 (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    assert oracle.philox4x32(counter, key) == words
    arrays = [np.full(3, word, np.uint64) for word in counter]
    assert [word.tolist() for word in oracle.philox4x32(arrays, key)] == [[word] * 3 for word in words]


def test_gumbel_noise_depends_on_seed_completion_position_and_id_alone():
    ids = np.arange(50)
    noise = oracle.gumbel(ids, seed=7, completion_index=1, position=2)
    np.testing.assert_array_equal(oracle.gumbel(ids[[40, 3]], 7, 1, 2), noise[[40, 3]])
    np.testing.assert_array_equal(oracle.gumbel(ids, 7 - 2**64, 1, 2), noise)  # seeds count modulo 2**64
    for other in [(7 + 2**32, 1, 2), (8, 1, 2), (7, 2, 2), (7, 1, 3), (7, 2, 1)]:
        assert not np.isin(oracle.gumbel(ids, *other), noise).any()


def test_gumbel_noise_has_the_standard_distribution():
    noise = oracle.gumbel(np.arange(200_000), 1, 0, 0)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert np.isfinite(noise).all()


def test_drawn_ids_follow_the_probabilities():
    z = logits(0.5, 0.3, 0.15, 0.05)
    drawn = [step(z, seed=seed, top_k=3).token_id for seed in range(4000)]
    expected = np.array([0.5, 0.3, 0.15]) / 0.95
    observed = np.bincount(drawn, minlength=4) / len(drawn)
    assert observed[3] == 0
    np.testing.assert_allclose(observed[:3], expected, atol=4 * 0.5 / np.sqrt(len(drawn)))


@pytest.mark.parametrize(
    ("semantics", "kept"),
    [("vllm", [0]), ("vllm-torch", [0]), ("sglang", [0, 1, 2]), ("sglang-torch", [0, 1]), ("hf", [0])],
)
def test_c1_top_k_2_top_p_45(semantics, kept):
    got = step(logits(0.4, 0.2, 0.2, 0.1, 0.1), top_k=2, top_p=0.45, semantics=semantics)
    assert got.ids.tolist() == kept
    assert got.token_id in kept


@pytest.mark.parametrize(("semantics", "kept"), [("vllm", [0, 1, 2]), ("sglang", [0, 1, 2, 3])])
def test_c2_top_p_is_cut_on_the_renormalised_set_or_before_top_k(semantics, kept):
    z = logits(0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03)
    assert support(z, top_k=4, top_p=0.82, semantics=semantics) == kept
    assert support(z, top_k=4, top_p=0.82, semantics=semantics, min_p=0.01) == kept


def test_c3_temperature_comes_before_the_filters_and_dropped_means_minus_infinity():
    # T = 0.5 squares the weights: .3025 .0625 .0225 .0025 .0025 of .3925; min-p keeps >= .03025, top-p keeps both left.
    got = step(logits(0.55, 0.25, 0.15, 0.05, 0.05), temperature=0.5, top_p=0.9, min_p=0.1)
    assert got.ids.tolist() == [0, 1]
    np.testing.assert_allclose(got.probabilities, [0.3025 / 0.365, 0.0625 / 0.365], rtol=1e-6)
    assert np.isneginf(got.logits[2:]).all()


def test_c4_a_row_is_never_empty():
    assert support(logits(0.4, 0.35, 0.25), top_k=1, top_p=0.8, temperature=0.01) == [0]


@pytest.mark.parametrize(
    ("semantics", "kept"), [("vllm", 4), ("vllm-torch", 12), ("sglang", 12), ("sglang-torch", 4), ("hf", 12)]
)
def test_c5_of_ties_at_the_cut_the_lowest_ids_stay_or_all(semantics, kept):
    z = np.array([5.0, 4.0, 3.0] + [2.0] * 9 + [1.0], np.float32)
    assert support(z, top_k=4, semantics=semantics) == list(range(kept))


def test_c6_top_k_and_top_p_give_the_intersection():
    z = logits(*[0.3, 0.25] + [0.45 / 28] * 28)
    assert support(z, top_k=20, top_p=0.5) == [0, 1]


def test_c7_without_filters_the_support_is_the_whole_vocabulary():
    assert step(logits(0.5, 0.3, 0.2)).support is None
    assert step(logits(0.5, 0.3, 0.2), top_k=3, top_p=1.0, min_p=0.0).support is None
    np.testing.assert_allclose(step(logits(0.5, 0.3, 0.2)).probabilities, [0.5, 0.3, 0.2], rtol=1e-6)


def test_c8_greedy_rows_are_singletons_and_tiny_temperatures_stay_finite():
    z = np.array([1.0, 3.0, 3.0, -50.0], np.float32)
    for T in (0.0, 9e-6):
        got = step(z, temperature=T, top_k=4)
        assert (got.token_id, got.ids.tolist(), got.logprobs.tolist()) == (1, [1], [0.0])
    got = step(z, temperature=1e-4, top_p=0.9)
    assert got.ids.tolist() == [1, 2]
    assert np.isfinite(got.logprobs).all()


def test_c9_a_peaked_row_at_full_width():
    z = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    z[777] = 25
    p = np.exp(z.astype(np.float64) - 25)
    p /= p.sum()
    order = np.lexsort((np.arange(z.size), -p))
    count = next(n for n in range(1, z.size) if p[order[:n]].sum() >= 0.999)
    assert support(z, top_p=0.999) == sorted(order[:count].tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_c10_nan_and_infinity_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or"):
        step(np.array([0.0, bad, 1.0], np.float32), top_k=1)


def test_c11_min_tokens_bans_eos_and_stop_tokens():
    z = np.zeros(6, np.float32)
    for length in range(7):
        got = oracle.step(
            z, params(min_tokens=5, stop_token_ids=(3,)), [0], [1] * length, seed=0, eos_token_ids=(5,)
        ).ids.tolist()
        assert got == ([0, 1, 2, 4] if length < 5 else [0, 1, 2, 3, 4, 5])


def test_c13_penalties_by_hand():
    z = np.array([2.0, -1.0, 3.0, 0.5], np.float32)
    got = oracle.transformed(
        z, params(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25), [0, 1], [2, 2, 1]
    )
    np.testing.assert_allclose(got, [1.0, -2.0 - 0.5 - 0.25, 1.5 - 1.0 - 0.25, 0.5])


def test_bans_bias_and_words():
    z = np.zeros(6, np.float32)
    assert support(z, allowed_token_ids=[4, 1, 1]) == [1, 4]
    assert oracle.step(z, params(), [], [], seed=0, banned_token_ids=(0, 5)).ids.tolist() == [1, 2, 3, 4]
    assert support(z, logit_bias={2: 100.0}, min_p=0.5) == [2]
    words = [[3], [1, 2], [0, 1, 4]]
    assert oracle.bad_words(z, words, []).tolist() == [0, 0, 0, -np.inf, 0, 0]
    assert np.flatnonzero(np.isinf(oracle.bad_words(z, words, [5, 1]))).tolist() == [2, 3]
    assert np.flatnonzero(np.isinf(oracle.bad_words(z, words, [0, 1]))).tolist() == [2, 3, 4]


def test_a_spent_thinking_budget_forces_the_end_tokens_one_by_one():
    def force(prompt, output, budget=2):
        return oracle.thinking_force(budget, prompt, output, start=[7, 8], end=[9, 10])

    assert force([1, 2], [3, 4, 5]) is None  # never opened
    assert force([7, 8], []) is None
    assert force([7, 8], [1]) is None
    assert force([7, 8], [1, 2]) == 9
    assert force([7, 8], [1, 2, 9]) == 10
    assert force([7, 8], [1, 2, 9, 10]) is None  # closed
    assert force([7, 8, 1, 2, 3], []) == 9  # spent in the prompt already
    assert force([], [7, 8, 1, 9, 10, 5, 5, 5]) is None  # closed before the budget was spent
    assert force([], [7, 8, 1, 9, 10, 7, 8, 5, 5]) == 9  # opened again
    assert force([7, 8], [1, 7, 8]) == 9  # a start inside of a span is a token of it
    assert force([7, 8], [1, 9]) == 10  # goes on with an end that has begun by itself
    assert force([7, 8], [], budget=0) == 9
    assert force([7, 8], [1] * 50, budget=None) is None


def test_a_forced_token_is_a_singleton_whatever_was_banned():
    got = oracle.step(
        np.zeros(5, np.float32),
        params(thinking_token_budget=0, allowed_token_ids=[0, 1]),
        [3],
        [],
        seed=0,
        thinking_start=[3],
        thinking_end=[4],
    )
    assert (got.token_id, got.ids.tolist(), got.logprobs.tolist()) == (4, [4], [0.0])


def test_a_row_with_everything_banned_is_refused():
    with pytest.raises(ValueError, match="every id is banned"):
        oracle.step(np.zeros(2, np.float32), params(allowed_token_ids=[0]), [], [], seed=0, banned_token_ids=(0,))


def test_flat_rows_are_cut_exactly():
    z = np.zeros(10, np.float32)
    for tenths in range(1, 10):
        got = step(z, top_p=tenths / 10)
        assert got.ids.tolist() == list(range(tenths))
        assert oracle.top_p(z.astype(np.float64), tenths / 10).margin == np.inf
        assert support(z, top_p=tenths / 10, semantics="sglang") == list(range(10))


def test_replayed_log_probs_are_those_of_the_step():
    rng = np.random.default_rng(3)
    z = rng.normal(0, 2, 40).astype(np.float32)
    given_params = params(
        temperature=0.7, top_k=12, top_p=0.9, logit_bias={3: 2.0}, repetition_penalty=1.3, frequency_penalty=0.4
    )
    prompt, output = [1, 2, 3], [4, 4, 5]
    got = oracle.step(z, given_params, prompt, output, seed=0)
    replayed = oracle.replayed(z, given_params, prompt, output, got.support)
    np.testing.assert_allclose(replayed, got.logprobs, atol=1e-6)
    assert np.logaddexp.reduce(replayed) == pytest.approx(0, abs=1e-12)
    # The whole-vocabulary log-prob misses exactly the kept mass.
    whole = oracle.log_softmax(oracle.transformed(z, given_params, prompt, output))[got.support]
    kept = oracle.kept_mass(z, given_params, prompt, output, got.support)
    np.testing.assert_allclose(whole - replayed, np.log(kept), atol=1e-12)
    assert oracle.entropy(replayed) == pytest.approx(-(got.probabilities * np.log(got.probabilities)).sum(), abs=1e-5)


def test_entropy_and_kl_by_hand():
    p, q = np.log([0.5, 0.5, 1e-300])[:2], np.log([0.25, 0.75])
    assert oracle.entropy(np.array([*p, -np.inf])) == pytest.approx(np.log(2))
    assert oracle.kl(p, p) == 0
    assert oracle.kl(p, q) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert oracle.entropy(oracle.replayed(np.arange(3.0), params(temperature=0), [], [], [2])) == 0


# ---------------------------------------------------------------- transformers


def warped(z, dtype, **fields):
    """Ids left by the warpers of transformers, in the order `generate` applies them."""
    p = params(**fields)
    stages = LogitsProcessorList([TemperatureLogitsWarper(float(p.temperature))])
    if p.top_k > 0:
        stages.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        stages.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        stages.append(MinPLogitsWarper(p.min_p))
    scores = stages(torch.zeros(1, 1, dtype=torch.long), torch.tensor(z, dtype=dtype)[None])[0]
    return np.flatnonzero(torch.isfinite(scores).numpy())


rows = st.one_of(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.lists(st.sampled_from([0.0, 1.0, -1.5, 3.0]), min_size=1, max_size=40),
)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.5, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 10, 100]),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


@given(rows, filters, st.sampled_from([(torch.float64, 1e-9), (torch.float32, 2e-6)]))
def test_profile_hf_keeps_what_the_warpers_of_transformers_keep(row, fields, precision):
    dtype, rounding = precision
    z = np.asarray(row, np.float32)
    hot = oracle.temperature(z.astype(np.float64 if dtype is torch.float64 else np.float32), fields["temperature"])
    cut = oracle.filters_hf(hot.astype(np.float64), params(**fields))
    if cut.margin < rounding:
        return  # the warper's own softmax and sums round to either side here
    got = warped(z, dtype, **fields)
    kept = np.flatnonzero(cut.keep)
    # The warper's sort promises no order among equal logits: so as many of each value, and the ids where none is split.
    np.testing.assert_array_equal(np.sort(z[got]), np.sort(z[kept]))
    untied = ~np.isin(z[kept], z[~cut.keep])
    assert set(kept[untied]) <= set(got)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_profile_hf_drops_the_lowest_of_tied_ids_first_as_a_stable_sort_does(dtype):
    # 16 equal weights of 1/16 are exact in either dtype: dropping while the sum is <= 1 - .5 drops 8.
    z = np.zeros(16, np.float32)
    assert np.flatnonzero(oracle.top_p_from_below(z.astype(np.float64), 0.5).keep).tolist() == list(range(8, 16))
    assert warped(z, dtype, top_p=0.5).tolist() == list(range(8, 16))


@given(rows, st.floats(0.1, 4.0), st.data())
def test_repetition_penalty_is_that_of_transformers(row, penalty, data):
    ids = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=1, max_size=10))
    z = np.asarray(row, np.float32)
    got = RepetitionPenaltyLogitsProcessor(float(penalty))(torch.tensor([ids]), torch.tensor(z)[None])[0].numpy()
    half = len(ids) // 2
    np.testing.assert_array_equal(oracle.repetition(z, penalty, ids[:half], ids[half:]), got)
