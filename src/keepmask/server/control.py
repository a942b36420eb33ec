"""What the routes that pause generation and change weights accept."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keepmask.engine.engine_thread import PauseMode
from keepmask.errors import RequestError
from keepmask.server.schema import RequestId, Strict

__all__ = [
    "AbortAnyRequest",
    "FinishWeightUpdate",
    "InitWeightTransfer",
    "Pause",
    "RenameWeights",
    "StartWeightUpdate",
    "UpdateWeights",
    "WeightCheck",
    "WeightsFromDisk",
    "WorldSize",
]

Version = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
Flag = Literal["true", "false"]
Checksums = Annotated[dict[str, str], Field(max_length=100_000)]


class AbortAnyRequest(Strict):
    """Body of /abort_requests."""

    request_ids: Annotated[list[RequestId], Field(max_length=4096, fail_fast=True)] | None = None
    """The requests to end; all of them when there are none."""


class InitInfo(Strict):
    """What a transfer needs to know beforehand: nothing."""

    backend: Literal["safetensors"] = "safetensors"
    """Weights come as safetensors, in files or bodies."""


class InitWeightTransfer(Strict):
    """Body of /init_weight_transfer_engine."""

    init_info: InitInfo
    """How weights will come."""


class StartWeightUpdate(Strict):
    """Body of /start_weight_update, which may be left out."""

    is_checkpoint_format: Literal[True] | None = None
    """Names are those of the model's checkpoint."""
    partial: bool = False
    """Weights that are not sent stay as they are; by default all must be sent."""
    cast: bool = False
    """Round other floating-point types to the model's; by default they are refused."""
    discard: bool = False
    """Drop what an unfinished update has sent, and begin anew."""


class UpdateInfo(Strict):
    """Where weights are."""

    path: str = Field(min_length=1, max_length=4096)
    """A safetensors file, or a folder of them, in the server's folder for weights."""


class UpdateWeights(Strict):
    """Body of /update_weights when the weights are in files; they can also be the body themselves."""

    update_info: (
        UpdateInfo | Annotated[list[UpdateInfo], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None
    """One place or several."""
    weight_dir: str | None = Field(None, min_length=1, max_length=4096)
    """A place that holds all weights, as prime-rl sends it: start, update and finish in one."""

    @property
    def places(self) -> list[str]:
        """The paths."""
        if self.weight_dir is not None:
            return [self.weight_dir]
        infos = self.update_info if isinstance(self.update_info, list) else [self.update_info]
        return [info.path for info in infos if info is not None]

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.update_info is None) == (self.weight_dir is None):
            raise RequestError("update_info: say where the weights are, by it or by weight_dir", param="update_info")
        return self


class WeightsFromDisk(Strict):
    """Body of /update_weights_from_disk, SGLang's start, update and finish in one."""

    model_path: str = Field(min_length=1, max_length=4096)
    """A safetensors file, or a folder of them, in the server's folder for weights."""
    weight_version: Version | None = None
    """What the new weights are called."""
    load_format: Literal["auto", "safetensors"] | None = None
    """Files are safetensors."""
    abort_all_requests: bool | None = False
    """End the requests under way first."""
    flush_cache: bool | None = True
    """Without effect: what old weights computed is never used with new ones."""
    keep_pause: bool | None = False
    """Without effect: a pause lasts until it is ended."""
    is_async: Literal[False] | None = None
    """The answer comes when the weights are in place."""
    token_step: int | None = None
    """Without effect."""


class Pause(Strict):
    """Query of /pause."""

    mode: PauseMode | None = None
    """abort ends all requests, wait waits for them, keep freezes them."""
    wait_for_inflight_requests: Flag | None = None
    """true is mode wait, by its older name."""
    clear_cache: Flag = "true"
    """Forget cached prefixes, but with keep."""

    @model_validator(mode="after")
    def _say_the_same(self) -> Self:
        if self.mode not in (None, "wait") and self.wait_for_inflight_requests == "true":
            raise RequestError(
                "wait_for_inflight_requests=true: is mode=wait by its older name; send one", param="mode"
            )
        return self


class WorldSize(Strict):
    """Query of /get_world_size."""

    include_dp: Flag = "true"
    """Without effect: there is one process."""


class FinishWeightUpdate(Strict):
    """Body of /finish_weight_update, which may be left out."""

    weight_version: Version | None = None
    """What the new weights are called in `weight_versions`; by default the old version plus one."""
    checksums: Checksums | None = None
    """What the sender counted of the weights: the update is refused where these differ from what arrived."""


class RenameWeights(Strict):
    """Body of /update_weight_version."""

    new_version: Version
    """What the weights are called from now on."""


class WeightCheck(Strict):
    """Body of /weight_checker."""

    action: Literal["checksum", "compare", "reset"]
    """checksum tells the SHA-256 of every weight, compare holds it against a baseline, reset overwrites with noise."""
    baseline: Any = None
    """For compare: what checksum told, by name."""
