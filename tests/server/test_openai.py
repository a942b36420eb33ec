"""/v1/completions and /v1/chat/completions, driven by the openai client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from serving import Serving, events

from keepmask import LLM, RequestOutput, SamplingParams

TEXT = "In the beginning"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]},
]
FLAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are \nyou?"}]
COMMON: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 5}
EXTRA: dict[str, Any] = {"top_k": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def alone(shared: Serving) -> LLM:
    return LLM(**shared.engine.config.model_dump())


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(llm: LLM, prompt: Any, *, chat: bool = False, **params: Any) -> RequestOutput:
    sampling = SamplingParams(**{**COMMON, "top_k": 8, "ignore_eos": True, **params})
    (output,) = llm.chat(prompt, sampling, use_tqdm=False) if chat else llm.generate(prompt, sampling, use_tqdm=False)
    return output


def extra(choice: Any) -> dict[str, Any]:
    assert choice.model_extra is not None
    return dict(choice.model_extra)


def test_completion_is_what_the_engine_alone_draws(client: openai.OpenAI, serving: Serving, alone: LLM):
    answer = client.completions.create(
        model=serving.service.model_name, prompt=TEXT, n=2, logprobs=2, extra_body=EXTRA, **COMMON
    )
    truth = expected(alone, TEXT, n=2, logprobs=2)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(truth.prompt_token_ids)
    assert answer.usage.completion_tokens == 24
    for choice, output in zip(answer.choices, truth.outputs, strict=True):
        assert output.logprobs is not None
        assert output.sampling_mask is not None
        assert choice.logprobs is not None
        assert choice.text == output.text
        assert choice.finish_reason == "length"
        assert extra(choice)["token_ids"] == output.token_ids
        assert extra(choice)["prompt_token_ids"] == truth.prompt_token_ids
        assert extra(choice)["sampling_mask"] == output.sampling_mask.token_ids
        assert extra(choice)["seed"] == 5
        entries = list(zip(output.token_ids, output.logprobs, strict=True))
        assert choice.logprobs.tokens == [entry[token_id].decoded_token for token_id, entry in entries]
        assert choice.logprobs.token_logprobs == [entry[token_id].logprob for token_id, entry in entries]
        for shown, (_, entry) in zip(choice.logprobs.top_logprobs, entries, strict=True):
            assert sorted(shown.values()) == sorted(logprob.logprob for logprob in entry.values())
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0


def test_tokens_within_a_character_keep_their_entries_bytes_and_place(serving: Serving):
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None
    smile = tokenizer.encode("😀", add_special_tokens=False)
    params = {"max_tokens": 5, "allowed_token_ids": smile, "top_k": 4, "seed": 3, "ignore_eos": True}
    asked = {**params, "prompt": "a", "logprobs": 4, "return_token_ids": True}
    (choice,) = serving.client.post("/v1/completions", json=asked).json()["choices"]
    logprobs = choice["logprobs"]
    for entry in logprobs["top_logprobs"]:  # each decodes to the same replacement character
        assert sorted(entry) == sorted(f"token_id:{token_id}" for token_id in smile)
        assert sum(np.exp(value) for value in entry.values()) == pytest.approx(1, abs=1e-4)
    # A token's text begins where the text of those before it ends.
    texts = [tokenizer.decode(choice["token_ids"][:at]) for at in range(6)]
    settled = [len(text.rstrip("\ufffd")) for text in texts]
    assert all(low <= at <= len(text) for low, at, text in zip(settled, logprobs["text_offset"], texts, strict=False))
    chat = {**params, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4}
    (choice,) = serving.client.post("/v1/chat/completions", json=chat).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        own = {(bytes(top["bytes"])) for top in entry["top_logprobs"]}
        assert own == {bytes([byte]) for byte in "😀".encode()}


def test_offsets_count_the_text_and_not_the_names(serving: Serving):
    asked = {**COMMON, "prompt": TEXT, "logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = serving.client.post("/v1/completions", json=asked).json()["choices"]
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None
    assert max(choice["logprobs"]["text_offset"]) < len(choice["text"])
    for at, offset in enumerate(choice["logprobs"]["text_offset"]):
        before = tokenizer.decode(choice["token_ids"][:at], skip_special_tokens=True)
        assert choice["text"][:offset] == before[:offset]
        assert len(before) - offset in range(4)  # bytes of a character that is not whole yet


def test_completion_stream_joins_to_the_whole(client: openai.OpenAI, serving: Serving):
    asked: dict[str, Any] = {"model": serving.service.model_name, "prompt": TEXT, "n": 2, "logprobs": 1, **COMMON}
    whole = client.completions.create(extra_body=EXTRA, **asked)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, extra_body=EXTRA, **asked)
    )
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [value for part in parts for value in getattr(part.logprobs, name)]
            assert values == getattr(choice.logprobs, name)
        for name in ("token_ids", "sampling_mask"):
            assert [item for part in parts for item in extra(part)[name]] == extra(choice)[name]
        assert parts[-1].finish_reason == choice.finish_reason
        assert extra(parts[0])["prompt_token_ids"] == extra(choice)["prompt_token_ids"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_come_in_four_forms_and_choices_in_their_order(serving: Serving, stream: bool):
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None
    texts = ["one two", "three"]
    ids = [tokenizer.encode(text) for text in texts]

    def ask(prompt: Any, n: int = 2) -> list[str]:
        body = {**COMMON, **EXTRA, "prompt": prompt, "n": n, "stream": stream}
        response = serving.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answers = events(response.text) if stream else [response.json()]
        found: dict[int, str] = {}
        for answer in answers:
            for choice in answer["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return [found[index] for index in range(len(found))]

    by_text = ask(texts)
    assert len(by_text) == 4
    assert ask(ids) == by_text
    assert ask(texts[0]) == ask(ids[0]) == by_text[:2]
    assert ask(texts[1]) == by_text[2:]
    assert len(set(by_text)) == 4


def test_chat_is_what_the_engine_alone_draws(client: openai.OpenAI, serving: Serving, alone: LLM):
    answer = client.chat.completions.create(
        model=serving.service.model_name,
        messages=MESSAGES,
        n=2,
        logprobs=True,
        top_logprobs=3,
        extra_body=EXTRA,
        **COMMON,
    )
    truth = expected(alone, FLAT, chat=True, n=2, logprobs=3)
    assert truth.prompt is not None
    assert truth.prompt.endswith("<eos>\n<bos>assistant\n")
    assert extra(answer)["prompt_token_ids"] == truth.prompt_token_ids
    assert answer.object == "chat.completion"
    for choice, output in zip(answer.choices, truth.outputs, strict=True):
        assert output.logprobs is not None
        assert output.sampling_mask is not None
        assert choice.message.role == "assistant"
        assert choice.message.content == output.text
        assert extra(choice)["token_ids"] == output.token_ids
        assert extra(choice)["sampling_mask"] == output.sampling_mask.token_ids
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for shown, token_id, entry in zip(choice.logprobs.content, output.token_ids, output.logprobs, strict=True):
            assert shown.token == entry[token_id].decoded_token
            assert shown.logprob == entry[token_id].logprob
            likely = sorted((each.logprob for each in entry.values()), reverse=True)[:3]
            assert [top.logprob for top in shown.top_logprobs] == likely


def test_chat_stream_joins_to_the_whole(client: openai.OpenAI, serving: Serving):
    asked: dict[str, Any] = {"model": serving.service.model_name, "messages": MESSAGES, "n": 2, **COMMON}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=1, extra_body=EXTRA, **asked)
    chunks = list(
        client.chat.completions.create(
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
            extra_body=EXTRA,
            **asked,
        )
    )
    assert extra(chunks[0])["prompt_token_ids"] == extra(whole)["prompt_token_ids"]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        content = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
        assert choice.logprobs is not None
        assert content == choice.logprobs.content
        assert [item for part in parts for item in extra(part)["sampling_mask"]] == extra(choice)["sampling_mask"]
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_tool_messages_reach_the_template(serving: Serving):
    messages = [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    assert serving.client.post("/v1/chat/completions", json={"messages": messages, **COMMON}).status_code == 200
    tokens = serving.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert serving.engine.tokenizer is not None
    assert "add(2)<eos>\n<bos>tool\n4<eos>" in serving.engine.tokenizer.decode(tokens)
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    answer = serving.client.post("/v1/chat/completions", json={"messages": messages, **COMMON})
    assert answer.status_code == 400
    assert "arguments" in answer.json()["error"]["message"]


def test_final_message_can_be_continued(serving: Serving):
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    answer = serving.client.post("/tokenize", json=body).json()
    assert serving.engine.tokenizer is not None
    assert serving.engine.tokenizer.decode(answer["tokens"]).endswith("One, two,")
    assert serving.client.post("/v1/chat/completions", json={**body, **COMMON}).status_code == 200


def test_sampling_fields_do_what_they_say(serving: Serving):
    def ids(**body: Any) -> list[int]:
        answer = serving.client.post("/v1/completions", json={"prompt": TEXT, **COMMON, **EXTRA, **body})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    plain = ids()
    assert ids() == plain
    assert ids(seed=6) != plain
    assert ids(max_tokens=None, top_k=None)[16:] == []
    assert ids(logit_bias={"77": 100}) == [77] * 12
    assert ids(allowed_token_ids=[50, 51], top_k=0) != plain
    assert set(ids(allowed_token_ids=[50, 51], top_k=0)) <= {50, 51}
    assert ids(temperature=0) == ids(temperature=0, seed=9)
    greedy = ids(temperature=0, max_tokens=40)
    assert len(set(ids(temperature=0, max_tokens=40, repetition_penalty=5.0))) >= len(set(greedy))
    assert ids(top_p=1e-6) == ids(temperature=0)
    assert ids(min_p=1.0) == ids(temperature=0)


def test_stop_strings_and_reasons(client: openai.OpenAI, serving: Serving):
    free = client.completions.create(model=serving.service.model_name, prompt=TEXT, extra_body=EXTRA, **COMMON)
    text = free.choices[0].text
    stop = text[10:13]
    stopped = client.completions.create(
        model=serving.service.model_name, prompt=TEXT, stop=[stop], extra_body=EXTRA, **COMMON
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert extra(stopped.choices[0])["stop_reason"] == stop
    assert stopped.choices[0].text == text[: text.index(stop)]
    parts = client.completions.create(
        model=serving.service.model_name, prompt=TEXT, stop=[stop], stream=True, extra_body=EXTRA, **COMMON
    )
    assert "".join(part.choices[0].text for part in parts) == stopped.choices[0].text


def test_masks_come_only_where_asked(serving: Serving):
    body = {"prompt": TEXT, **COMMON, "return_sampling_mask": False}
    choice = serving.client.post("/v1/completions", json=body).json()["choices"][0]
    assert "sampling_mask" not in choice
    assert choice["token_ids"] is None
    body |= {"return_sampling_mask": True, "return_sampling_mask_logprobs": True, "sampling_mask_format": "base64"}
    choice = serving.client.post("/v1/completions", json=body).json()["choices"][0]
    assert {"ids", "counts", "logprobs"} <= set(choice["sampling_mask"])
    assert len(choice["token_ids"]) == 12


def test_prompt_logprobs_come_with_each_prompt(serving: Serving):
    body = {"prompt": ["ab", "cde"], "prompt_logprobs": 0, **COMMON}
    choices = serving.client.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 3]
    chat = serving.client.post("/v1/chat/completions", json={"messages": FLAT, "prompt_logprobs": 0, **COMMON}).json()
    assert chat["prompt_logprobs"][0] is None
    refused = serving.client.post("/v1/completions", json={**body, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_tokens_can_be_named_by_id(serving: Serving):
    body = {"prompt": TEXT, **COMMON, **EXTRA, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = serving.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    body = {"messages": FLAT, **COMMON, **EXTRA, "logprobs": True, "return_tokens_as_token_ids": True}
    choice = serving.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_chat_without_max_tokens_fills_the_context(serving: Serving):
    answer = serving.client.post(
        "/v1/chat/completions", json={"messages": FLAT, "ignore_eos": True, "top_k": 2, "seed": 1}
    ).json()
    assert answer["usage"]["total_tokens"] == serving.engine.max_model_len


NEUTRAL = {
    "echo": False,
    "best_of": 1,
    "use_beam_search": False,
    "response_format": {"type": "text"},
    "truncate_prompt_tokens": None,
    "spaces_between_special_tokens": True,
    "priority": 0,
    "temperature": None,
    "top_p": None,
    "stop": None,
    "logit_bias": None,
    "presence_penalty": None,
    "seed": None,
    "stream_options": None,
    "length_penalty": 1.0,
    "structured_outputs": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "user": "me",
}
NEUTRAL_CHAT = {
    "tools": None,
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": None,
    "mm_processor_kwargs": None,
    "reasoning_effort": None,
}


def test_values_that_ask_for_nothing_are_taken(serving: Serving):
    for path, own in (
        ("/v1/completions", {"prompt": TEXT, "suffix": None, "logprobs": None, "max_tokens": 3}),
        (
            "/v1/chat/completions",
            {"messages": FLAT, **NEUTRAL_CHAT, "logprobs": False, "max_completion_tokens": 3},
        ),
    ):
        answer = serving.client.post(path, json={**NEUTRAL, **own})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("response_format", {"type": "grammar"}),
        ("truncate_prompt_tokens", 5),
        ("suffix", "x"),
        ("user", "x" * 300),
        ("length_penalty", 0.5),
        ("vllm_xargs", {"a": 1}),
        ("guided_regex", "(a+)+$"),
        ("structured_outputs", {"regex": "(a"}),
        ("prompt_embeds", "AAAA"),
        ("detokenize", False),
        ("top_kk", 3),
        ("n", 0),
        ("n", 2000),
        ("n", 1025),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {str(token_id): 1 for token_id in range(2000)}),
        ("stop", ["x"] * 65),
        ("stop", [""]),
        ("bad_words", ["x"] * 1025),
        ("temperature", "hot"),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(serving: Serving, field: str, value: Any):
    answer = serving.client.post("/v1/completions", json={"prompt": TEXT, field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").partition(".")[0] == field or "members" in error["message"]
    assert serving.engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"enable_thinking": []}),
        ("reasoning_effort", "high"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("top_logprobs", 2),
        ("documents", [{"text": "x"}]),
        ("messages", []),
        ("messages", [{"role": "", "content": "x"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("max_completion_tokens", 5),
        ("continue_final_message", True),
    ],
)
def test_what_a_chat_cannot_honour_is_refused_by_name(serving: Serving, field: str, value: Any):
    answer = serving.client.post("/v1/chat/completions", json={"messages": FLAT, "max_tokens": 3, field: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [["a"]], [1, "a"], [-1], [2**31], None, 3, {"a": 1}, [[1], []]])
def test_prompts_that_are_none(serving: Serving, prompt: Any):
    answer = serving.client.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_ids_outside_the_vocabulary_are_refused_at_the_edge(serving: Serving):
    answer = serving.client.post("/v1/completions", json={"prompt": [[1], [512]]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_fan_out_is_bounded_before_anything_is_tokenized(serving: Serving):
    answer = serving.client.post("/v1/completions", json={"prompt": ["x"] * 513, "n": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    answer = serving.client.post("/v1/completions", json={"prompt": ["x"] * 1025})
    assert answer.status_code == 400


def test_text_that_can_never_fit_is_refused_before_it_is_tokenized(serving: Serving):
    answer = serving.client.post("/v1/completions", json={"prompt": "x" * 1_000_000})
    assert answer.status_code == 400
    assert "do not fit" in answer.json()["error"]["message"]
    answer = serving.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 10**6}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    answer = serving.client.post("/v1/completions", json={"prompt": "x" * 600})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI, serving: Serving):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=serving.service.model_name, prompt=TEXT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.param == "model"


def test_template_of_a_hostile_checkpoint_stays_in_its_sandbox(checkpoint: Path, tmp_path: Path):
    folder = tmp_path / "hostile"
    shutil.copytree(checkpoint, folder)
    template = folder / "chat_template.jinja"
    assert template.exists()
    template.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}")
    with Serving(folder) as serving:
        answer = serving.client.post("/v1/chat/completions", json={"messages": FLAT})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        template.write_text("{% for i in range(100000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}")
    with Serving(folder) as serving:
        answer = serving.client.post("/v1/chat/completions", json={"messages": FLAT})
        assert answer.status_code == 400
        assert "do not fit" in answer.json()["error"]["message"]


def test_server_without_a_tokenizer_says_so(checkpoint: Path):
    with Serving(checkpoint, engine={"skip_tokenizer_init": True}) as serving:
        for path, body in (
            ("/v1/completions", {"prompt": TEXT}),
            ("/v1/chat/completions", {"messages": FLAT}),
            ("/tokenize", {"prompt": TEXT}),
            ("/detokenize", {"tokens": [1]}),
        ):
            answer = serving.client.post(path, json=body)
            assert answer.status_code == 404
            assert "without a tokenizer" in answer.json()["error"]["message"]
        assert serving.generate([1, 2], params={"max_tokens": 2}).status_code == 200


def test_stream_events_are_compact_json(serving: Serving):
    body = {"prompt": TEXT, **COMMON, "stream": True}
    with serving.client.stream("POST", "/v1/completions", json=body) as response:
        response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
    first = response.text.split("\n\n")[0].removeprefix("data: ")
    assert first == json.dumps(json.loads(first), separators=(",", ":"), ensure_ascii=False)


def test_answers_have_the_form_that_is_asked_for(client: openai.OpenAI, serving: Serving):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        {"type": "text"},
    ]
    common = {**COMMON, "max_tokens": 60}
    for form in formats:
        answer = client.chat.completions.create(
            model=serving.service.model_name, messages=MESSAGES, response_format=form, logprobs=True, **common
        )
        if form["type"] == "json_schema":
            assert json.loads(answer.choices[0].message.content or "")["a"] in (1, 22)
            assert answer.choices[0].finish_reason == "stop"
    answer = client.completions.create(
        model=serving.service.model_name,
        prompt=[TEXT, TEXT],
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        **COMMON,
    )
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema belongs to type='json_schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "'not' cannot be enforced",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs:"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format: structured_outputs says the form too",
        ),
    ],
)
def test_forms_that_cannot_be_are_refused(client: openai.OpenAI, serving: Serving, body: Any, message: str):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model=serving.service.model_name, prompt=TEXT, extra_body=body, **COMMON)


def test_echo_scores_the_prompt_as_lm_eval_asks_for_it(serving: Serving):
    assert serving.engine.tokenizer is not None
    ids = [5, 6, 7, 8]
    body = {"prompt": ids, "echo": True, "logprobs": 2, "temperature": 0}
    plain = serving.client.post("/v1/completions", json={"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}).json()
    truth = plain["choices"][0]["prompt_logprobs"]
    for max_tokens in (0, 1):
        choice = serving.client.post("/v1/completions", json={**body, "max_tokens": max_tokens}).json()["choices"][0]
        shown = choice["logprobs"]
        assert {len(column) for column in shown.values()} == {4 + max_tokens}
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        assert shown["token_logprobs"][1:4] == [truth[at][str(ids[at])]["logprob"] for at in (1, 2, 3)]
        assert choice["text"] == "".join(shown["tokens"])
        assert choice["text"].startswith(serving.engine.tokenizer.decode(ids))
        assert shown["text_offset"] == [sum(map(len, shown["tokens"][:at])) for at in range(4 + max_tokens)]
    assert serving.client.post("/v1/completions", json={"prompt": ids, "max_tokens": 0}).status_code == 400


def test_three_hundred_prompts_in_one_request(serving: Serving):
    body = {"prompt": [[5 + at % 7, 6] for at in range(300)], "max_tokens": 1, "temperature": 0}
    answer = serving.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(300))


def test_conversations_as_openais_client_dumps_them(client: openai.OpenAI, serving: Serving):
    first = client.chat.completions.create(model=serving.service.model_name, messages=FLAT, **COMMON)
    dumped = first.choices[0].message.model_dump()
    assert {"refusal", "audio", "function_call", "annotations", "tool_calls"} <= dumped.keys()
    dumped |= {"reasoning_content": None, "annotations": []}
    again = {"messages": [*FLAT, dumped, FLAT[1]], "metadata": None, "store": None, "service_tier": None, **COMMON}
    plain = {"messages": [*FLAT, {"role": "assistant", "content": dumped["content"]}, FLAT[1]], **COMMON}
    answers = [serving.client.post("/v1/chat/completions", json=body).json() for body in (again, plain)]
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]


def test_overlong_requests_carry_the_code_and_the_words_that_clients_look_for(serving: Serving):
    long = [{"role": "user", "content": "a" * 600}]
    for body, param in (
        ({"messages": long}, "messages"),
        ({"messages": FLAT, "max_completion_tokens": 600}, "max_completion_tokens"),
        ({"messages": FLAT, "max_tokens": 600}, "max_tokens"),
    ):
        error = serving.client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512 tokens" in error["message"]


def test_name_of_a_request_may_come_in_its_header(serving: Serving):
    body = {"prompt": TEXT, **COMMON}
    answer = serving.client.post("/v1/completions", json=body, headers={"x-request-id": "from-proxy"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "from-proxy"
    answer = serving.client.post("/v1/completions", json={**body, "request_id": "own"}, headers={"x-request-id": "p"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "own"
