"""`EngineConfig`: how the engine is built. Attribute docstrings are the help texts of the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from keepmask.errors import ConfigError
from keepmask.params import MAX_COUNT, SamplingSemantics, plain

__all__ = ["EngineConfig", "LogprobsMode", "SamplingMaskContract", "SpeculativeConfig"]

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
SamplingMaskContract = Literal["exact", "vllm"]
TokenId = Annotated[int, Field(ge=0)]


class SpeculativeConfig(BaseModel):
    """Frozen configuration of speculation, with vLLM's names where it has them. It never changes what is drawn.

    Raises ConfigError naming the field, the rule and the remedy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    method: Literal["ngram", "siblings", "history", "draft_model"]
    """What the next tokens are guessed by: the prompt and the completion itself, also its siblings, also the past; or
    a smaller model of the same tokenizer."""
    num_speculative_tokens: int = Field(8, ge=1, le=64)
    """Most tokens guessed at a time; fewer are where more would not pay."""
    prompt_lookup_min: int = Field(2, ge=1, le=64)
    """How many of the latest tokens must agree with a place for what followed it to be a guess."""
    prompt_lookup_max: int = Field(8, ge=1, le=64)
    """How many of the latest tokens are compared to tell places apart."""
    rollouts: list[str] = Field(default_factory=list)
    """Rollout files of earlier epochs, for method history."""
    model: str | None = None
    """The smaller model, for method draft_model: a packaged name, a checkpoint folder, or a Hugging Face hub id."""
    kv_cache_memory_bytes: int = Field(256 * 2**20, ge=1)
    """Memory for the smaller model's keys and values."""
    max_history_bytes: int = Field(256 * 2**20, ge=0)
    """Memory for tokens of earlier completions, four bytes each; the prompts used longest ago are forgotten first."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _config_error(error, type(self).model_fields) from None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min}: must not be above "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.rollouts and self.method != "history":
            raise ConfigError(f"rollouts: are for method='history', not method={self.method!r}")
        if (self.model is not None) != (self.method == "draft_model"):
            raise ConfigError(f"model={self.model!r} with method={self.method!r}: method='draft_model' has a model")
        return self


class EngineConfig(BaseModel):
    """Frozen configuration of one engine. Names and meanings are vLLM's where vLLM has them.

    Raises ConfigError naming the field, the rule and the remedy.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    model: str = Field(min_length=1)
    """Name of a packaged model (smollm2-135m), a checkpoint folder, or a Hugging Face hub id."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; the model's own by default."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and completions carry no text."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations; auto takes bfloat16 where the device is fast at it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a CUDA device when there is one."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seeds of requests that bring none are derived from this one, in order of arrival."""
    max_model_len: int | None = Field(None, ge=1)
    """Most tokens of prompt and completion together; the model's own context length by default."""
    max_num_seqs: int = Field(128, ge=1)
    """Most completions decoded in one step."""
    max_num_batched_tokens: int = Field(2048, ge=1)
    """Most tokens computed in one step; longer prompts are computed in chunks."""
    block_size: int = Field(16, ge=1, le=256)
    """Tokens in one block of the KV cache."""
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """Memory for the KV cache; by default a share of what the device has free."""
    return_sampling_mask: bool = False
    """Return the support of every generated token, unless the request says otherwise."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What logprobs means: over the whole vocabulary (raw) or over the support (processed); logits likewise."""
    max_logprobs: int = Field(20, ge=-1, le=MAX_COUNT)
    """Most log-probabilities a request may ask for per token; -1 for the whole vocabulary."""
    sampling_mask_contract: SamplingMaskContract = "exact"
    """exact allows greedy, top_k off and custom processors with masks, and bans bad words in every spelling; vllm
    refuses what vLLM refuses, raises temperatures to 0.01 and bans the spellings that vLLM bans."""
    sampling_semantics: SamplingSemantics = "vllm"
    """Whose filter order and boundaries requests follow unless they say otherwise."""
    max_mask_bytes_per_request: int = Field(256 * 2**20, ge=1)
    """A request whose masks outgrow this ends with finish_reason error; no row is ever cut."""
    ban_unmapped_token_ids: bool = False
    """Never draw ids that the tokenizer does not map to a token."""
    thinking_start_token_ids: list[TokenId] = Field(default_factory=list)
    """Tokens that open the thinking span, for requests with a thinking_token_budget."""
    thinking_end_token_ids: list[TokenId] = Field(default_factory=list)
    """Tokens that close the thinking span, forced once the budget is spent."""
    speculative_config: SpeculativeConfig | None = None
    """Guess tokens and verify several in one forward: the same draws in fewer steps."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{name: plain(value) for name, value in fields.items()})
        except ValidationError as error:
            raise _config_error(error, type(self).model_fields) from None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.return_sampling_mask and self.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"return_sampling_mask=True with logprobs_mode={self.logprobs_mode!r}: a mask and its log-probs must "
                "share one normaliser; set logprobs_mode='processed_logprobs'"
            )
        if self.speculative_config is not None and self.sampling_mask_contract == "vllm":
            raise ConfigError(
                "speculative_config with sampling_mask_contract='vllm': vLLM has no masks under speculation; "
                "set sampling_mask_contract='exact', or leave speculative_config out"
            )
        if bool(self.thinking_start_token_ids) != bool(self.thinking_end_token_ids):
            raise ConfigError("thinking_start_token_ids and thinking_end_token_ids: give both or neither")
        return self


def _config_error(error: ValidationError, fields: dict[str, FieldInfo]) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return inner
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return ConfigError(f"{name}: unknown engine option; known are {', '.join(sorted(fields))}")
    if problem["type"] == "missing":
        return ConfigError(f"{name}: must be given. {fields[name].description}")
    where = "".join(f"[{part}]" for part in problem["loc"][1:])
    rule = problem["msg"].removeprefix("Input ").removeprefix("String ")
    return ConfigError(f"{name}{where}={problem['input']!r}: {rule}. {fields[name].description}")
