"""What the routes that pause generation and change weights accept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keepmask.server.schema import RequestId, Strict

__all__ = [
    "AbortAnyRequest",
    "FinishWeightUpdate",
    "InitWeightTransfer",
    "RenameWeights",
    "StartWeightUpdate",
    "UpdateWeights",
    "WeightCheck",
]

Version = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
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

    update_info: UpdateInfo | Annotated[list[UpdateInfo], Field(min_length=1, max_length=1024, fail_fast=True)]
    """One place or several."""


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
