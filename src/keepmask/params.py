"""`SamplingParams`: what one request asks of the sampler, and the one table of legal ranges."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from keepmask.errors import RequestError
from keepmask.structured_outputs import StructuredOutputsParams

__all__ = ["GREEDY_TEMPERATURE", "SamplingParams", "SamplingSemantics"]

SamplingSemantics = Literal["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# Bounds on what one request may ask for, so that no request can exhaust the engine before it is scheduled.
MAX_N = 16_384  # VLLM_MAX_N_SEQUENCES
MAX_STOP = 64
MAX_TOKEN_LIST = 262_144
MAX_BAD_WORDS = 128  # each is looked for at every token
MAX_STRING = 1024
MAX_LOGIT_BIAS = 1024
MAX_COUNT = 2**31 - 1
# Beyond these, float32 logits over- or underflow and -inf / inf is NaN.
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-6
MAX_REPETITION_PENALTY = 1e6


class SamplingParams(BaseModel):
    """How to draw the tokens of one request. Frozen; every range is checked; unknown fields are refused.

    Names, defaults and meanings are vLLM's. NumPy numbers and arrays count as the Python numbers and lists they hold;
    nothing else is converted. Raises RequestError naming the field, its legal values and the remedy.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    n: int = Field(1, ge=1, le=MAX_N)
    """Completions to return for the prompt."""
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits. Below 1e-5 the draw is greedy: the highest logit, ties to the lowest id. With
    sampling_mask_contract="vllm", what lies in (0, 0.01) counts as 0.01."""
    top_k: int = Field(0, ge=-1, le=MAX_COUNT)
    """Keep the k highest logits; 0 or -1 keeps all. Of ties with the k-th the profile keeps the lowest ids, or all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely ids until their mass reaches top_p; 1.0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop ids less likely than min_p times the most likely one; 0.0 keeps all."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    """Makes the draws reproducible. A request without one, or with -1, is given one, which its output reports."""
    max_tokens: int | None = Field(16, ge=1, le=MAX_COUNT)
    """Most tokens to generate per completion; None generates until the model's context is full."""
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    """End-of-sequence and stop tokens are banned until this many tokens are out."""
    stop: list[str] = Field(default_factory=list, max_length=MAX_STOP)
    """Strings that end the completion; not part of its text unless include_stop_str_in_output."""
    stop_token_ids: list[int] = Field(default_factory=list, fail_fast=True, max_length=MAX_TOKEN_LIST)
    """Token ids that end the completion."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or stop token, in the text. The token ids and rows are every drawn token either way."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = Field(None, ge=-1, le=MAX_COUNT)
    """Log-probabilities to return per generated token: this many of the most likely ids, and the drawn one; -1 for
    all."""
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_COUNT)
    """The same for each prompt token."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logit of every id already in the output."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logit of every id once for each time it is in the output."""
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    """Divides positive and multiplies negative logits of ids in the prompt or the output; 1.0 changes nothing."""
    logit_bias: dict[int, float] = Field(default_factory=dict, max_length=MAX_LOGIT_BIAS)
    """Token id to a value in [-100, 100] added to its logit."""
    bad_words: list[str] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    """Words, at the start of a text and after a space, whose last token is banned where the tokens before it match."""
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True, min_length=1, max_length=MAX_TOKEN_LIST)
    """Ban every other token id; None bans nothing."""
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Most tokens between the engine's thinking start and end tokens; then the end tokens are forced. -1 for no end."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form the text must have: tokens that leave it are banned at every position, so they are in no support."""
    return_sampling_mask: bool | None = None
    """Return the support of every generated token; None follows the engine's setting."""
    return_sampling_mask_logprobs: bool = False
    """Return the log-probability of every id of the support too; needs return_sampling_mask."""
    sampling_semantics: SamplingSemantics | None = None
    """Whose filter order and boundaries to follow; None follows the engine's setting."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Produce text; False returns token ids only."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{name: plain(value) for name, value in fields.items()})
        except ValidationError as error:
            raise _request_error(error, type(self).model_fields) from None

    @field_validator("seed", "thinking_token_budget", mode="before")
    @classmethod
    def _minus_one_is_none(cls, value: object) -> object:
        return None if type(value) is int and value == -1 else value

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _form(cls, value: object) -> object:
        return None if value is None else StructuredOutputsParams.of(value)

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: object) -> object:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stop_token_ids", "logit_bias", mode="before")
    @classmethod
    def _none_is_empty(cls, value: object, info: Any) -> object:
        if value is None:
            return {} if info.field_name == "logit_bias" else []
        return _integer_keys(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not 0 < len(text) <= MAX_STRING:
                    raise RequestError(
                        f"{name}={text[:40]!r}: each string must have 1 to {MAX_STRING} characters", param=name
                    )
                if _SURROGATE.search(text):
                    raise RequestError(
                        f"{name}={text[:40]!r}: half a surrogate pair is no text; send the whole character", param=name
                    )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if (ids := getattr(self, name)) and (negative := min(ids)) < 0:
                raise RequestError(f"{name}: token id {negative} must be >= 0", param=name)
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias={{{token_id}: {bias}}}: a bias must be in [-100, 100]; "
                    "use allowed_token_ids or bad_words to ban ids outright",
                    param="logit_bias",
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}", param="min_tokens"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop: stop strings are found in the text, so they need detokenize=True", param="stop")
        if self.return_sampling_mask_logprobs and self.return_sampling_mask is False:
            raise RequestError(
                "return_sampling_mask_logprobs=True: belongs to a sampling mask; set return_sampling_mask=True too",
                param="return_sampling_mask_logprobs",
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the draw takes the highest logit."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may drop ids."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed, checked again."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


def plain(value: Any) -> Any:
    """The same value without NumPy: its numbers as Python's, its arrays as lists, also inside lists and dicts."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _integer_keys(bias: dict[Any, Any]) -> dict[Any, Any]:
    """JSON spells integer keys as strings: "12" counts as 12. Other keys stay, to be refused by their type."""
    keyed = {int(key) if isinstance(key, str) and _INTEGER.fullmatch(key) else key: bias[key] for key in bias}
    if len(keyed) < len(bias):
        raise RequestError("logit_bias: a token id is given twice; give each one bias", param="logit_bias")
    return keyed


