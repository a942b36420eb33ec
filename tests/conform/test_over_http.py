"""Engines behind HTTP: this package's server, and one that is the oracle's and can break rules."""

from __future__ import annotations

import pytest

from keepmask.conform.json_client import JsonClient
from keepmask.conform.mask_routes import SglangRoute, VllmRoute
from keepmask.conform.outcome import run_probes
from keepmask.conform.over_http import PROMPT, HttpTarget
from keepmask.conform.probes import PROBES, PROFILES
from keepmask.errors import BackendError
from oracle_server import EOS, OracleServer

BY_NAME = {probe.name: probe for probe in PROBES}
LACKING_AT_SGLANG = [probe.name for probe in PROBES if {"allowed_token_ids", "bad_words"} & set(probe.params)]
EXACT = [probe.name for probe in PROBES if probe.exact]


def asked(url, *, route=VllmRoute, names=tuple(BY_NAME), eos_token_id=EOS):
    with JsonClient(url) as client:
        target = HttpTarget(url, route(client, PROMPT), eos_token_id=eos_token_id)
        return run_probes(target, [BY_NAME[name] for name in names])


def with_status(report, status):
    return [result.probe.name for result in report.results if result.seen.status == status]


def notes(report):
    return {result.probe.name: result.seen.note for result in report.results if result.seen.note}


def test_what_the_vllm_contract_refuses_is_refused_and_the_rest_follows_vllm(keepmask_server):
    report = asked(keepmask_server(sampling_mask_contract="vllm"))
    assert with_status(report, "refused") == ["top_p_alone", "no_truncation", "greedy", "greedy_tie"]
    assert "requires top_k > 0" in notes(report)["top_p_alone"]
    assert "requires temperature > 0" in notes(report)["greedy"]
    assert report.num_asked == len(PROBES) - 4
    assert report.passed("vllm")


def test_our_own_server_answers_the_same_over_sglangs_route(keepmask_server):
    report = asked(keepmask_server(sampling_semantics="sglang"), route=SglangRoute)
    assert with_status(report, "refused") == ["no_truncation"]
    assert with_status(report, "untestable") == LACKING_AT_SGLANG
    assert report.passed("sglang")


@pytest.mark.parametrize("profile", PROFILES)
def test_an_engine_that_is_not_ours_is_found_to_follow_its_profile(profile):
    with OracleServer(semantics=profile, tokenizer=True) as server:
        report = asked(server.url)
    assert report.num_asked == len(PROBES)
    assert report.passed(profile)


def test_over_sglangs_route_all_is_asked_but_what_it_does_not_have():
    with OracleServer(semantics="sglang") as server:
        report = asked(server.url, route=SglangRoute)
    assert with_status(report, "untestable") == LACKING_AT_SGLANG
    assert notes(report)["bans_first"] == "this API has no allowed_token_ids"
    assert report.passed("sglang")
    assert not report.passed("vllm")


@pytest.mark.parametrize(
    ("rule", "differing"),
    [
        ("bias_last", ["temperature_top_p", "temperature_min_p", "temperature_bias", "temperature_tiny"]),
        ("stop_free", ["min_tokens", "min_tokens_eos"]),
        ("output_only", ["repetition_prompt", "repetition_negative"]),
        ("stray", ["top_k_then_top_p", "equal_rows"]),
        ("uneven", ["equal_rows"]),
        ("greedy_crashes", ["greedy", "greedy_tie"]),
    ],
)
def test_a_broken_rule_is_found_in_the_rows_about_it(rule, differing):
    others = ["top_k", "min_p", "top_k_and_top_p", "logit_bias", "bad_words", "presence"]
    with OracleServer(rules=[rule], tokenizer=True) as server:
        report = asked(server.url, names=[*differing, *others])
    assert report.num_asked == len(report.results)
    assert report.differing("vllm") == differing


def test_an_engine_that_keeps_all_ties_is_told_from_one_that_keeps_exactly_k():
    with OracleServer(semantics="vllm-torch") as server:
        report = asked(server.url, names=["top_k", "top_k_tie", "top_k_nine_tied"])
    assert report.differing("vllm") == ["top_k_tie", "top_k_nine_tied"]
    assert report.passed("vllm-torch")


