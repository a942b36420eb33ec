"""The page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keepmask.conform.findings import WIDTH, page, support_text
from keepmask.conform.outcome import Observation, Report, Result
from keepmask.conform.probes import PROBES


def printed(report, expect=None):
    out = io.StringIO()
    Console(file=out, width=WIDTH).print(page(report, expect))
    return out.getvalue()


def answering(answer):
    return Report("an engine", tuple(Result(probe, answer(probe)) for probe in PROBES))


def as_sglang(probe):
    return Observation(status="tested", support=probe.expected("sglang"))


@pytest.mark.parametrize(
    ("support", "text"),
    [((0,), "0"), ((0, 1), "0 1"), ((0, 2), "0 2"), ((0, 1, 2), "0-2"), ((0, 2, 3, 4, 7), "0 2-4 7"), ("all", "all")],
)
def test_supports_are_short(support, text):
    assert support_text(support) == text


def test_everything_is_on_one_page_with_nothing_cut():
    text = printed(answering(as_sglang), "vllm")
    lines = text.splitlines()
    assert len(lines) <= 60
    assert "…" not in text
    for probe in PROBES:
        (line,) = (line for line in lines if line.split()[:1] == [probe.name])
        assert probe.rule in line
        for profile in ("vllm", "vllm-torch", "sglang", "sglang-torch", "hf"):
            assert support_text(probe.expected(profile)) in line


def test_rows_say_which_profiles_they_follow_and_the_end_whether_it_is_the_expected_one():
    text = printed(answering(as_sglang), "vllm")
    assert "NO: sglang sglang-torch hf" in next(line for line in text.splitlines() if "min_p_and_top_p" in line)
    flat = " ".join(text.split())
    counts = "vllm in 32, vllm-torch in 34, sglang in 40, sglang-torch in 35, hf in 35"
    assert f"Of {len(PROBES)} probes that could be asked the target follows {counts}." in flat
    assert "Expected vllm: NO, differs in top_k_tie, top_k_nine_tied, top_p_tie, top_p_boundary," in flat
    assert "Expected sglang: yes." in printed(answering(as_sglang), "sglang")
    assert "Expected" not in printed(answering(as_sglang))


def test_what_could_not_be_asked_is_there_with_its_reason_once():
    text = printed(answering(lambda probe: Observation(status="refused", note="requires temperature > 0")), "vllm")
    assert text.count("requires temperature > 0") == 1
    assert "Refused: top_k, top_k_tie" in text
    assert "Expected vllm: NO, nothing could be asked." in text


def test_ids_outside_the_handful_are_counted():
    text = printed(answering(lambda probe: Observation(status="tested", support=(0, 1), num_others=17)), "vllm")
    assert "0 1 +17" in text
    assert "NO: none" in text