def _request_error(error: ValidationError, fields: dict[str, FieldInfo]) -> RequestError:
    """The first problem pydantic found, as a sentence: what came, what is legal, what to do."""
    problem = error.errors(include_url=False)[0]
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, RequestError):
        return inner
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return RequestError(f"{name}: unknown sampling parameter; known are {', '.join(sorted(fields))}", param=name)
    where = "".join(f"[{part}]" for part in problem["loc"][1:] if part != "[key]")
    given = repr(problem["input"])
    given = given if len(given) <= 80 else f"{given[:77]}..."
    field = fields.get(name)
    legal = field and not where and _legal_range(field)
    rule = f"must be {legal}" if legal else problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return RequestError(f"{name}{where}={given}: {rule}. {(field and field.description) or ''}".rstrip(), param=name)


def _legal_range(field: FieldInfo) -> str:
    """The range of a numeric field in interval notation, from its constraints; "" for fields without one."""
    bounds = {
        name: value
        for constraint in field.metadata
        for name in ("gt", "ge", "lt", "le")
        if (value := getattr(constraint, name, None)) is not None
    }
    if not bounds:
        return ""
    number = "an integer" if "int" in str(field.annotation) else "a number"
    low = f"({bounds['gt']}" if "gt" in bounds else f"[{bounds.get('ge', '-inf')}"
    high = f"{bounds['lt']})" if "lt" in bounds else f"{bounds['le']}]" if "le" in bounds else "inf)"
    return f"{number} in {low}, {high}"
