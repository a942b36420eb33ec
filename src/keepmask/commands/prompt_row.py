"""`parse_row`: one row of a prompt file, in any of the forms that data sets have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keepmask.errors import RequestError
from keepmask.params import SamplingParams

__all__ = ["PromptRow", "parse_row"]

Kind = Literal["prompt", "messages", "prompt_token_ids"]

_KINDS = ("prompt", "messages", "prompt_token_ids", "conversations", "body")
_IDS = ("id", "custom_id")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_BATCH_URLS = ("/v1/chat/completions", "/v1/completions")
_NEUTRAL = {"stream": False, "store": False, "echo": False, "best_of": 1, "top_logprobs": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt, and the request id of its rollouts."""

    number: int
    """Of its line or row, from 1."""
    request_id: str
    kind: Kind
    value: Any
    """Text, a conversation, or token ids, by `kind`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of its own."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, for the rollout file."""


def parse_row(number: int, row: Any) -> PromptRow:
    """The prompt of a row: text, or an object with exactly one of

    - `prompt`: text, or a conversation (verl)
    - `messages`: a conversation, a list of `{role, content}`
    - `prompt_token_ids`
    - `conversations`: a conversation of `{from, value}` (ShareGPT); what follows its last question is `reference`
    - `body`, beside `custom_id`: a request of an OpenAI batch, whose sampling parameters are the row's own; its `model`
      is carried, not loaded

    `id` or `custom_id` names the request, by default the row's number; all else is carried. Null is absent. Raises
    RequestError saying what is wrong.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise RequestError("must be text, or an object with one of " + ", ".join(_KINDS))
    _check_text(row)
    given = {name: value for name, value in row.items() if value is not None}
    kinds = [kind for kind in _KINDS if kind in given and (kind != "body" or "custom_id" in given)]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else f"has {', '.join(sorted(given)) or 'nothing'}"
        raise RequestError(f"{found[:120]}; must have exactly one of {', '.join(_KINDS)}")
    (kind,) = kinds
    extra = {name: value for name, value in given.items() if name not in (kind, *_IDS)}
    params: dict[str, Any] = {}
    value = given[kind]
    if kind == "body":
        kind, value, params = _batch_request(value, extra)
    elif kind == "conversations":
        kind, value = "messages", _sharegpt(value, extra)
    if kind == "prompt" and isinstance(value, list):
        kind = "messages"
    _check_value(kind, value, extra)
    if kind == "messages":
        value = [{name: item for name, item in turn.items() if item is not None or name == "content"} for turn in value]
    request_id = _request_id(given, number)
    return PromptRow(number=number, request_id=request_id, kind=kind, value=value, params=params, extra=extra)  # type: ignore[arg-type]


def _check_text(row: dict[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("holds half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None


def _request_id(given: Mapping[str, Any], number: int) -> str:
    value = next((given[name] for name in _IDS if name in given), number)
    if type(value) not in (str, int):
        raise RequestError(f"id: must be text or an integer, got {type(value).__name__}")
    return str(value)


def _check_value(kind: str, value: Any, extra: Mapping[str, Any]) -> None:
    if kind == "prompt" and not isinstance(value, str):
        raise RequestError(f"prompt: must be text or a conversation, got {type(value).__name__}")
    if kind == "prompt_token_ids" and not (isinstance(value, list) and all(type(each) is int for each in value)):
        raise RequestError("prompt_token_ids: must be a list of integers")
    if kind != "messages":
        return
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) and "role" in turn for turn in value):
        raise RequestError("messages: must be a list of objects with role and content, at least one")
    if extra.get("tools"):
        raise RequestError("tools: are not rendered into prompts here; give the rendered prompt or prompt_token_ids")


def _sharegpt(turns: Any, extra: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns up to the last that is no answer; the answer after it becomes `reference`."""
    if not isinstance(turns, list):
        raise RequestError(f"conversations: must be a list, got {type(turns).__name__}")
    messages = []
    for turn in turns:
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if speaker not in _SHAREGPT_ROLES or not isinstance(text, str):
            raise RequestError(f"conversations: each turn has value (text) and from: {', '.join(_SHAREGPT_ROLES)}")
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": text})
    reference = []
    while messages and messages[-1]["role"] == "assistant":
        reference.append(messages.pop()["content"])
    if reference:
        extra.setdefault("reference", "\n".join(reversed(reference)))
    return messages


def _batch_request(body: Any, extra: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Kind, value and sampling parameters of a request of an OpenAI batch."""
    url, method = extra.pop("url", _BATCH_URLS[0]), extra.pop("method", "POST")
    if url not in _BATCH_URLS or method != "POST":
        raise RequestError(f"{method} {url}: a request is a POST to {' or '.join(_BATCH_URLS)}")
    if not isinstance(body, dict):
        raise RequestError(f"body: must be an object, got {type(body).__name__}")
    params = {name: value for name, value in body.items() if value is not None}
    for name in ("model", "user", "metadata"):
        if name in params:
            extra.setdefault(name, params.pop(name))
    kinds = [kind for kind in ("prompt", "messages") if kind in params]
    if len(kinds) != 1:
        raise RequestError("body: must have exactly one of prompt, messages")
    value = params.pop(kinds[0])
    if isinstance(params.get("logprobs"), bool):
        del params["logprobs"]  # the drawn token's are always there
    if "max_completion_tokens" in params:
        params["max_tokens"] = params.pop("max_completion_tokens")
    params = {name: value for name, value in params.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    try:
        SamplingParams(**params)
    except RequestError as error:
        raise RequestError(f"body.{error}") from None
    return kinds[0], value, params
