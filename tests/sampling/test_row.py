"""A row keeps counts, words and bytes of its own completion, one token at a time."""

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sampler_rows import draw, masks, open_row, sample

from keepmask.sampling import Sampler, SamplerSpec
from keepmask.sampling.row import BadWords, TokenCounts

IDS = st.lists(st.integers(0, 40), max_size=300)


@given(st.sets(st.integers(0, 40)), IDS)
def test_counts_are_those_of_a_recount(prompt, output):
    counts = TokenCounts(np.asarray(sorted(prompt), np.int64))
    for token_id in output:
        counts.add(token_id)
    expected = {token_id: output.count(token_id) for token_id in prompt | set(output)}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected
    assert counts.ids.size == len(expected)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6), st.lists(st.integers(0, 3)))
def test_a_word_bans_its_last_token_where_the_others_end_the_output(words, output):
    banned = BadWords(words).banned(np.asarray(output, np.int64))
    assert set(banned) == {word[-1] for word in words if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]}


@given(IDS, IDS)
def test_prompt_and_output_are_kept_apart(prompt, output):
    row = open_row(Sampler(SamplerSpec(vocab_size=64)), prompt=prompt, output=output)
    assert row.prompt_token_ids.tolist() == prompt
    assert row.output_token_ids.tolist() == output
    assert row.num_output_tokens == len(output)


def test_rows_follow_the_engine_unless_the_request_says_otherwise():
    plain, masked = Sampler(SamplerSpec(vocab_size=8, logprobs_mode="processed_logprobs")), Sampler(masks(8))
    assert not open_row(plain).returns_mask
    assert open_row(masked).returns_mask
    assert open_row(plain, return_sampling_mask=True).returns_mask
    assert not open_row(masked, return_sampling_mask=False).returns_mask
    assert open_row(masked, sampling_semantics="hf").semantics == "hf"
    assert open_row(Sampler(masks(8, semantics="sglang"))).semantics == "sglang"


def test_a_sampler_keeps_no_row_alive():
    sampler = Sampler(masks(8))
    rows = [open_row(sampler, seed=b) for b in range(3)]
    alive = [weakref.ref(row) for row in rows]
    sample(sampler, np.zeros((3, 8)), rows)
    del rows
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_a_request_ends_when_its_masks_outgrow_their_budget_and_no_row_is_cut():
    sampler = Sampler(masks(100, max_mask_bytes_per_request=2 * 40 * 4))
    row = open_row(sampler, top_k=40)
    for _ in range(2):
        batch = sample(sampler, [np.arange(100)], [row])
        assert batch.mask.row(0)[0].size == 40
        row.append(int(batch.token_ids[0]))
    batch = sample(sampler, [np.arange(100)], [row])
    assert batch.token_ids.tolist() == [-1]
    assert batch.mask is None
    assert batch.errors[0].param == "return_sampling_mask"
    assert "480 bytes" in str(batch.errors[0])
    assert "max_mask_bytes_per_request" in str(batch.errors[0])


def test_completions_share_the_budget_of_their_request_and_logprobs_count():
    sampler = Sampler(masks(100, max_mask_bytes_per_request=640))
    assert not draw(sampler, np.arange(100), top_k=40, n=4).errors
    assert draw(sampler, np.arange(100), top_k=41, n=4).errors
    assert not draw(sampler, np.arange(100), top_k=20, n=4, return_sampling_mask_logprobs=True).errors
    assert draw(sampler, np.arange(100), top_k=21, n=4, return_sampling_mask_logprobs=True).errors


def test_a_whole_vocabulary_costs_no_bytes_and_a_row_without_masks_has_no_budget():
    sampler = Sampler(masks(100, max_mask_bytes_per_request=4))
    assert not draw(sampler, np.arange(100)).errors
    assert not draw(sampler, np.arange(100), top_k=50, return_sampling_mask=False).errors
    assert draw(sampler, np.arange(100), top_k=50).errors
