"""Prompt files."""

import json

import pytest

from keepmask.commands.prompt_file import read_prompts
from keepmask.errors import RequestError


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_every_kind_of_line_becomes_a_prompt(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        json.dumps("plain"),
        "",
        {"prompt": "text", "answer": 4},
        {"messages": chat, "id": "chat"},
        {"prompt_token_ids": [1, 2]},
    )
    prompts = read_prompts(path)
    assert [(each.request_id, each.kind, each.value) for each in prompts] == [
        ("1", "prompt", "plain"),
        ("3", "prompt", "text"),
        ("chat", "messages", chat),
        ("5", "prompt_token_ids", [1, 2]),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: is not JSON"),
        ({"text": "x"}, "line 2: must be a string, or an object with one of prompt, messages, prompt_token_ids"),
        ({"prompt": "x", "messages": []}, "line 2: must be a string, or an object with one of"),
        ({"prompt": 3}, "line 2: prompt must be text"),
        ({"prompt_token_ids": "abc"}, "line 2: prompt_token_ids must be a list"),
        ({"prompt": "x", "id": "1"}, "line 2: id '1' is also that of line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    with pytest.raises(RequestError, match=says):
        read_prompts(write(tmp_path, json.dumps("fine"), line))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(RequestError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""))
