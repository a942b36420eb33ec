"""What vLLM's and OpenAI's routes accept. Every model refuses unknown fields, and converts nothing.

The fields of `SamplingParams` are not written again: `WithParams` gathers them. What these routes' own servers take and
this one has no use for is accepted where it changes nothing, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

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
from keepmask.messages import Message
from keepmask.params import SamplingParams
from keepmask.wire.fields import JsonForm

__all__ = [
    "AbortRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "OpenAIFields",
    "RequestId",
    "Strict",
    "TokenId",
    "TokenIds",
    "TokenizeRequest",
    "WithParams",
    "known_fields",
]

RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Nothing = Annotated[dict[str, None], Field(max_length=0)] | None
"""Null or an empty object."""
NoneOf = Annotated[list[None], Field(max_length=0)] | None
"""Null or an empty list."""

_NO_TRANSFER = "Disaggregated serving, which this server does not do."


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


class WithParams(Strict):
    """A body, or a part of one, whose fields stand side by side with those of `SamplingParams`.

    A sampling parameter that is null counts as left out. The fields below are vLLM's, and change nothing here.
    """

    left_out: ClassVar[frozenset[str]] = frozenset()
    """Sampling parameters that are not taken."""

    params: SamplingParams
    """The sampling parameters."""
    stream_interval: int | None = Field(None, ge=1, lt=2**31)
    """Tokens in one chunk of the stream; the server's setting by default. The first and last may hold fewer."""
    spaces_between_special_tokens: bool | None = None
    """Without effect on fast tokenizers, the only ones there are."""
    logprob_token_ids: NoneOf = None
    """Log-probabilities are of the drawn and of the most likely ids."""
    repetition_detection: None = None
    """Repetitions do not end a completion."""
    watermarking: Literal[False] | None = None
    """Draws carry no watermark."""
    routed_experts_prompt_start: Count | None = None
    """Where to begin to tell of routed experts; none are told of."""

    @classmethod
    def sampling_fields(cls) -> list[str]:
        """Names of the sampling parameters taken."""
        return [name for name in SamplingParams.model_fields if name not in cls.model_fields.keys() | cls.left_out]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "params" in value:
            raise RequestError(f"params: unknown field; known are {', '.join(known_fields(cls))}", param="params")
        names = cls.sampling_fields()
        params = {name: value[name] for name in names if value.get(name) is not None}
        return {name: member for name, member in value.items() if name not in names} | {"params": params}


def known_fields(model: type[BaseModel], inside: Sequence[int | str] = ()) -> list[str]:
    """Names of the fields on the wire, sorted: of the model, or of the one inside its first field of these."""
    if inside:
        annotation = model.model_fields[str(inside[0])].annotation
        (model, *_) = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type(BaseModel))]
    sampling = model.sampling_fields() if issubclass(model, WithParams) else []
    return sorted({*model.model_fields, *sampling} - ({"params"} if sampling else set()))


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = False
    """Send one more chunk with the usage, before the end."""
    continuous_usage_stats: bool | None = False
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
    kv_transfer_params: None = Field(None, description=_NO_TRANSFER)
    ec_transfer_params: None = Field(None, description=_NO_TRANSFER)

    @model_validator(mode="after")
    def _stream_options_belong_to_streams(self) -> Self:
        if not self.stream:
            for name in ("stream_options", "stream_interval"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name}: belongs to stream=true; set it, or leave {name} out", param=name)
        return self


class GenerateSampling(WithParams):
    """The sampling parameters of /inference/v1/generate. Without max_tokens the completion may fill the context."""

    return_token_ids: bool | None = None
    """Without effect: the ids of the completion always come. Those of the prompt are asked for beside these."""
    output_kind: Literal[0, 1, 2] | None = None
    """Without effect, as in vLLM: a stream sends what is new, another answer comes whole."""
    flat_logprobs: bool | None = None
    """Without effect over HTTP."""
    skip_clone: bool | None = None
    """Without effect over HTTP."""
    output_text_buffer_length: Count | None = None
    """Without effect: stop strings hold back as much text as they need."""
    extra_args: Nothing = None
    """There are no further arguments."""
    skip_reading_prefix_cache: Literal[False] | None = None
    """Cached prefixes are used; a cache_salt of its own keeps a request from those of others."""
    prompt_logprob_start: Literal[0] | None = None
    """Log-probabilities of a prompt are of all of it."""
    prompt_logprob_token_ids: None = None
    """They are of the prompt's and of the most likely ids."""
    trace_decode_token_ids: None = None
    """Nothing is traced."""


