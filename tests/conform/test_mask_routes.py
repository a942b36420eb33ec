"""vLLM's and SGLang's routes: what is read from them, and what is said when they give no masks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import oracle
from keepmask.conform.json_client import JsonClient
from keepmask.conform.mask_routes import NUM_READ, SglangRoute, VllmRoute
from keepmask.errors import BackendError
from oracle_server import EOS, OracleServer, logits

PROMPT = [5, 6, 7]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 4, "n": 1, "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(params=[VllmRoute, SglangRoute])
def route_type(request):
    return request.param


def test_rows_and_draws_are_the_engines(route_type):
    with OracleServer() as server, JsonClient(server.url) as client:
        drawn = route_type(client, PROMPT).draw(PROMPT, {**PARAMS, "n": 3})
    assert len(drawn) == 3
    for completion in drawn:
        assert completion.finish_reason == "length"
        context = list(PROMPT)
        for token_id, row in zip(completion.token_ids, completion.rows, strict=True):
            assert row == sorted(np.argsort(-logits(context))[:4].tolist())
            assert token_id in row
            context.append(token_id)


def test_readings_are_the_log_probabilities_of_the_biased_logits(route_type):
    bias = {9: 4.0, 250: 3.5}
    with OracleServer() as server, JsonClient(server.url) as client:
        read = route_type(client, PROMPT).read(PROMPT, {"logit_bias": bias})
    biased = oracle.logit_bias(logits(PROMPT), bias)
    likeliest = np.argsort(-biased)[:NUM_READ]
    assert list(read) == likeliest.tolist()
    np.testing.assert_allclose(list(read.values()), oracle.log_softmax(biased[likeliest]), atol=1e-6)


def test_top_k_off_and_lengths_have_sglangs_names():
    bodies = []
    with OracleServer() as server, JsonClient(server.url) as client:
        route = SglangRoute(client, PROMPT)
        server.broken = lambda path, body: bodies.append(body["sampling_params"])
        (drawn,) = route.draw(PROMPT, {**PARAMS, "top_k": 0, "min_tokens": 1})
    assert bodies[0]["top_k"] == -1
    assert "n" not in bodies[0]
    assert (bodies[0]["max_new_tokens"], bodies[0]["min_new_tokens"]) == (2, 1)
    assert drawn.rows == [[token_id for token_id in range(256) if token_id != EOS], list(range(256))]


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"min_p": 0.1}])
def test_sglang_is_given_a_wide_top_k_beside_another_filter(change):
    bodies = []
    with OracleServer() as server, JsonClient(server.url) as client:
        route = SglangRoute(client, PROMPT)
        server.broken = lambda path, body: bodies.append(body["sampling_params"])
        route.draw(PROMPT, {**PARAMS, "top_k": 0, **change})
    assert bodies[0]["top_k"] == 4096


@pytest.mark.parametrize("version", [True, False])
def test_the_engine_is_named_with_its_version_where_it_tells(route_type, version):
    with OracleServer(version=version) as server, JsonClient(server.url) as client:
        assert route_type(client, PROMPT).engine() == ("oracle 1.2" if version else "")


def test_masks_are_asked_for_where_they_do_not_come_by_themselves():
    with OracleServer(masks="asked") as server, JsonClient(server.url) as client:
        (drawn,) = VllmRoute(client, PROMPT).draw(PROMPT, PARAMS)
    assert [len(row) for row in drawn.rows] == [4, 4]


def test_a_server_without_masks_is_told_what_to_switch_on():
    with OracleServer(masks="off") as server, JsonClient(server.url) as client:
        with pytest.raises(BackendError, match=r"without sampling_mask; .*--return-sampling-mask --logprobs-mode"):
            VllmRoute(client, PROMPT)
        with pytest.raises(BackendError, match=r"output_token_sampling_mask: absent from meta_info"):
            SglangRoute(client, PROMPT)


def test_keepmask_with_raw_logprobs_is_told_what_to_switch_on(keepmask_server):
    url = keepmask_server(return_sampling_mask=False, logprobs_mode="raw_logprobs")
    with (
        JsonClient(url) as client,
        pytest.raises(BackendError, match=r"share one normaliser.*keepmask serve MODEL --logp"),
    ):
        VllmRoute(client, PROMPT)


def test_the_wrong_route_names_the_other(route_type):
    with (
        OracleServer(broken=lambda path, body: (404, '{"detail": "Not Found"}')) as server,
        JsonClient(server.url) as client,
        pytest.raises(BackendError, match="without a path, and --api") as raised,
    ):
        route_type(client, PROMPT)
    assert ("--api sglang" if route_type is VllmRoute else "--api vllm") in str(raised.value)


def test_a_prompt_the_server_refuses_is_said_with_its_words(route_type):
    with (
        OracleServer(broken=lambda path, body: (400, '{"error": {"message": "token id 7 out of range"}}')) as server,
        JsonClient(server.url) as client,
        pytest.raises(BackendError, match="refused a plain request: token id 7"),
    ):
        route_type(client, PROMPT)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "an answer that cannot be used"),
        ({"choices": []}, "an answer without choices"),
        ({"choices": [{"token_ids": [1], "sampling_mask": [["a"]]}]}, "ids must be integers"),
        ({"choices": [{"token_ids": [1, 2], "sampling_mask": [[1]]}]}, "1 rows of sampling mask for 2 tokens"),
        ({"choices": [{"token_ids": [1]}]}, "0 rows of sampling mask for 1 tokens"),
    ],
)
def test_answers_that_cannot_be_used_are_named(answer, message):
    with OracleServer() as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        server.broken = lambda path, body: (200, json.dumps(answer))
        with pytest.raises(BackendError, match=message):
            route.draw(PROMPT, PARAMS)


def test_readings_that_are_not_there_are_named():
    with OracleServer() as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        server.broken = lambda path, body: (200, '{"choices": [{"token_ids": [1], "logprobs": null}]}')
        with pytest.raises(BackendError, match="logprobs=20 did not bring top_logprobs, each with its token_id"):
            route.read(PROMPT, {})


def test_a_word_is_a_text_that_comes_back_as_its_ids():
    with OracleServer(tokenizer=True) as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        word = route.word([72, 105])
        assert word is not None
        assert (word.text, word.spaced) == ("Hi", [32, 72, 105])
        assert route.word([32]) is None  # nothing but a space
        assert route.word([200]) is None  # no character of its own


def test_a_server_without_a_tokenizer_is_asked_once():
    with OracleServer() as server, JsonClient(server.url) as client:
        route = VllmRoute(client, PROMPT)
        before = server.num_requests
        assert route.word([72]) is None
        assert route.word([73]) is None
        assert server.num_requests == before + 1
