"""One row of a prompt file."""

import pytest

from keepmask.commands.prompt_row import parse_row
from keepmask.errors import RequestError

CHAT = [{"role": "user", "content": "hi"}]


def test_the_plain_forms():
    assert (parse_row(7, "text").request_id, parse_row(7, "text").value) == ("7", "text")
    row = parse_row(1, {"prompt": "text", "answer": 4, "id": 12})
    assert (row.request_id, row.kind, row.value, row.extra) == ("12", "prompt", "text", {"answer": 4})
    assert parse_row(1, {"messages": CHAT, "id": "chat"}).kind == "messages"
    assert parse_row(1, {"prompt": CHAT}).kind == "messages"  # verl
    assert parse_row(1, {"prompt_token_ids": [1, 2]}).value == [1, 2]


def test_null_is_absent():
    row = parse_row(3, {"id": None, "prompt": "x", "messages": None, "answer": None})
    assert (row.request_id, row.kind, row.extra) == ("3", "prompt", {})
    chat = [{"role": "assistant", "content": None, "tool_calls": [], "name": None}]
    assert parse_row(1, {"messages": chat}).value == [{"role": "assistant", "content": None, "tool_calls": []}]


def test_sharegpt_ends_at_its_last_question():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "human", "value": "q2"},
        {"from": "gpt", "value": "a2"},
    ]
    row = parse_row(1, {"conversations": turns, "id": "x"})
    assert [turn["role"] for turn in row.value] == ["system", "user", "assistant", "user"]
    assert row.value[-1]["content"] == "q2"
    assert row.extra == {"reference": "a2"}


def test_a_batch_request_brings_its_own_parameters():
    body = {
        "model": "gpt-4o", "messages": CHAT, "temperature": 0.2, "max_completion_tokens": 9, "stop": "x", "seed": 5,
        "logprobs": True, "stream": False, "top_p": None,
    }  # fmt: skip
    row = parse_row(2, {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert (row.request_id, row.kind, row.value) == ("r-1", "messages", CHAT)
    assert row.params == {"temperature": 0.2, "max_tokens": 9, "stop": "x", "seed": 5}
    assert row.extra == {"model": "gpt-4o"}
    text = parse_row(2, {"custom_id": "r-2", "url": "/v1/completions", "body": {"prompt": "x"}})
    assert (text.kind, text.value, text.params) == ("prompt", "x", {})
    assert parse_row(1, {"body": "of a mail", "prompt": "x"}).extra == {"body": "of a mail"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (3, "must be text, or an object"),
        ({"text": "x", "answer": None}, "has text; must have exactly one of prompt, messages"),
        ({}, "has nothing; must have"),
        ({"prompt": "x", "messages": CHAT}, "has prompt and messages; must have exactly one"),
        ({"prompt": 3}, "prompt: must be text or a conversation, got int"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids: must be a list of integers"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids: must be a list of integers"),
        ({"messages": []}, "messages: must be a list of objects with role"),
        ({"messages": ["hi"]}, "messages: must be a list of objects with role"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools: are not rendered"),
        ({"prompt": "x", "id": [1]}, "id: must be text or an integer, got list"),
        ({"prompt": "x", "id": True}, "id: must be text or an integer, got bool"),
        ({"prompt": "\ud83d"}, "half of a surrogate pair"),
        ({"conversations": "x"}, "conversations: must be a list, got str"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "conversations: each turn has value"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "messages: must be a list of objects"),
        ({"custom_id": "1", "body": {"messages": CHAT, "tools": []}}, "body.tools: unknown sampling parameter"),
        ({"custom_id": "1", "body": {"messages": CHAT, "top_p": 2}}, r"body.top_p=2: must be a number in \(0, 1\]"),
        ({"custom_id": "1", "body": {"messages": CHAT, "stream": True}}, "body.stream: unknown"),
        ({"custom_id": "1", "body": {}}, "body: must have exactly one of prompt, messages"),
        ({"custom_id": "1", "body": "x"}, "body: must be an object, got str"),
        ({"custom_id": "1", "url": "/v1/embeddings", "body": {}}, "POST /v1/embeddings: a request is"),
    ],
)
def test_any_other_row_says_what_it_must_be(row, says):
    with pytest.raises(RequestError, match=says):
        parse_row(1, row)