class GenerateRequest(Generate):
    """Body of /inference/v1/generate."""

    token_ids: TokenIds
    """The prompt."""
    sampling_params: GenerateSampling
    """How to draw."""
    output_mode: Literal["tokens", "text"] | None = "tokens"
    """text adds the text of the completion, and names tokens in logprobs by their text."""
    token_offsets: list[tuple[Count, Count]] | None = Field(None, fail_fast=True, strict=False)
    """Where the tokens are in their text; without effect, as in vLLM."""
    features: None = None
    """Multimodal input, which this server does not take."""
    content_parts: NoneOf = None
    """Multimodal input, which this server does not take."""
    reasoning_ended: bool | None = None
    """Without effect where there is no grammar to begin after it."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Likewise."""

    @model_validator(mode="after")
    def _text_is_detokenized(self) -> Self:
        if self.output_mode == "text" and not self.sampling_params.params.detokenize:
            raise RequestError(
                "output_mode='text': needs sampling_params.detokenize=true; leave it out", param="output_mode"
            )
        return self


class AbortRequest(Strict):
    """Body of /inference/v1/abort_requests."""

    request_ids: Annotated[list[RequestId], Field(fail_fast=True, min_length=1, max_length=4096)]
    """The requests to end, by the names they were given or were answered with."""


class JsonSchema(Strict):
    """What a JSON answer must look like."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema; any JSON where there is none."""
    name: Annotated[str, Field(max_length=64)] | None = None
    """What the schema is called; without effect."""
    description: Annotated[str, Field(max_length=4096)] | None = None
    """What it is for; without effect."""
    strict: bool | None = None
    """The schema is followed to the letter either way."""


class ResponseFormat(Strict):
    """The form of an answer's text, as OpenAI spells it."""

    type: Literal["text", "json_object", "json_schema"]
    """Free text, any JSON, or JSON of a schema."""
    json_schema: JsonSchema | None = None
    """For the type of that name."""

    def form(self) -> dict[str, Any] | None:
        """The same as `SamplingParams.structured_outputs`."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise RequestError(
                "response_format: json_schema belongs to type='json_schema'; give both or neither",
                param="response_format",
            )
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return {"json_object": True} if schema is None else {"json": schema}


class OpenAIFields(Generate, WithParams):
    """What both OpenAI routes take beside the sampling parameters."""

    left_out = frozenset({"detokenize"})  # these routes are about text

    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs "token_id:<id>"."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt: by default to completions, not to chats."""
    use_beam_search: Literal[False] | None = None
    """Tokens are drawn, not searched for."""
    best_of: Literal[1] | None = None
    """Every completion is returned; n says how many."""
    response_format: ResponseFormat | None = None
    """The form of the text; structured_outputs is vLLM's way to say it."""
    truncate_prompt_tokens: None = None
    """Prompts are never cut."""
    truncation_side: Literal["left", "right"] | None = None
    """Without effect, since prompts are never cut."""
    length_penalty: float | None = Field(None, ge=1, le=1)
    """Belongs to beam search."""
    return_token_offsets: Literal[False] | None = None
    """Offsets of the prompt's tokens are not returned."""
    return_mm_kwargs: Literal[False] | None = None
    """Prompts are text."""
    mm_payload: Literal["tensors", "none"] | None = None
    """Without effect, since prompts are text."""
    vllm_xargs: Nothing = None
    """There are no further arguments."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Whom the request is for; told to nobody, and without effect, as in vLLM."""
    session_id: Annotated[str, Field(max_length=256)] | None = None
    """Without effect: there is one server to send a session to."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Kept by nobody, since answers are not stored."""
    store: Literal[False] | None = None
    """Answers are not stored."""
    service_tier: Literal["auto", "default"] | None = None
    """There is one."""
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    """As user."""
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """Without effect: equal prefixes are found by what they hold. cache_salt keeps them apart."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        form = None if self.response_format is None else self.response_format.form()
        if form is not None:
            if self.params.structured_outputs is not None:
                raise RequestError(
                    "response_format: structured_outputs says the form too; give one of them", param="response_format"
                )
            self.params = self.params.replace(structured_outputs=form)
        return self


class CompletionRequest(OpenAIFields):
    """Body of /v1/completions, beside the sampling parameters."""

    prompt: Prompts
    """A text, token ids, or a list of either."""
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    """Most tokens to generate; 0 with echo returns the prompt alone."""
    echo: bool | None = False
    """Begin the text, its tokens and their log-probabilities with the prompt's."""
    suffix: None = None
    """Nothing can be made to follow the completion."""
    prompt_embeds: None = None
    """Prompts are text or tokens."""

    @model_validator(mode="after")
    def _echo_comes_whole(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens=0: belongs to echo=true; give at least 1", param="max_tokens")
        if self.echo and self.stream and self.params.logprobs is not None:
            raise RequestError(
                "echo=true: log-probs of a prompt are not part of a stream; set stream=false", param="echo"
            )
        return self


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]

