"""`ServerConfig`: how the server listens and what it lets one client do. Attribute docstrings are the CLI's help."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from keepmask.errors import ConfigError
from keepmask.wire.fields import JsonForm

__all__ = ["LogLevel", "ServerConfig"]

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


class ServerConfig(BaseModel):
    """Frozen configuration of one server. Raises ConfigError naming the field, the rule and the remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. Any that other machines can reach needs an API key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    api_keys: tuple[str, ...] = Field((), repr=False)
    """Keys of which every request but GET /health must bring one, as `Authorization: Bearer KEY`."""
    served_model_name: str | None = Field(None, min_length=1)
    """Name of the model in the API; the engine's model by default."""
    mask_format: JsonForm = "json"
    """How JSON answers carry masks unless the request says otherwise: nested lists, or one base64 object."""
    stream_interval: int = Field(1, ge=1)
    """Tokens in one chunk of a stream; the first and the last chunk may hold fewer."""
    max_waiting: int = Field(1024, ge=0)
    """Most completions that wait for a place in the batch; further requests are answered 429."""
    max_completions_per_request: int = Field(1024, ge=1)
    """Most prompts times n in one request."""
    max_tokens_per_request: int = Field(2**21, ge=1)
    """Most prompts times n times max_tokens in one request."""
    max_answer_bytes: int = Field(4 * 2**30, ge=1)
    """Memory that the answers of all admitted requests may come to take, by estimate; beyond it requests get 429."""
    max_body_bytes: int = Field(8 * 2**20, ge=1)
    """Largest request body, but for weights."""
    max_header_bytes: int = Field(32 * 2**10, ge=1024)
    """Most bytes of a request's line and headers."""
    request_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Requests that take longer end with what they have and finish_reason abort; by default none does."""
    write_timeout_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """A client that takes nothing of its stream for this long is given up."""
    drain_timeout_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Told to stop, the server finishes what was begun for this long; then it ends it, answered with what it has."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which the server may be called where no key is set, beside localhost, its addresses and `host`: what a
    page in a browser makes of a name of its own is refused."""
    ignore_unknown_fields: bool = False
    """Warn of unknown fields of requests, once each, instead of refusing them."""
    enable_weight_updates: bool = False
    """Open the routes that pause generation and change the weights; needs an API key."""
    weights_dir: str | None = Field(None, min_length=1)
    """The one folder from which /update_weights may read safetensors files; none by default."""
    max_weight_chunk_bytes: int = Field(2 * 2**30, ge=1)
    """Largest body of one /update_weights request."""
    await_weights: bool = False
    """Refuse to generate until weights were pushed and finished: for workers restarted in the middle of a run."""
    log_level: LogLevel = "info"
    """Least severe messages to log."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _config_error(error) from None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("api_keys: each must be printable ASCII without spaces")
        if not self.loopback and not self.api_keys:
            raise ConfigError(
                f"host={self.host!r}: other machines can reach it, so an API key is needed; give --api-key, "
                "or listen on 127.0.0.1"
            )
        if self.enable_weight_updates and not self.api_keys:
            raise ConfigError("enable_weight_updates=True: whoever changes the weights needs a key; give --api-key")
        for name in ("weights_dir", "await_weights"):
            if getattr(self, name) and not self.enable_weight_updates:
                raise ConfigError(f"{name}={getattr(self, name)!r}: belongs to enable_weight_updates=True; set it too")
        return self


def _config_error(error: ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return inner
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return ConfigError(f"{name}: unknown server option; known are {', '.join(sorted(ServerConfig.model_fields))}")
    given = "" if name == "api_keys" else f"={problem['input']!r}"
    rule = problem["msg"].removeprefix("Input ").removeprefix("String ")
    return ConfigError(f"{name}{given}: {rule}. {ServerConfig.model_fields[name].description}")
