"""What the generating routes accept. Every model refuses unknown fields, and converts nothing.

The fields of `SamplingParams` are not written again: routes whose bodies hold them side by side with their own take
them by `read_sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.wire.fields import JsonForm

__all__ = [
    "AbortRequest",
    "ChatFields",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generate",
    "GenerateRequest",
    "Message",
    "OpenAIFields",
    "RequestId",
    "StreamOptions",
    "Strict",
    "TokenIds",
    "TokenizeRequest",
]

RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def _prompt(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    try:
        return parse(value)
    except ValidationError:
        raise RequestError(
            "prompt: must be a text, token ids in [0, 2**31), a list of texts, or a list of lists of token ids, none "
            "of them empty",
            param="prompt",
        ) from None


Prompts = Annotated[
    Annotated[str, Field(min_length=1)]
    | TokenIds
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=1024)]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=1024)],
    WrapValidator(_prompt),
]


class Strict(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    """Send one more chunk with the usage, before the end."""
    continuous_usage_stats: bool = False
    """Put the usage so far into every chunk."""


class Generate(Strict):
    """Fields that all generating routes share."""

    model: str | None = None
    """Name of the served model, as /v1/models tells; None takes the one there is."""
    stream: bool | None = False
    """Send tokens as they come, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream; only with stream."""
    stream_interval: int | None = Field(None, ge=1, lt=2**31)
    """Tokens in one chunk of the stream; the server's setting by default. The first and last may hold fewer."""
    request_id: RequestId | None = None
    """A name for the request, returned with the answer and understood by the routes that abort."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Prompts share cached prefixes only with prompts of the same salt."""
    priority: Literal[0] | None = 0
    """Requests are served in order of arrival, so only 0."""
    return_token_ids: bool | None = None
    """Return the ids of prompt and completion."""
    sampling_mask_format: JsonForm | None = None
    """How the answer carries masks; the server's setting by default."""

    @model_validator(mode="after")
    def _stream_options_belong_to_streams(self) -> Self:
        if not self.stream:
            for name in ("stream_options", "stream_interval"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name}: belongs to stream=true; set it, or leave {name} out", param=name)
        return self


class GenerateRequest(Generate):
    """Body of /inference/v1/generate."""

    token_ids: TokenIds
    """The prompt."""
    sampling_params: SamplingParams
    """How to draw. Without max_tokens the completion may fill the model's context."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """text adds the text of the completion, and names tokens in logprobs by their text."""
    features: None = None
    """Multimodal input, which this server does not take."""
    kv_transfer_params: None = None
    """Disaggregated serving, which this server does not do."""

    @model_validator(mode="after")
    def _text_is_detokenized(self) -> Self:
        if self.output_mode == "text" and not self.sampling_params.detokenize:
            raise RequestError(
                "output_mode='text': needs sampling_params.detokenize=true; leave it out", param="output_mode"
            )
        return self


class AbortRequest(Strict):
    """Body of /inference/v1/abort_requests."""

    request_ids: Annotated[list[RequestId], Field(fail_fast=True, min_length=1, max_length=4096)]
    """The requests to end, by the names they were given or were answered with."""


class TextFormat(Strict):
    """The one response format there is."""

    type: Literal["text"]
    """Free text."""


class OpenAIFields(Generate):
    """What both OpenAI routes take beside the sampling parameters."""

    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs "token_id:<id>"."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt: by default to completions, not to chats."""
    echo: Literal[False] | None = None
    """The prompt is not repeated in the text."""
    use_beam_search: Literal[False] | None = None
    """Tokens are drawn, not searched for."""
    best_of: Literal[1] | None = None
    """Every completion is returned; n says how many."""
    response_format: TextFormat | None = None
    """Text is free: there is no grammar to follow."""
    truncate_prompt_tokens: None = None
    """Prompts are never cut."""
    spaces_between_special_tokens: bool | None = None
    """Without effect on fast tokenizers, the only ones there are."""
    length_penalty: float | None = Field(None, ge=1, le=1)
    """Belongs to beam search."""
    structured_outputs: None = None
    """Text is free."""
    kv_transfer_params: None = None
    """Disaggregated serving, which this server does not do."""
    vllm_xargs: None = None
    """There are no further arguments."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Whom the request is for; told to nobody, and without effect, as in vLLM."""


class CompletionRequest(OpenAIFields):
    """Body of /v1/completions, beside the sampling parameters."""

    prompt: Prompts
    """A text, token ids, or a list of either."""
    suffix: None = None
    """Nothing can be made to follow the completion."""


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    """Messages are text."""
    text: str
    """What it says."""


class FunctionCall(Strict):
    """The function of a tool call."""

    name: str
    """Which one was called."""
    arguments: str
    """With what, as a JSON text."""


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    """Its name."""
    type: Literal["function"] = "function"
    """Calls are of functions."""
    function: FunctionCall
    """The call itself."""


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks."""
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=1024)] | None = None
    """What is said; only an assistant that calls tools may say nothing."""
    name: str | None = None
    """The speaker's name, for templates that show it."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=1024)] | None = None
    """What an assistant's message called."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError(f"messages: a message of role {self.role!r} needs content", param="messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message with its parts joined to one text, without what it leaves out."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        return message


class ChatFields(Strict):
    """A conversation and how to turn it into a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    """The conversation so far."""
    add_generation_prompt: bool = True
    """End the prompt where the assistant's answer begins."""
    continue_final_message: bool = False
    """End the prompt within the last message, which the completion continues."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message=true: set add_generation_prompt=false with it", param="continue_final_message"
            )
        return self


class ChatRequest(OpenAIFields, ChatFields):
    """Body of /v1/chat/completions, beside the sampling parameters."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Most tokens to generate; by default as many as the model's context holds."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """The same, by its newer name."""
    logprobs: bool | None = False
    """Return the log-probability of every token of the answer."""
    top_logprobs: int | None = Field(None, ge=0, lt=2**31)
    """And of this many of the most likely ids beside it; needs logprobs."""
    tools: Annotated[list[None], Field(max_length=0)] | None = None
    """No tools: answers are text, and calls in them are not parsed."""
    tool_choice: Literal["none"] | None = None
    """No tools."""
    parallel_tool_calls: bool | None = None
    """Without effect where there are no tools."""
    chat_template: None = None
    """The model's own is used: templates from requests are programs."""
    chat_template_kwargs: Annotated[dict[str, None], Field(max_length=0)] | None = None
    """Nothing is passed to the template but the messages."""
    documents: None = None
    """Nothing is passed to the template but the messages."""
    mm_processor_kwargs: None = None
    """Messages are text."""
    reasoning_effort: None = None
    """Nothing is passed to the template but the messages."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs=true; set it too", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_completion_tokens: is max_tokens by its newer name, and they differ; send one",
                param="max_completion_tokens",
            )
        return self


class TokenizeRequest(Strict):
    """Body of /tokenize: a text, or a conversation."""

    model: str | None = None
    """Name of the served model."""
    prompt: str | None = None
    """The text."""
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    """The conversation, instead of a text."""
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens: by default to texts, not to conversations."""
    add_generation_prompt: bool = True
    """End a conversation where the assistant's answer begins."""
    continue_final_message: bool = False
    """End a conversation within its last message."""
    return_token_strs: bool | None = None
    """Return the tokenizer's name of each token too."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: send either a prompt or messages", param="prompt")
        return self


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: str | None = None
    """Name of the served model."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """The ids."""
