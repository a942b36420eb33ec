"""What the routes accept. Every model refuses unknown fields, and converts nothing."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from keepmask.errors import RequestError
from keepmask.params import SamplingParams
from keepmask.wire.fields import JsonForm

__all__ = [
    "AbortRequest",
    "CacheSalt",
    "Generate",
    "GenerateRequest",
    "RequestId",
    "StreamOptions",
    "Strict",
    "TokenIds",
]

RequestId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1), FailFast()]


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
    stream_interval: int | None = Field(None, ge=1)
    """Tokens in one chunk of the stream; the server's setting by default. The first and last may hold fewer."""
    request_id: RequestId | None = None
    """A name for the request, returned with the answer and understood by the routes that abort."""
    cache_salt: CacheSalt | None = None
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
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs: are not part of a stream; send the request with stream=false",
                param="prompt_logprobs",
            )
        return self


class AbortRequest(Strict):
    """Body of /inference/v1/abort_requests."""

    request_ids: Annotated[list[RequestId], Field(min_length=1, max_length=4096), FailFast()]
    """The requests to end, by the names they were given or were answered with."""
