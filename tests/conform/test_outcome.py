"""What rows say of a target, and what the answers together say."""

from __future__ import annotations

import json

from keepmask.conform.outcome import Observation, Report, Result, observed, run_probes
from keepmask.conform.probes import PROBES

BY_NAME = {probe.name: probe for probe in PROBES}


def seen_as(*support, num_others=0):
    return Observation(status="tested", support=support, num_others=num_others)


def report(**seen):
    return Report("some engine", tuple(Result(BY_NAME[name], observation) for name, observation in seen.items()))


def test_rows_are_read_in_slots_with_the_other_ids_counted():
    assert observed([[4, 7, 90]], [7], [7, 8, 4]) == seen_as(0, 2, num_others=1)


def test_marked_and_listed_rows_of_the_whole_vocabulary_are_the_same():
    whole = Observation(status="tested", support="all")
    assert observed([None], [7], [7, 8]) == whole
    assert observed([list(range(512))], [7], [7, 8]) == whole
    assert observed([[0, 1, 2]], [1], [0, 1, 2]) == seen_as(0, 1, 2)


def test_a_draw_outside_its_row_fails_whatever_the_row_is():
    seen = observed([[4, 7], [4, 7]], [7, 8], [7, 8, 4])
    assert (seen.status, seen.note) == ("failed", "drew slot 1, which is not in its row")
    assert observed([[4]], [99], [4]).note == "drew token 99, which is not in its row"


def test_equal_rows_with_different_supports_fail():
    seen = observed([[4, 7], [4, 7], [7]], [7, 7, 7], [7, 8, 4])
    assert (seen.status, seen.note) == ("failed", "3 equal rows gave 2 supports")


def test_a_profile_is_followed_where_support_and_others_are_as_it_says():
    probe = BY_NAME["top_k_then_top_p"]
    assert Result(probe, seen_as(0, 1)).agrees("vllm") is True
    assert Result(probe, seen_as(0, 1)).agrees("sglang") is False
    assert Result(probe, seen_as(0, 1, num_others=1)).agrees("vllm") is False
    assert Result(probe, Observation(status="failed", note="broke")).agrees("vllm") is False
    assert Result(probe, Observation(status="refused")).agrees("vllm") is None
    assert Result(probe, Observation(status="untestable")).agrees("vllm") is None


def test_any_of_tied_ids_follow_sglang_torch_if_their_number_does():
    probe = BY_NAME["top_k_tie"]
    for support, follows in [((0, 1), True), ((0, 3), True), ((0,), False), ((0, 1, 2), False), ((1, 2), False)]:
        assert Result(probe, seen_as(*support)).agrees("sglang-torch") is follows
        assert Result(probe, seen_as(*support)).agrees("vllm") is (support == (0, 1))


def test_verdict_names_the_rows_and_leaves_out_what_could_not_be_asked():
    found = report(
        top_k=seen_as(0, 1), top_k_then_top_p=seen_as(0, 1, 2), greedy=Observation(status="refused", note="no")
    )
    assert found.num_asked == 2
    assert found.differing("vllm") == ["top_k_then_top_p"]
    assert found.differing("sglang") == []
    assert found.passed("sglang")
    assert not found.passed("vllm")


def test_an_engine_that_could_be_asked_nothing_follows_no_profile():
    assert not report(greedy=Observation(status="refused")).passed("vllm")


def test_json_holds_question_answer_and_verdict():
    found = report(top_k_then_top_p=seen_as(0, 1), greedy=Observation(status="refused", note="needs temperature"))
    document = json.loads(json.dumps(found.as_dict("sglang")))
    assert document["target"] == "some engine"
    assert document["expect"] == "sglang"
    assert document["passed"] is False
    assert document["asked"] == 1
    assert document["differing"] == {
        "vllm": [],
        "vllm-torch": [],
        "sglang": ["top_k_then_top_p"],
        "sglang-torch": ["top_k_then_top_p"],
        "hf": [],
    }
    joint, greedy = document["probes"]
    assert joint["params"] == {"top_k": 3, "top_p": 0.75}
    assert (joint["vllm"], joint["sglang"], joint["hf"]) == ([0, 1], [0, 1, 2], [0, 1])
    assert (joint["status"], joint["target"], joint["agrees"]) == ("tested", [0, 1], ["vllm", "vllm-torch", "hf"])
    assert (greedy["status"], greedy["target"], greedy["note"]) == ("refused", None, "needs temperature")
    assert found.as_dict()["passed"] is None


def test_probes_are_asked_in_order_and_announced():
    class Echo:
        name = "echo"

        def observe(self, probe):
            return Observation(status="tested", support=probe.vllm)

    announced = []
    found = run_probes(Echo(), PROBES, on_progress=announced.append)
    assert announced == list(PROBES)
    assert found.target == "echo"
    assert found.passed("vllm")
