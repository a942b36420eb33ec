"""/generate as SGLang's clients use it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Serving, events, until

from keepmask.wire import mask_from_fields
from keepmask.wire.peers import from_ids_offsets, from_sglang, rollouts_from_sglang

PROMPT = [5, 6, 7, 8]
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 10,
    "temperature": 0.9,
    "top_k": 6,
    "sampling_seed": 11,
    "ignore_eos": True,
}
OURS: dict[str, Any] = {"max_tokens": 10, "temperature": 0.9, "top_k": 6, "seed": 11, "ignore_eos": True, "logprobs": 2}


def ask(serving: Serving, **body: Any) -> Any:
    answer = serving.client.post("/generate", json={"input_ids": PROMPT, "sampling_params": SAMPLING, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(serving: Serving, **body: Any) -> dict[str, Any]:
    answer = serving.client.post("/generate", json={"input_ids": PROMPT, "sampling_params": SAMPLING, **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.fixture
def truth(serving: Serving) -> dict[str, Any]:
    """The same request on our own route."""
    params = {**OURS, "return_sampling_mask_logprobs": True}
    choice: dict[str, Any] = serving.generate(PROMPT, params=params, output_mode="text").json()["choices"][0]
    return choice


def test_answer_has_sglangs_shape_and_our_draws(serving: Serving, truth: dict[str, Any]):
    answer = ask(serving, rid="mine", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert answer["output_ids"] == truth["token_ids"]
    assert answer["text"] == truth["text"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 10}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 10)
    assert meta["weight_version"] == "default"
    assert [item[1] for item in meta["output_token_logprobs"]] == truth["token_ids"]
    content = truth["logprobs"]["content"]
    assert [item[0] for item in meta["output_token_logprobs"]] == [entry["logprob"] for entry in content]
    assert [item[2] for item in meta["output_token_logprobs"]] == [entry["token"] for entry in content]
    for items, entry in zip(meta["output_top_logprobs"], content, strict=True):
        assert [item[0] for item in items] == [top["logprob"] for top in entry["top_logprobs"]]
    assert "output_token_sampling_mask" not in meta


def test_mask_with_the_logprobs_of_drawn_tokens_is_what_our_reader_expects(serving: Serving, truth: dict[str, Any]):
    answer = ask(serving, return_sampling_mask=True, sampling_logprobs_mode="selected")
    (rollout,) = rollouts_from_sglang(answer, prompt_token_ids=PROMPT)
    assert rollout.token_ids.tolist() == truth["token_ids"]
    assert rollout.sampling_mask is not None
    assert rollout.sampling_mask.token_ids == truth["sampling_mask"]
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [entry["logprob"] for entry in truth["logprobs"]["content"]]
    assert answer["meta_info"]["output_token_sampling_mask_length"] == 10
    assert [tuple(span) for span in rollout.weight_versions] == [(0, 10, "default")]


def test_mask_with_the_logprobs_of_the_support(serving: Serving, truth: dict[str, Any]):
    answer = ask(serving, return_sampling_mask=True, sampling_logprobs_mode="support")
    mask = from_sglang(answer["meta_info"])
    ours = mask_from_fields(truth)
    assert mask == ours
    for rows in answer["meta_info"]["output_token_sampling_logprobs"]:
        assert np.exp(rows).sum() == pytest.approx(1, abs=1e-5)


def test_slimes_sampling_parameters_are_taken_and_its_ids_returned(serving: Serving, truth: dict[str, Any]):
    sampling = {
        **SAMPLING,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "custom_params": {"return_top_p_token_ids": True},
    }
    meta = ask(serving, sampling_params=sampling, return_logprob=True)["meta_info"]
    arrays = [np.frombuffer(base64.b64decode(meta[name]), "<i4") for name in ("top_p_token_ids", "top_p_token_offsets")]
    mask = from_ids_offsets(*arrays)
    assert mask.token_ids == truth["sampling_mask"]
    assert "output_token_sampling_mask" not in meta


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_stream_is_cumulative(serving: Serving, truth: dict[str, Any], mode: str):
    body = {
        "input_ids": PROMPT,
        "sampling_params": SAMPLING,
        "stream": True,
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": mode,
    }
    with serving.client.stream("POST", "/generate", json=body) as response:
        response.read()
    received = events(response.text)
    sizes = []
    for event in received:
        size = len(event["output_ids"])
        meta = event["meta_info"]
        assert event["output_ids"] == truth["token_ids"][:size]
        assert meta["output_token_sampling_mask"] == truth["sampling_mask"][:size]
        assert len(meta["output_token_sampling_logprobs"]) == len(meta["output_token_logprobs"]) == size
        assert meta["completion_tokens"] == meta["output_token_sampling_mask_length"] == size
        sizes.append(size)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 10
    assert [event["meta_info"]["finish_reason"] for event in received[:-1]] == [None] * (len(received) - 1)
    assert received[-1]["text"] == truth["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_batches_and_n_are_lists(serving: Serving, stream: bool):
    body = {
        "input_ids": [PROMPT, [1, 2]],
        "sampling_params": [{**SAMPLING, "n": 2}, {**SAMPLING, "n": 2, "max_new_tokens": 3}],
        "rid": ["a", "b"],
        "stream": stream,
    }
    response = serving.client.post("/generate", json=body)
    if stream:
        last = {event["index"]: event for event in events(response.text)}
        found = [last[index] for index in range(4)]
    else:
        found = response.json()
    assert [len(one["output_ids"]) for one in found] == [10, 10, 3, 3]
    assert [one["meta_info"]["id"] for one in found] == ["a", "a", "b", "b"]


def test_texts_are_prompts_too(serving: Serving):
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None
    by_ids = ask(serving, input_ids=tokenizer.encode("one two"))
    answer = serving.client.post("/generate", json={"text": "one two", "sampling_params": SAMPLING}).json()
    assert answer["output_ids"] == by_ids["output_ids"]
    both = serving.client.post(
        "/generate", json={"text": ["one two", "x"], "sampling_params": SAMPLING, "rid": "r"}
    ).json()
    assert [one["meta_info"]["id"] for one in both] == ["r_0", "r_1"]


def test_prompt_logprobs_start_where_asked(serving: Serving):
    ours = serving.generate(PROMPT, params={**OURS, "prompt_logprobs": 1}).json()["prompt_logprobs"]
    meta = ask(serving, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    expected = [entry[str(token_id)]["logprob"] for token_id, entry in zip(PROMPT[1:], ours[1:], strict=True)]
    assert [item[0] for item in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-5)
    assert meta["input_top_logprobs"][0] is None
    later = ask(serving, return_logprob=True, logprob_start_len=2)["meta_info"]
    assert [item[1] for item in later["input_token_logprobs"]] == PROMPT[2:]


def test_stop_names_what_matched(serving: Serving, truth: dict[str, Any]):
    stop = truth["token_ids"][4]
    meta = ask(serving, sampling_params={**SAMPLING, "stop_token_ids": [stop]})["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    text = truth["text"][8:11]
    answer = ask(serving, sampling_params={**SAMPLING, "stop": text, "no_stop_trim": True})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}
    assert answer["text"].endswith(text)


def test_abort_by_name_returns_what_there_is(serving: Serving):
    long = {**SAMPLING, "max_new_tokens": 400}
    with serving.slowed():
        asked = serving.in_background(lambda: ask(serving, rid="long", sampling_params=long, return_sampling_mask=True))
        until(lambda: serving.service.tickets(["long"]))
        assert serving.client.post("/abort_request", json={"rid": "long"}).json() == {}
        answer = asked.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == answer["meta_info"]["output_token_sampling_mask_length"] < 400
    everybody = serving.client.post("/abort_request", json={"abort_all": True})
    assert everybody.status_code == 403


def test_without_max_new_tokens_128_are_made(serving: Serving):
    answer = ask(serving, sampling_params={"ignore_eos": True, "top_k": 2})
    assert len(answer["output_ids"]) == 128
    assert "output_token_logprobs" not in answer["meta_info"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {**SAMPLING, "max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {**SAMPLING, "max_new_tokens": 600}}, "max_new_tokens"),
        ({"sampling_params": {**SAMPLING, "min_new_tokens": 11}}, "min_new_tokens"),
        ({"sampling_params": {**SAMPLING, "max_tokens": 5}}, "max_tokens"),
        ({"sampling_params": {**SAMPLING, "regex": "(a"}}, "structured_outputs"),
        ({"sampling_params": {**SAMPLING, "stop_regex": "(a+)+$"}}, "stop_regex"),
        ({"sampling_params": {**SAMPLING, "structural_tag": "{}"}}, "structural_tag"),
        ({"sampling_params": {**SAMPLING, "temperature": "hot"}}, "temperature"),
        ({"sampling_params": {**SAMPLING, "custom_params": {"x": 1}}}, "custom_params.x"),
        ({"sampling_params": [SAMPLING, SAMPLING]}, "sampling_params"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"input_ids": [512]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"custom_logit_processor": "gASV"}, "custom_logit_processor"),
        ({"return_sampling_mask": True, "sampling_params": {**SAMPLING, "top_k": -1}}, "top_k"),
        ({"return_sampling_mask": True, "sampling_params": {**SAMPLING, "top_k": 1 << 30}}, "top_k"),
        ({"sampling_logprobs_mode": "all"}, "sampling_logprobs_mode"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"image_data": "x"}, "image_data"),
        ({"stream": True, "return_logprob": True, "logprob_start_len": 0}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_sglangs_name(serving: Serving, body: dict[str, Any], param: str):
    error = refusal(serving, **body)
    assert (error["param"] or "").partition("[")[0] == param, json.dumps(error)
    assert serving.engine.num_unfinished == 0


def test_texts_have_the_form_that_is_asked_for(serving: Serving):
    for form in ({"regex": "[ab]{4}"}, {"json_schema": '{"enum": ["ab"]}'}, {"ebnf": 'root ::= "a" | "b"'}):
        body = {"text": "x", "sampling_params": {"max_new_tokens": 30, **form}}
        answer = serving.client.post("/generate", json=body).json()
        assert answer["text"] in ('"ab"', "a", "b") or set(answer["text"]) <= {"a", "b"}, form


def test_fields_for_each_prompt_come_as_lists(serving: Serving):
    body: dict[str, Any] = {
        "input_ids": [[5, 6], [7, 8]],
        "sampling_params": [{**SAMPLING, "max_new_tokens": 2}, {**SAMPLING, "max_new_tokens": 3}],
        "return_logprob": [True, False],
        "return_sampling_mask": [False, True],
        "return_prompt_token_ids": True,
    }
    first, second = serving.client.post("/generate", json=body).json()
    assert first["meta_info"]["output_token_logprobs_length"] == len(first["output_ids"]) == 2
    assert first["meta_info"]["input_token_logprobs"] == []
    assert "output_token_sampling_mask" not in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]
    assert second["meta_info"]["output_token_sampling_mask_length"] == 3
    assert [first["prompt_token_ids"], second["prompt_token_ids"]] == body["input_ids"]
    assert first["meta_info"]["cached_tokens_details"] == {"device": 0, "host": 0}


def test_prompt_alone_can_be_scored(serving: Serving):
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = serving.client.post("/generate", json=body).json()
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in scored] == [5, 6, 7]
    assert scored[0][0] is None
    assert all(value < 0 for value, _, _ in scored[1:])


def test_whole_vocabulary_is_listed_only_within_the_budget(checkpoint: Path):
    sampling = {"max_new_tokens": 6, "min_p": 1e-9, "temperature": 9.0, "sampling_seed": 1, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "return_sampling_mask": True}
    with Serving(checkpoint) as serving:
        meta = serving.client.post("/generate", json=body).json()["meta_info"]
        assert [len(row) for row in meta["output_token_sampling_mask"]] == [512] * 6
        assert meta["output_token_sampling_mask"][0] == list(range(512))
    with Serving(checkpoint, engine={"max_mask_bytes_per_request": 6 * 512 * 4 - 4}) as serving:
        meta = serving.client.post("/generate", json=body).json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert "max_mask_bytes_per_request" in meta["finish_reason"]["message"]
        assert "output_token_sampling_mask" not in meta