def test_failures_say_what_happened():
    with OracleServer(rules=["stray"]) as server:
        assert "which is not in its row" in notes(asked(server.url, names=["equal_rows"]))["equal_rows"]
    with OracleServer(rules=["uneven"]) as server:
        assert notes(asked(server.url, names=["equal_rows"])) == {"equal_rows": "64 equal rows gave 2 supports"}
    with OracleServer(rules=["greedy_crashes"]) as server:
        assert "500, CUDA error" in notes(asked(server.url, names=["greedy"]))["greedy"]


def test_what_an_engine_refuses_is_not_held_against_it():
    with OracleServer(rules=["greedy_refused"], tokenizer=True) as server:
        report = asked(server.url, names=["greedy", "greedy_tie", "top_k"])
    assert with_status(report, "refused") == ["greedy", "greedy_tie"]
    assert report.passed("vllm")


def test_a_server_error_without_a_word_is_a_refusal_where_the_engine_documents_one():
    with OracleServer(rules=["silent"], tokenizer=True) as server:
        report = asked(server.url)
    assert with_status(report, "refused") == ["top_p_alone", "no_truncation", "greedy", "greedy_tie"]
    assert notes(report)["greedy"].startswith("500 without a word: vLLM documents")
    assert report.passed("vllm")


def test_a_server_error_without_a_word_is_a_failure_anywhere_else():
    def crashing(path, body):
        return (500, '{"error": {"message": ""}}') if body["sampling_params"].get("top_k") == 2 else None

    with OracleServer(broken=crashing) as server:
        (result,) = asked(server.url, names=["top_k"]).results
    assert result.seen.status == "failed"
    assert "500, without a word; the server's log has the details" in result.seen.note


def test_logits_that_are_not_the_same_twice_flip_no_row_and_pass_for_no_tie():
    with OracleServer(noise=0.008, tokenizer=True) as server:
        report = asked(server.url)
    assert with_status(report, "untestable") == EXACT
    assert report.differing("vllm") == []


def test_probes_that_need_more_than_the_server_has_say_what():
    with OracleServer() as server:
        report = asked(server.url, eos_token_id=None, names=["min_tokens_eos", "bad_words", "bad_words_match"])
    assert notes(report) == {
        "min_tokens_eos": "give the model's end token with --eos-token-id",
        "bad_words": "found no text that /detokenize gives and /tokenize turns back into the same ids",
        "bad_words_match": "found no text that /detokenize gives and /tokenize turns back into the same ids",
    }


def test_tokens_that_do_not_come_out_before_make_a_probe_untestable():
    def ended(path, body):
        if body["sampling_params"].get("max_tokens") == 2:
            return 200, '{"choices": [{"token_ids": [9], "sampling_mask": [[9]], "finish_reason": "length"}]}'
        return None

    with OracleServer(broken=ended) as server:
        report = asked(server.url, names=["presence"])
    assert notes(report) == {"presence": "needs certain tokens before, and the engine drew others: at last [9]"}


@pytest.mark.parametrize(("reason", "status"), [("stop", "untestable"), ("error", "failed")])
def test_completions_that_end_early_are_told_apart_by_their_reason(reason, status):
    def ended(path, body):
        if body["sampling_params"].get("top_k") == 2:
            choice = f'{{"token_ids": [], "sampling_mask": [], "finish_reason": "{reason}"}}'
            return 200, f'{{"choices": [{choice}]}}'
        return None

    with OracleServer(broken=ended) as server:
        (result,) = asked(server.url, names=["top_k"]).results
    assert result.seen.status == status
    assert f"ended with finish_reason {reason} after 0 tokens" in result.seen.note


def test_a_server_that_dies_on_the_way_ends_the_run():
    def dying(path, body):
        return (503, '{"error": {"message": "engine dead"}}') if body["sampling_params"].get("top_k") == 2 else None

    with OracleServer(broken=dying) as server, pytest.raises(BackendError, match="503, engine dead"):
        asked(server.url, names=["top_k"])


def test_log_probabilities_that_do_not_follow_the_bias_are_said_at_the_start():
    with OracleServer(rules=["raw"]) as server, pytest.raises(BackendError, match=r"70 on token .*processed_logprobs"):
        asked(server.url)


def test_too_few_likely_ids_are_said_at_the_start():
    class Narrow:
        unknown = frozenset()

        def read(self, prompt, params):
            return dict.fromkeys(range(8), -1.0)

    with pytest.raises(BackendError, match="8 likely ids to work with, and probes need 12"):
        HttpTarget("narrow", Narrow())
