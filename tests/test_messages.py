import pytest

import tiny
from keepmask.errors import RequestError
from keepmask.messages import Message, read_messages, render_chat

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def seen(*messages):
    """What a template sees of them."""
    return [message.for_template() for message in read_messages(messages)]


def test_a_message_says_what_it_says():
    assert seen(USER, {"role": "tool", "content": "", "tool_call_id": "c1"}) == [
        USER,
        {"role": "tool", "content": "", "tool_call_id": "c1"},
    ]
    assert read_messages([]) == []
    assert read_messages(read_messages([USER])) == [Message(**USER)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, "b", {"type": "output_text", "text": ""}], "a\nb\n"),
        (({"type": "text", "text": "a"},), "a"),
        ([], ""),
    ],
)
def test_text_parts_are_joined_by_line_ends(content, text):
    assert seen({"role": "user", "content": content}) == [{"role": "user", "content": text}]


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_arguments_of_tool_calls_are_objects(arguments):
    call = {**CALL, "index": 0, "function": {"name": "f", "arguments": arguments}}
    (message,) = seen({"role": "assistant", "content": "a", "tool_calls": [call]})
    assert message["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}]


def test_null_arguments_of_a_call_stay():
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": null, "y": [null]}'}}
    (message,) = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": None, "y": [None]}


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments_has_none(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (message,) = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_call_of_tools_may_say_nothing():
    (message,) = seen({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert message["content"] == ""


def test_what_openais_client_dumps_can_be_sent_back():
    from openai.types.chat import ChatCompletionMessage

    dumped = ChatCompletionMessage(role="assistant", content="yo", refusal=None, annotations=[]).model_dump()
    assert seen(dumped) == [{"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (7, "messages[1]: must be {'role': ..., 'content': ...}, got int"),
        ({"content": "hi"}, "messages[1].role: Field required"),
        ({"role": "", "content": "hi"}, "messages[1].role: String should have at least 1 character"),
        ({"role": "user", "content": 7}, "messages[1].content: should be a valid string"),
        ({"role": "user"}, "messages[1]: a message of role 'user' needs content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "needs content"),
        ({"role": "user", "content": "a", "mood": 1}, "messages[1].mood: unknown field; known are role, content, name"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "part 0 is {'type': 'image_url'"),
        ({"role": "user", "content": ["a", {"type": "text"}]}, "part 1 is {'type': 'text'}"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "part 0 has an unknown field 'x'"),
        ({"role": "assistant", "refusal": "no", "content": "a"}, "messages[1].refusal: should be None"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[0].function.arguments: must be a JSON text",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments: should be a valid dictionary",
        ),
    ],
)
def test_what_is_no_message_is_refused_by_field(message, says):
    with pytest.raises(RequestError) as error:
        read_messages([USER, message])
    assert error.value.param == "messages"
    assert says in str(error.value)


def test_a_template_that_refuses_is_a_refusal():
    tokenizer = tiny.byte_tokenizer()
    assert render_chat(tokenizer, read_messages([USER])) == "<bos>user: hi<eos>"
    with pytest.raises(RequestError, match="the chat template refused them: no such role"):
        render_chat(tokenizer, read_messages([{"role": "wizard", "content": "hi"}]))