_NOT_FOR_TEMPLATES = frozenset({"chat_template", "conversation", "messages", "tools", "documents", "tokenize"})


class Rendering(Strict):
    """How to turn a conversation into a prompt."""

    add_generation_prompt: bool | None = True
    """End the prompt where the assistant's answer begins."""
    continue_final_message: bool | None = False
    """End the prompt within the last message, which the completion continues."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    """Shown to the template; with tool_choice none, since calls in answers are not parsed."""
    chat_template: None = None
    """The model's own is used: templates from requests are programs."""
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str | None], Field(max_length=16)] | None = None
    """Switches of the model's own template, as enable_thinking."""
    media_io_kwargs: Nothing = None
    """Messages are text."""
    mm_processor_kwargs: Nothing = None
    """Messages are text."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message=true: set add_generation_prompt=false with it", param="continue_final_message"
            )
        if taken := _NOT_FOR_TEMPLATES & (self.chat_template_kwargs or {}).keys():
            raise RequestError(
                f"chat_template_kwargs: {min(taken)} is no switch of a template; leave it out",
                param="chat_template_kwargs",
            )
        return self

    def rendering(self) -> dict[str, Any]:
        """Arguments of the template."""
        given = {"tools": self.tools or None, **(self.chat_template_kwargs or {})}
        return {
            "add_generation_prompt": bool(self.add_generation_prompt) and not self.continue_final_message,
            "continue_final_message": bool(self.continue_final_message),
            **{name: value for name, value in given.items() if value is not None},
        }


class ChatRequest(OpenAIFields, Rendering):
    """Body of /v1/chat/completions, beside the sampling parameters."""

    messages: Messages
    """The conversation so far."""
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Most tokens to generate; by default as many as the model's context holds."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """The same, by its newer name."""
    logprobs: bool | None = False
    """Return the log-probability of every token of the answer."""
    top_logprobs: int | None = Field(None, ge=0, lt=2**31)
    """And of this many of the most likely ids beside it; needs logprobs."""
    echo: Literal[False] | None = None
    """The prompt is not repeated in the answer."""
    tool_choice: Literal["none"] | None = None
    """Tools are shown, never called."""
    parallel_tool_calls: bool | None = None
    """Without effect where no tools are called."""
    functions: NoneOf = None
    """Tools, by their older name."""
    function_call: Literal["none"] | None = None
    """No tools."""
    documents: None = None
    """Nothing is passed to the template but the messages."""
    reasoning_effort: None = None
    """Likewise; templates take their own switches by chat_template_kwargs."""
    include_reasoning: bool | None = None
    """Without effect: thoughts are part of the text."""
    return_prompt_text: Literal[False] | None = None
    """The prompt is not returned as text."""
    modalities: list[Literal["text"]] | None = None
    """Answers are text."""
    audio: None = None
    """Answers are text."""
    prediction: None = None
    """Answers are not predicted."""
    web_search_options: None = None
    """There is no search."""
    verbosity: Literal["medium"] | None = None
    """Answers are as long as the model makes them."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.tools and self.tool_choice != "none":
            raise RequestError(
                "tools: calls in answers are not parsed; send tool_choice='none' to show them all the same",
                param="tools",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: needs logprobs=true; set it too", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                "max_completion_tokens: is max_tokens by its newer name, and they differ; send one",
                param="max_completion_tokens",
            )
        return self


class TokenizeRequest(Rendering):
    """Body of /tokenize: a text, or a conversation."""

    model: str | None = None
    """Name of the served model."""
    prompt: str | None = None
    """The text."""
    messages: Messages | None = None
    """The conversation, instead of a text."""
    add_special_tokens: bool | None = None
    """Whether to add the tokenizer's special tokens: by default to texts, not to conversations."""
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
