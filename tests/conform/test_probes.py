"""The table of probes against the oracle: every expected support, and how far it is from another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import oracle
from keepmask.conform.probes import GROUPS, MARGIN, PROBES, PROFILES, WIDE
from keepmask.params import SamplingParams

VOCAB_SIZE = 48
LEVEL, DEPTH = 30.0, 60.0
FILTERS = {"temperature", "top_k", "top_p", "min_p"}

named = pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)


def ids_of(probe):
    return [3 + 2 * slot for slot in range(len(probe.wanted))]


def row_of(probe, off=0.0):
    """[V] float32: the wanted probabilities far above everything else, each logit off by this."""
    level = -LEVEL if probe.negative else LEVEL
    row = np.full(VOCAB_SIZE, level - DEPTH, np.float32)
    row[ids_of(probe)] = level + np.log(probe.wanted) + off
    return row


def answer(probe, profile, off=0.0):
    ids = ids_of(probe)
    step = oracle.step(
        row_of(probe, off),
        SamplingParams(**probe.params_for(ids)),
        [1, *(ids[slot] for slot in probe.prompt)],
        [ids[slot] for slot in probe.output],
        seed=0,
        semantics=profile,
        eos_token_ids=[] if probe.eos is None else [ids[probe.eos]],
        bad_words_token_ids=probe.words_for(ids),
    )
    return "all" if step.support is None else tuple(ids.index(token_id) for token_id in step.support.tolist())


@named
@pytest.mark.parametrize("profile", PROFILES)
def test_expected_supports_are_the_oracles(probe, profile):
    assert answer(probe, profile) == probe.expected(profile)


@pytest.mark.parametrize("probe", [probe for probe in PROBES if not probe.exact], ids=lambda probe: probe.name)
def test_no_answer_changes_while_logits_are_off_by_the_margin(probe):
    for signs in itertools.product((-1, 1), repeat=len(probe.wanted)):
        for profile in PROFILES:
            assert answer(probe, profile, MARGIN * np.array(signs)) == probe.expected(profile), signs


@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe.exact], ids=lambda probe: probe.name)
def test_exact_probes_have_ties_and_hang_on_them(probe):
    assert len(set(probe.wanted)) < len(probe.wanted)
    nearby = [np.array(signs) * 1e-4 for signs in itertools.islice(itertools.product((-1, 1), repeat=12), 0, 4096, 13)]
    assert any(
        answer(probe, profile, off[: len(probe.wanted)]) != probe.expected(profile)
        for off in nearby
        for profile in PROFILES
    )


def warped(probe):
    """Whether it asks for filters alone; `generate` has none where it is greedy."""
    return set(probe.params) <= FILTERS and probe.params.get("temperature") != 0


@pytest.mark.parametrize("probe", list(filter(warped, PROBES)), ids=lambda probe: probe.name)
def test_hf_answers_are_those_of_the_real_warpers(probe):
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    params = {"temperature": 1.0, **probe.params_for(ids_of(probe))}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params["temperature"])])
    if params["top_k"]:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    row, ids = row_of(probe), ids_of(probe)
    if probe.exact:
        # Their sort leaves the order of ties open, but for rows as short as the handful, whose ids have all the mass
        row, ids = row[ids], list(range(len(ids)))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(row)[None])[0]
    kept = torch.isfinite(scores).nonzero().squeeze(1).tolist()
    support = "all" if len(kept) == VOCAB_SIZE else tuple(ids.index(token_id) for token_id in kept)
    assert support == probe.expected("hf")


def test_probes_have_names_of_their_own_and_probabilities_that_sum_to_one():
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    for probe in PROBES:
        assert math.isclose(sum(probe.wanted), 1)
        assert list(probe.wanted) == sorted(probe.wanted, reverse=True)
        assert len(probe.wanted) < WIDE


def test_every_two_profiles_differ_and_those_of_two_engines_where_no_ties_are_needed():
    for one, other in itertools.combinations(PROFILES, 2):
        same_engine = one.split("-")[0] == other.split("-")[0]
        probes = [probe for probe in PROBES if same_engine or not probe.exact]
        assert any(probe.expected(one) != probe.expected(other) for probe in probes)


def test_the_page_has_the_kinds_of_rules_that_differ_between_engines():
    assert list(GROUPS) == ["one filter", "filters together", "temperature", "bans and bias", "penalties"]
    names = {probe.name for probe in PROBES}
    assert {"top_k_tie", "top_p_tie", "top_p_boundary", "min_p_and_top_p", "top_k_then_top_p"} <= names
    assert {"greedy", "greedy_tie", "temperature_top_p", "no_truncation", "top_p_tiny", "equal_rows"} <= names
    assert {"allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "repetition_prompt", "frequency"} <= names
