"""What is served and how it spells; and the plain routes of the server."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Serving

from keepmask import __version__


def test_models_tells_name_and_context(serving: Serving):
    answer = serving.client.get("/v1/models").json()
    assert answer["object"] == "list"
    (card,) = answer["data"]
    assert card["id"] == serving.service.model_name
    assert card["max_model_len"] == 512
    assert card["object"] == "model"
    assert serving.client.get(f"/v1/models/{card['id']}").json() == card
    assert serving.client.get("/v1/models/other").status_code == 404


def test_name_in_the_api_can_be_chosen(checkpoint: Path):
    with Serving(checkpoint, served_model_name="policy") as serving:
        assert serving.client.get("/v1/models").json()["data"][0]["id"] == "policy"
        assert serving.generate([1], params={"max_tokens": 1}, model="policy").json()["model"] == "policy"
        assert serving.generate([1], params={"max_tokens": 1}, model=str(checkpoint)).status_code == 404


def test_tokenize_and_detokenize_are_the_tokenizers(serving: Serving):
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None
    answer = serving.client.post("/tokenize", json={"prompt": "a b<eos>", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("a b<eos>")
    assert answer["count"] == 4
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    back = serving.client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "a b<eos>"}
    messages = [{"role": "user", "content": "hi"}]
    chat = serving.client.post("/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_tokenize_takes_one_prompt_and_detokenize_known_ids(serving: Serving):
    bodies: list[dict[str, Any]] = [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}]
    for body in bodies:
        answer = serving.client.post("/tokenize", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
    answer = serving.client.post("/detokenize", json={"tokens": [5, 512]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tokens"
    assert serving.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_version_and_health(serving: Serving):
    assert serving.client.get("/version").json() == {"version": __version__}
    assert serving.client.get("/health").json() == {}


def test_document_describes_every_route_and_every_field(serving: Serving):
    document = serving.client.get("/openapi.json").json()
    assert {"/inference/v1/generate", "/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= set(
        document["paths"]
    )
    schemas = document["components"]["schemas"]
    assert schemas["SamplingParams"]["properties"]["top_k"]["description"].startswith("Keep the k highest")
    assert "top_k" in schemas["CompletionRequest"]["properties"]
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["logprobs"]["anyOf"][0]["type"] == "boolean"
    references = set(re.findall(r"#/components/schemas/(\w+)", serving.client.get("/openapi.json").text))
    assert references <= set(schemas)


def families(serving: Serving) -> dict[str, dict[tuple[str, ...], float]]:
    text = serving.client.get("/metrics").text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(f"{name}={value}" for name, value in sample.labels.items() if name != "model_name"))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def test_metrics_count_what_was_served(checkpoint: Path):
    params = {"max_tokens": 10, "top_k": 3, "ignore_eos": True, "seed": 1}
    with Serving(checkpoint, served_model_name="policy") as serving:
        serving.generate([1, 2, 3], params={**params, "n": 2})
        serving.stream([1, 2, 3, 4], params=params)
        serving.generate([1], params={**params, "top_k": 0})
        serving.generate([1], params={"top_p": 7})
        serving.settle()
        found = families(serving)
        assert 'model_name="policy"' in serving.client.get("/metrics").text
    assert found["vllm:prompt_tokens_total"][()] == 8
    assert found["vllm:generation_tokens_total"][()] == 40
    assert found["vllm:request_success_total"][("finished_reason=length",)] == 4
    assert found["vllm:request_success_total"][("finished_reason=stop",)] == 0
    assert found["vllm:num_requests_running"][()] == 0
    assert found["vllm:num_requests_waiting"][()] == 0
    assert found["vllm:kv_cache_usage_perc"][()] == 0
    assert found["vllm:request_prompt_tokens_sum"][()] == 8
    assert found["vllm:request_generation_tokens_sum"][()] == 40
    assert found["vllm:e2e_request_latency_seconds_count"][()] == 3
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"vllm:{name}_seconds_count"][()] == 3
    assert found["vllm:request_time_per_output_token_seconds_count"][()] == 3
    # Nine for each request, whole or streamed, and one more where a second completion began a step later.
    assert found["vllm:inter_token_latency_seconds_count"][()] == 28
    assert found["vllm:prefix_cache_queries_total"][()] == 8
    parts = sum(found[f"vllm:request_{part}_time_seconds_sum"][()] for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= found["vllm:e2e_request_latency_seconds_sum"][()]
    assert found["process_resident_memory_bytes"][()] > 2**20
    assert found["keepmask:support_size_count"][()] == 40
    assert found["keepmask:support_size_sum"][()] == 30 * 3 + 10 * 512
    assert found["keepmask:support_size_bucket"][("le=2.0",)] == 0
    assert found["keepmask:support_size_bucket"][("le=3.0",)] == 30
    assert found["keepmask:support_size_bucket"][("le=512.0",)] == 40
    assert found["keepmask:mask_bytes_total"][()] == 4 * (30 * 3 + 40)
    assert found["keepmask:whole_vocabulary_rows_total"][()] == 10
    assert found["keepmask:request_failures_total"][()] == 0


def test_nothing_a_client_sends_becomes_a_label(serving: Serving):
    before = set(families(serving))
    labels = {name: set(values) for name, values in families(serving).items()}
    for number in range(5):
        serving.generate([1, 2], params={"max_tokens": 2}, request_id=f"name-{number}", cache_salt=f"salt-{number}")
        serving.client.get(f"/path-{number}")
        serving.generate([1, 2], model=f"model-{number}")
    after = {name: set(values) for name, values in families(serving).items()}
    assert set(after) == before
    assert after == labels


def test_requests_are_told_of_by_name_in_the_log_at_debug(serving: Serving, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="keepmask.server.service"):
        serving.client.post(
            "/inference/v1/generate",
            json={"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": True}},
            headers={"X-Request-Id": "mine-1"},
        )
        serving.settle()
    (record,) = [record for record in caplog.records if "mine-1" in record.getMessage()]
    assert "prompt of 3 tokens; 2 tokens (length) after " in record.getMessage()
