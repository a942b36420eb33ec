"""`Message`: one message of a conversation, and what chat templates see of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator, model_validator

from keepmask.errors import RequestError
from keepmask.extras import needs

__all__ = ["Message", "read_messages", "render_chat"]

_TEXT_PARTS = ["text", "input_text", "output_text"]
_EMPTY = Annotated[list[None], Field(max_length=0)]


_PART = {
    "type": "object",
    "properties": {"type": {"enum": _TEXT_PARTS}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
_ARGUMENTS = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class FunctionCall(_Strict):
    """The function of a tool call."""

    name: str
    """Which one was called."""
    arguments: Annotated[dict[str, Any], WithJsonSchema(_ARGUMENTS)] = Field(default_factory=dict)
    """With what: an object, or one as JSON text, which is parsed, because templates expect objects."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, value: object) -> object:
        if not isinstance(value, str):
            return {} if value is None else value
        try:
            return json.loads(value) if value else {}
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON text") from None


class ToolCall(_Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    """Its name."""
    type: str = Field("function", pattern="^function$")
    """Calls are of functions."""
    function: FunctionCall
    """The call itself."""
    index: int | None = Field(None, exclude=True)
    """Its place in a stream."""


class Message(_Strict):
    """One message of a conversation, also as OpenAI's client dumps those it was answered with."""

    role: str = Field(min_length=1)
    """Who speaks; the template says which roles there are."""
    content: Annotated[str | None, WithJsonSchema(_CONTENT)] = None
    """What is said, as text or as a list of text parts, which are joined by line ends as vLLM joins them. Only an
    assistant that calls tools may say nothing."""
    name: str | None = None
    """The speaker's name, for templates that show it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1024)] | None = None
    """What an assistant's message called."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""
    reasoning_content: str | None = None
    """What an assistant thought before, for templates that show it."""
    reasoning: str | None = None
    """The same, by its newer name."""
    refusal: None = None
    """No message is a refusal."""
    audio: None = None
    """Messages are text."""
    function_call: None = None
    """Calls are tool calls."""
    annotations: _EMPTY | None = Field(None, exclude=True)
    """Messages cite nothing."""

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        texts = []
        for at, part in enumerate(value):
            kind = part.get("type") if isinstance(part, Mapping) else "text"
            text = part.get("text") if isinstance(part, Mapping) else part
            if kind not in _TEXT_PARTS or not isinstance(text, str):
                raise ValueError(f"part {at} is {str(part)[:80]}; must be {{'type': 'text', 'text': ...}}")
            if isinstance(part, Mapping) and (unknown := part.keys() - {"type", "text"}):
                raise ValueError(f"part {at} has an unknown field {min(unknown, key=str)!r}; known are type and text")
            texts.append(text)
        return "\n".join(texts)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message without what it leaves out. One without content says ""."""
        message = {"content": "", **self.model_dump(exclude_none=True)}
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return message


def read_messages(messages: Any) -> list[Message]:
    """A conversation from what users write and send. Raises RequestError naming the message, the field and the rule."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages: must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}",
            param="messages",
        )
    return [each if isinstance(each, Message) else _read(each, at) for at, each in enumerate(messages)]


def render_chat(tokenizer: Any, messages: Sequence[Message], **template: Any) -> str:
    """The conversation as the model's chat template writes it. template: the arguments of `apply_chat_template`.

    Raises RequestError when the template refuses it.
    """
    given = [message.for_template() for message in messages]
    try:
        with needs("engine", "a chat template"):
            text: str = tokenizer.apply_chat_template(given, tokenize=False, **template)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # templates raise whatever they like
        said = str(error)[:300]
        raise RequestError(f"messages: the chat template refused them: {said}", param="messages") from error
    return text


def _read(message: Any, at: int) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{at}]: must be {{'role': ..., 'content': ...}}, got {type(message).__name__}", param="messages"
        )
    try:
        return Message.model_validate(dict(message))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if problem["type"] == "extra_forbidden":
            rule = f"unknown field; known are {', '.join(Message.model_fields)}"
        raise RequestError(f"messages[{at}]{where}: {rule}", param="messages") from None
