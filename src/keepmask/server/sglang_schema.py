"""What SGLang's routes accept. Fields that this server has no use for are taken where they change nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from keepmask.errors import RequestError
from keepmask.server.schema import NoneOf, Nothing, RequestId, Strict, TokenIds
from keepmask.structured_outputs import MAX_CHARACTERS

__all__ = ["CustomParams", "PauseGeneration", "SGLangAbort", "SGLangGenerate", "SGLangSampling"]

Mode = Literal["selected", "support"]
T = TypeVar("T")
Many = Annotated[list[T], Field(min_length=1, max_length=1024, fail_fast=True)]
_NO_MEDIA = "Prompts are text."


class CustomParams(Strict):
    """Parameters that slime's SGLang adds."""

    return_top_p_token_ids: bool = False
    """Return the supports as base64 of int32 ids and row ends, `top_p_token_ids` and `top_p_token_offsets`."""


class SGLangSampling(Strict):
    """SGLang's sampling parameters. Types and ranges are those of `SamplingParams`, which they are translated to."""

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    max_new_tokens: Any = 128
    """Most tokens to generate; null for as many as the context holds, 0 for none."""
    min_new_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    no_stop_trim: Any = None
    """Keep the stop string in the text."""
    n: Any = None
    logit_bias: Any = None
    sampling_seed: Any = None
    sampling_semantics: Any = None
    custom_params: CustomParams | None = None
    """Parameters that slime's SGLang adds."""
    stream_interval: int | None = Field(None, ge=1, lt=2**31)
    """Tokens in one chunk of the stream."""
    spaces_between_special_tokens: bool | None = None
    """Without effect on fast tokenizers, the only ones there are."""
    stop_regex: NoneOf = None
    """Nobody's regular expressions are run."""
    json_schema: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    """A JSON schema the text follows, as JSON text."""
    regex: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    """A regular expression the whole text matches."""
    ebnf: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    """A grammar the text follows."""
    structural_tag: None = None
    """Forms are of whole texts."""
    choice: None = None
    """Say it with regex."""
    beam_width: Literal[1] | None = None
    """Tokens are drawn, not searched for."""
    watermark: None = None
    """Draws carry no watermark."""


class SGLangGenerate(Strict):
    """Body of /generate."""

    rid: RequestId | Many[RequestId] | None = None
    """A name for the request, or one for each prompt."""
    text: str | Many[str] | None = None
    """A prompt, or several."""
    input_ids: TokenIds | Many[TokenIds] | None = None
    """The same as token ids, which count where both are given."""
    sampling_params: SGLangSampling | Many[SGLangSampling] | None = None
    """How to draw, for all prompts or for each."""
    return_logprob: bool | Many[bool] | None = False
    """Return the log-probability of every token."""
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | Many[Annotated[int, Field(ge=-1, lt=2**31)]] | None = (
        None
    )
    """Return those of the prompt too, from this position on; -1 returns none."""
    top_logprobs_num: Annotated[int, Field(ge=0, lt=2**31)] | Many[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    """Return those of this many of the most likely ids beside each token."""
    return_text_in_logprobs: bool | None = False
    """Name tokens by their text too."""
    return_sampling_mask: bool | Many[bool] | None = None
    """Return the support of every token. As in SGLang, masks come only when asked for."""
    sampling_logprobs_mode: Mode | Many[Mode] | None = None
    """With a mask: the log-probability of each drawn token, or of its whole support."""
    return_prompt_token_ids: bool | None = False
    """Return the prompt's ids."""
    stream: bool | None = False
    """Send everything so far with every chunk, as server-sent events."""
    cache_salt: str | Many[str] | None = None
    """Prompts share cached prefixes only with prompts of the same salt."""
    extra_key: str | Many[str] | None = None
    """The same, by its older name."""
    token_ids_logprob: NoneOf = None
    """Log-probabilities are of the drawn and of the most likely ids."""
    priority: int | None = None
    """Without effect, as in SGLang unless it is told to schedule by it."""
    return_routed_experts: Literal[False] | None = None
    """There are no experts to tell of."""
    routed_experts_start_len: int | None = Field(None, ge=0)
    """Without effect, likewise."""
    return_indexer_topk: Literal[False] | None = None
    """There is no indexer."""
    return_hidden_states: Literal[False] | None = None
    """Hidden states are not returned."""
    return_bytes: Literal[False] | None = None
    """Answers are JSON."""
    return_entropy: Literal[False] | None = None
    """Entropies are not returned."""
    image_data: None = Field(None, description=_NO_MEDIA)
    video_data: None = Field(None, description=_NO_MEDIA)
    audio_data: None = Field(None, description=_NO_MEDIA)
    input_embeds: None = Field(None, description=_NO_MEDIA)
    modalities: list[Literal["text"]] | None = Field(None, description=_NO_MEDIA)
    mm_processor_kwargs: Nothing = Field(None, description=_NO_MEDIA)
    lora_path: None = None
    """There are no adapters."""
    lora_id: None = None
    """There are no adapters."""
    session_params: Nothing = None
    """Prompts are sent whole; those that begin alike share what was computed."""
    session_id: str | None = None
    """Without effect: there is one server to send a session to."""
    conversation_id: str | None = None
    """Likewise."""
    routing_key: str | None = None
    """Likewise."""
    data_parallel_rank: Literal[0] | None = None
    """There is one."""
    routed_dp_rank: Literal[0] | None = None
    """There is one."""
    custom_logit_processor: None = None
    """No programs are taken from requests."""
    bootstrap_host: None = None
    """Disaggregated serving, which this server does not do."""
    bootstrap_port: None = None
    """Likewise."""
    bootstrap_room: None = None
    """Likewise."""
    require_reasoning: Literal[False] | None = None
    """There is no grammar to begin after thoughts."""
    max_thinking_tokens: None = None
    """thinking_token_budget, on the other routes, bounds thoughts."""
    background: Literal[False] | None = None
    """Every request is answered to whom sent it."""
    no_logs: bool | None = None
    """Without effect: prompts and texts are never logged."""
    log_metrics: bool | None = None
    """Without effect: every request is counted."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise RequestError("input_ids: send either text or input_ids", param="input_ids")
        return self


class SGLangAbort(Strict):
    """Body of /abort_request."""

    rid: str = ""
    """The request to end, by its name."""
    abort_all: bool = False
    """End all requests; only where weight updates are enabled."""
    abort_message: str | None = None
    """Why; told to nobody."""


class PauseGeneration(Strict):
    """Body of /pause_generation, which may be left out."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """abort ends all requests; retract and in_place freeze them."""
