"""What SGLang's routes accept."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keepmask.errors import RequestError
from keepmask.server.schema import RequestId, Strict, TokenIds

__all__ = ["CustomParams", "SGLangAbort", "SGLangGenerate"]

Mode = Literal["selected", "support"]


class CustomParams(Strict):
    """Parameters that slime's SGLang adds."""

    return_top_p_token_ids: bool = False
    """Return the supports as base64 of int32 ids and row ends, `top_p_token_ids` and `top_p_token_offsets`."""


class SGLangGenerate(Strict):
    """Body of /generate."""

    rid: RequestId | Annotated[list[RequestId], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """A name for the request, or one for each prompt."""
    text: str | Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """A prompt, or several."""
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """The same as token ids."""
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    """How to draw, for all prompts or for each."""
    return_logprob: bool | None = False
    """Return the log-probability of every token."""
    logprob_start_len: int | None = Field(None, ge=-1, lt=2**31)
    """Return those of the prompt too, from this position on; -1 returns none."""
    top_logprobs_num: int | None = Field(None, ge=0, lt=2**31)
    """Return those of this many of the most likely ids beside each token."""
    return_text_in_logprobs: bool = False
    """Name tokens by their text too."""
    return_sampling_mask: bool | None = None
    """Return the support of every token. As in SGLang, masks come only when asked for."""
    sampling_logprobs_mode: Mode | None = None
    """With a mask: the log-probability of each drawn token, or of its whole support."""
    stream: bool = False
    """Send everything so far with every chunk, as server-sent events."""
    return_routed_experts: Literal[False] | None = None
    """There are no experts to tell of."""
    return_indexer_topk: Literal[False] | None = None
    """There is no indexer."""
    return_hidden_states: Literal[False] | None = None
    """Hidden states are not returned."""
    image_data: None = None
    """Prompts are text."""
    lora_path: None = None
    """There are no adapters."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
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
