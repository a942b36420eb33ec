"""/inference/v1/generate and abort_requests: what comes back, and that it is what the engine alone would have made."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow.ipc
import pytest
from serving import Serving, until

from keepmask import LLM, SamplingMask
from keepmask.wire import mask_from_fields
from keepmask.wire.rollouts import from_table

PROMPT = [5, 6, 7, 8]
PARAMS: dict[str, Any] = {
    "max_tokens": 15,
    "top_k": 6,
    "temperature": 0.9,
    "logprobs": 2,
    "seed": 11,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def alone(shared: Serving) -> LLM:
    """The same engine configuration without a server."""
    return LLM(**shared.engine.config.model_dump())


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The chunks of one choice put together."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    whole: dict[str, Any] = {"token_ids": [], "sampling_mask": [], "content": [], "text": ""}
    for chunk in chunks:
        assert len(chunk["token_ids"]) == len(chunk["sampling_mask"]) == len(chunk["logprobs"]["content"])
        whole["token_ids"] += chunk["token_ids"]
        whole["sampling_mask"] += chunk["sampling_mask"]
        whole["content"] += chunk["logprobs"]["content"]
        whole["text"] += chunk.get("text", "")
    return whole | {
        "finish_reason": chunks[-1]["finish_reason"],
        "weight_versions": chunks[-1].get("weight_versions"),
        "sizes": [len(chunk["token_ids"]) for chunk in chunks],
    }


def test_answer_is_what_the_engine_alone_draws(serving: Serving, alone: LLM):
    from keepmask import SamplingParams

    (expected,) = alone.generate({"prompt_token_ids": PROMPT}, SamplingParams(**PARAMS, n=3), use_tqdm=False)
    answer = serving.generate(PROMPT, params={**PARAMS, "n": 3}).json()
    assert answer["seed"] == 11
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 45
    for choice, output in zip(answer["choices"], expected.outputs, strict=True):
        assert output.sampling_mask is not None
        assert output.logprobs is not None
        assert choice["token_ids"] == output.token_ids
        assert choice["sampling_mask"] == output.sampling_mask.token_ids
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"start": 0, "end": 15, "version": "default"}]
        for entry, token_id, logprobs in zip(
            choice["logprobs"]["content"], output.token_ids, output.logprobs, strict=True
        ):
            assert entry["token"] == f"token_id:{token_id}"
            assert entry["token_id"] == token_id
            assert entry["logprob"] == logprobs[token_id].logprob
            assert {top["token_id"]: top["logprob"] for top in entry["top_logprobs"]} == {
                other: value.logprob for other, value in logprobs.items()
            }
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_chunks_of_a_stream_join_to_the_whole_answer(serving: Serving, interval: int):
    whole = serving.generate(PROMPT, params={**PARAMS, "n": 2}, output_mode="text").json()
    events = serving.stream(
        PROMPT,
        params={**PARAMS, "n": 2},
        output_mode="text",
        stream_interval=interval,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    for choice in whole["choices"]:
        parts = joined(events, choice["index"])
        for name in ("token_ids", "sampling_mask", "finish_reason", "weight_versions", "text"):
            assert parts[name] == choice[name], name
        assert parts["content"] == choice["logprobs"]["content"]
        assert parts["sizes"][0] >= 1
        assert all(size >= interval for size in parts["sizes"][1:-1])
    assert events[0]["prompt_token_ids"] == PROMPT
    assert events[0]["seed"] == 11
    assert [event for event in events if "prompt_token_ids" in event] == events[:1]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]


def test_usage_can_come_with_every_chunk(serving: Serving):
    events = serving.stream(PROMPT, params=PARAMS, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 15


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_base64_masks_hold_the_rows_of_the_nested_ones(serving: Serving, with_logprobs: bool):
    params = {**PARAMS, "return_sampling_mask_logprobs": with_logprobs}
    nested = serving.generate(PROMPT, params=params).json()["choices"][0]
    packed = serving.generate(PROMPT, params=params, sampling_mask_format="base64").json()["choices"][0]
    assert isinstance(packed["sampling_mask"], dict)
    assert ("sampling_mask_logprobs" in nested) == with_logprobs
    assert mask_from_fields(packed) == mask_from_fields(nested)
    events = serving.stream(PROMPT, params=params, sampling_mask_format="base64")
    chunks = [mask_from_fields(event["choices"][0]) for event in events]
    assert SamplingMask.concat(chunks) == mask_from_fields(nested)


def test_mask_logprobs_are_a_distribution_over_each_row(serving: Serving):
    params = {**PARAMS, "return_sampling_mask_logprobs": True}
    choice = serving.generate(PROMPT, params=params).json()["choices"][0]
    for row, values, token_id, entry in zip(
        choice["sampling_mask"],
        choice["sampling_mask_logprobs"],
        choice["token_ids"],
        choice["logprobs"]["content"],
        strict=True,
    ):
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-5)
        assert values[row.index(token_id)] == pytest.approx(entry["logprob"], abs=1e-5)


def test_arrow_answer_is_the_table_of_the_rollouts(serving: Serving):
    params = {**PARAMS, "n": 2}
    nested = serving.generate(PROMPT, params=params).json()
    response = serving.client.post(
        "/inference/v1/generate",
        json={"token_ids": PROMPT, "sampling_params": params, "request_id": "mine"},
        headers={"accept": "application/vnd.apache.arrow.stream"},
    )
    assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    with pyarrow.ipc.open_stream(response.content) as reader:
        rollouts = list(from_table(reader.read_all()))
    assert [rollout.completion_index for rollout in rollouts] == [0, 1]
    for rollout, choice in zip(rollouts, nested["choices"], strict=True):
        assert rollout.request_id == "mine"
        assert rollout.prompt_token_ids.tolist() == PROMPT
        assert rollout.token_ids.tolist() == choice["token_ids"]
        assert rollout.sampling_mask == mask_from_fields(choice)
        assert rollout.seed == 11
        assert rollout.logprobs is not None
        assert rollout.logprobs.tolist() == [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_arrow_streams_are_refused(serving: Serving):
    response = serving.client.post(
        "/inference/v1/generate",
        json={"token_ids": PROMPT, "sampling_params": {}, "stream": True},
        headers={"accept": "application/vnd.apache.arrow.stream"},
    )
    assert response.status_code == 406
    assert response.json()["error"]["param"] == "stream"


def test_requests_without_a_mask_carry_none(serving: Serving):
    choice = serving.generate(PROMPT, params={**PARAMS, "return_sampling_mask": False}).json()["choices"][0]
    assert choice["sampling_mask"] is None
    assert len(choice["token_ids"]) == 15


def test_text_mode_tells_text_and_names_tokens_by_it(serving: Serving):
    choice = serving.generate(PROMPT, params=PARAMS, output_mode="text").json()["choices"][0]
    assert serving.engine.tokenizer is not None
    assert choice["text"] == serving.engine.tokenizer.decode(choice["token_ids"])
    for entry, token_id in zip(choice["logprobs"]["content"], choice["token_ids"], strict=True):
        assert entry["token"] == serving.engine.tokenizer.decode([token_id])
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 2
    assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode(errors="replace") == (
        serving.engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
    )


def test_stop_token_has_its_row_and_is_named(serving: Serving):
    free = serving.generate(PROMPT, params=PARAMS).json()["choices"][0]
    stop = free["token_ids"][6]
    first = free["token_ids"].index(stop)
    choice = serving.generate(PROMPT, params={**PARAMS, "stop_token_ids": [stop]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["token_ids"] == free["token_ids"][: first + 1]
    assert choice["sampling_mask"] == free["sampling_mask"][: first + 1]


def test_stop_string_ends_the_text_of_a_stream(serving: Serving):
    free = serving.generate(PROMPT, params=PARAMS, output_mode="text").json()["choices"][0]
    stop = free["text"][20:24]
    params = {**PARAMS, "stop": [stop]}
    whole = serving.generate(PROMPT, params=params, output_mode="text").json()["choices"][0]
    parts = joined(serving.stream(PROMPT, params=params, output_mode="text"))
    assert whole["stop_reason"] == stop
    assert whole["text"] == free["text"][: free["text"].index(stop)]
    assert parts["text"] == whole["text"]
    assert parts["token_ids"] == whole["token_ids"]


def test_prompt_logprobs_have_one_entry_a_prompt_token(serving: Serving):
    answer = serving.generate(PROMPT, params={**PARAMS, "prompt_logprobs": 1}).json()
    assert answer["prompt_logprobs"][0] is None
    for token_id, entry in zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True):
        assert entry[str(token_id)]["logprob"] < 0
        assert entry[str(token_id)]["rank"] >= 1


def test_without_max_tokens_the_context_is_filled(serving: Serving):
    answer = serving.generate(PROMPT, params={"top_k": 2, "ignore_eos": True, "seed": 1}).json()
    assert answer["usage"]["total_tokens"] == serving.engine.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_more_logprobs_than_the_support_holds_are_as_many_as_it_holds(serving: Serving):
    answer = serving.generate(PROMPT, params={**PARAMS, "top_k": 3, "logprobs": 20}).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3


def test_greedy_rows_are_singletons_and_open_rows_are_empty(serving: Serving):
    greedy = serving.generate(PROMPT, params={"temperature": 0, "max_tokens": 4, "ignore_eos": True}).json()
    choice = greedy["choices"][0]
    assert choice["sampling_mask"] == [[token_id] for token_id in choice["token_ids"]]
    whole = serving.generate(PROMPT, params={"max_tokens": 4, "ignore_eos": True}).json()["choices"][0]
    assert whole["sampling_mask"] == [[], [], [], []]


def test_aborted_request_is_answered_with_what_it_has(serving: Serving):
    answers = []
    params = {**PARAMS, "max_tokens": 400}

    def ask() -> None:
        answers.append(serving.generate(PROMPT, params=params, request_id="long one").json())

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: serving.service.tickets(["long one"]))
    response = serving.client.post("/inference/v1/abort_requests", json={"request_ids": ["long one", "other"]})
    thread.join()
    assert response.json() == {"status": "aborted", "aborted": 1}
    (choice,) = answers[0]["choices"]
    assert choice["finish_reason"] == "abort"
    num_tokens = len(choice["token_ids"])
    assert num_tokens < 400
    assert len(choice["sampling_mask"]) == len(choice["logprobs"]["content"]) == num_tokens
    free = serving.generate(PROMPT, params={**params, "max_tokens": max(1, num_tokens)}).json()["choices"][0]
    assert free["token_ids"][:num_tokens] == choice["token_ids"]


def test_two_requests_may_have_the_same_name(serving: Serving):
    first = serving.generate(PROMPT, params=PARAMS, request_id="same").json()
    threads = [
        threading.Thread(target=lambda: serving.generate(PROMPT, params=PARAMS, request_id="same")) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    second = serving.generate(PROMPT, params=PARAMS, request_id="same").json()
    for thread in threads:
        thread.join()
    assert first["request_id"] == second["request_id"] == "same"
    for name in ("token_ids", "sampling_mask"):
        assert first["choices"][0][name] == second["choices"][0][name]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"token_ids": PROMPT, "sampling_params": {"topp": 0.9}}, "topp", "unknown field; known are allowed_token_ids"),
        ({"token_ids": PROMPT, "sampling_params": {}, "tpken_ids": 1}, "tpken_ids", "unknown field"),
        (
            {"token_ids": PROMPT, "sampling_params": {}, "stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "unknown field",
        ),
        ({"token_ids": PROMPT, "sampling_params": {}, "stream_interval": 2}, "stream_interval", "belongs to stream"),
        ({"token_ids": PROMPT}, "sampling_params", "must be given"),
        ({"sampling_params": {}}, "token_ids", "must be given"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids", "at least 1"),
        ({"token_ids": [1, 512], "sampling_params": {}}, "token_ids", "[0, 512)"),
        ({"token_ids": [1, -1], "sampling_params": {}}, "token_ids[1]", "greater than or equal to 0"),
        ({"token_ids": [1, 2.5], "sampling_params": {}}, "token_ids[1]", "integer"),
        ({"token_ids": [1, True], "sampling_params": {}}, "token_ids[1]", "integer"),
        ({"token_ids": "12", "sampling_params": {}}, "token_ids", "list"),
        ({"token_ids": PROMPT, "sampling_params": {"logit_bias": {"512": 1.0}}}, "logit_bias", "[0, 512)"),
        ({"token_ids": PROMPT, "sampling_params": {"allowed_token_ids": [512]}}, "allowed_token_ids", "[0, 512)"),
        ({"token_ids": PROMPT, "sampling_params": {"stop_token_ids": [512]}}, "stop_token_ids", "[0, 512)"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature", "[0, "),
        ({"token_ids": [1] * 512, "sampling_params": {}}, "token_ids", "context length is 512 tokens"),
        ({"token_ids": [1] * 507, "sampling_params": {"min_tokens": 10}}, "min_tokens", "5"),
        ({"token_ids": PROMPT, "sampling_params": {"logprobs": 21}}, "logprobs", "at most 20"),
        (
            {"token_ids": PROMPT, "sampling_params": {"detokenize": False}, "output_mode": "text"},
            "output_mode",
            "needs",
        ),
        (
            {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "prompt_logprobs",
            "stream=false",
        ),
        ({"token_ids": PROMPT, "sampling_params": {}, "priority": 1}, "priority", "0"),
        ({"token_ids": PROMPT, "sampling_params": {}, "features": {}}, "features", "does not take"),
        ({"token_ids": PROMPT, "sampling_params": {}, "request_id": "a\nb"}, "request_id", "pattern"),
        ({"token_ids": PROMPT, "sampling_params": {}, "cache_salt": ""}, "cache_salt", "at least 1"),
    ],
)
def test_refusals_name_the_field_and_leave_the_engine_alone(
    serving: Serving, body: dict[str, Any], param: str, says: str
):
    response = serving.client.post("/inference/v1/generate", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "BadRequestError"
    assert error["code"] == ("context_length_exceeded" if "context length" in error["message"] else 400)
    assert serving.engine.num_unfinished == 0
    assert serving.client.get("/health").status_code == 200


def test_unknown_model_is_404(serving: Serving):
    response = serving.generate(PROMPT, model="another")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    assert serving.generate(PROMPT, model=serving.service.model_name, params=PARAMS).status_code == 200


def test_cache_salt_keeps_prefixes_apart(serving: Serving):
    prompt = list(range(100, 164))
    params = {"max_tokens": 1, "seed": 1}

    def cached(**body: Any) -> int:
        answer = serving.generate(prompt, params=params, **body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") == 48
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() == 48


@pytest.mark.parametrize(
    "sent",
    [
        {"return_token_ids": True},  # prime-rl
        {"routed_experts_prompt_start": 4},  # renderers, from the second turn on
        {"output_kind": 2, "spaces_between_special_tokens": True, "skip_clone": True, "flat_logprobs": False},  # SkyRL
        {"structured_outputs": None, "extra_args": None, "logprob_token_ids": None, "repetition_detection": None},
        {"min_p": None, "stop": None, "presence_penalty": None},
    ],
)
def test_sampling_fields_of_vllms_that_change_nothing_are_taken(serving: Serving, sent: dict[str, Any]):
    plain = serving.generate(PROMPT, params={**PARAMS, "seed": 4}).json()["choices"][0]["token_ids"]
    answer = serving.generate(PROMPT, params={**PARAMS, **sent, "seed": 4})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == plain


@pytest.mark.parametrize(
    "sent",
    [
        {"extra_args": {"a": 1}},
        {"skip_reading_prefix_cache": True},
        {"prompt_logprob_start": 2},
        {"watermarking": True},
        {"routed_experts_prompt_start": -1},
    ],
)
def test_sampling_fields_of_vllms_that_would_change_something_are_refused_by_name(
    serving: Serving, sent: dict[str, Any]
):
    error = serving.generate(PROMPT, params={**PARAMS, **sent}).json()["error"]
    assert error["param"].partition(".")[0] == next(iter(sent)), error


def test_answers_have_every_field_of_vllms(serving: Serving):
    answer = serving.generate(PROMPT, params=PARAMS).json()
    recorded = {"request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs", "output_mode"}
    recorded |= {
        "prompt_token_ids",
        "mm_placeholders",
        "metrics",
        "kv_transfer_params",
        "ec_transfer_params",
        "choices",
    }
    assert recorded <= answer.keys()
    (choice,) = answer["choices"]
    assert {"index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask"} <= choice.keys()
    assert {"weight_versions", "logprobs"} <= choice.keys()
    entry = choice["logprobs"]["content"][0]
    assert {"token_id", "logprob", "rank", "top_logprobs"} <= entry.keys()
    assert {"token_id", "logprob", "rank"} <= entry["top_logprobs"][0].keys()
