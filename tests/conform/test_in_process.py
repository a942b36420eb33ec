"""The sampler of this package, asked in its own process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepmask.conform.in_process import InProcessTarget
from keepmask.conform.outcome import run_probes
from keepmask.conform.probes import PROBES, PROFILES


def probe_named(name):
    (probe,) = (probe for probe in PROBES if probe.name == name)
    return probe


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("profile", PROFILES)
def test_the_sampler_answers_every_probe_as_its_profile_says(profile, impl):
    report = run_probes(InProcessTarget(profile, impl=impl), PROBES)
    assert report.num_asked == len(PROBES)
    assert report.differing(profile) == []
    for other in PROFILES:
        told_apart = [probe.name for probe in PROBES if not probe.allows(other, probe.expected(profile))]
        assert report.differing(other) == told_apart


@pytest.mark.parametrize(("profile", "support"), [("vllm", (0,)), ("sglang", (0, 1, 2))])
def test_all_256_equal_rows_have_the_support_and_their_draw_in_it(profile, support):
    probe = replace(probe_named("top_k_then_top_p_tie"), num_completions=256)
    seen = InProcessTarget(profile).observe(probe)
    assert (seen.status, seen.support, seen.num_others) == ("tested", support, 0)


def test_a_row_that_cannot_be_drawn_from_is_a_failure_with_the_samplers_reason():
    probe = replace(probe_named("bad_words"), params={"bad_words": ((0,),), "allowed_token_ids": (0,)})
    seen = InProcessTarget().observe(probe)
    assert seen.status == "failed"
    assert "no token is left to draw" in seen.note


def test_its_name_says_which_profile_it_follows():
    assert InProcessTarget("hf").name == "the sampler in this process, profile hf"
