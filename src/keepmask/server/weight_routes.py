"""RL control: pausing, and replacing the weights, in vLLM's and SGLang's routes. Off unless enabled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response

from keepmask.engine.engine_thread import PauseMode
from keepmask.engine.weights import WeightStage, read_safetensors
from keepmask.errors import RequestError
from keepmask.server.control import (
    AbortAnyRequest,
    FinishWeightUpdate,
    InitWeightTransfer,
    Pause,
    RenameWeights,
    StartWeightUpdate,
    UpdateWeights,
    WeightCheck,
    WeightsFromDisk,
    WorldSize,
)
from keepmask.server.error_answers import ApiError
from keepmask.server.folder_files import WeightFile, read_below
from keepmask.server.routing import BINARY, Routes
from keepmask.server.service import Service
from keepmask.server.sglang_schema import PauseGeneration
from keepmask.server.stream import json_response

__all__ = ["routes"]

_MAX_WEIGHTS = 100_000  # of one model


def routes(service: Service) -> Routes:
    """The routes."""

    def enabled() -> None:
        if not service.config.enable_weight_updates:
            raise ApiError(403, "this is switched off; start the server with --enable-weight-updates and an API key")
        service.check_alive()

    found = Routes(service.bodies, "control", before=enabled)
    _add_pausing(found, service)
    _add_updating(found, service, _Update(service))
    _add_checking(found, service)
    return found


def _add_pausing(found: Routes, service: Service) -> None:
    engine = service.engine

    async def stop(mode: PauseMode, *, clear_cache: bool) -> Response:
        if not await engine.pause(mode, clear_cache=clear_cache):
            raise ApiError(409, "resumed before the requests in flight had ended")
        return json_response({"status": "paused"})

    @found.post("/pause", query=Pause)
    async def pause(_: Request, query: Pause) -> Response:
        """Stop generating: after ending all requests (abort, the default), after they end (wait), or at once (keep).

        New requests wait for the resumption.
        """
        mode = query.mode or ("wait" if query.wait_for_inflight_requests == "true" else "abort")
        return await stop(mode, clear_cache=query.clear_cache == "true")

    @found.post("/pause_generation", body=PauseGeneration, optional=True)
    async def pause_generation(_: Request, body: PauseGeneration) -> Response:
        """The same as SGLang has it."""
        return await stop("abort" if body.mode == "abort" else "keep", clear_cache=True)

    @found.post("/resume", "/continue_generation")
    async def resume(_: Request) -> Response:
        """Go on generating."""
        await engine.resume()
        return json_response({"status": "resumed"})

    @found.get("/is_paused")
    async def is_paused(_: Request) -> Response:
        """Whether a pause is in force or on its way."""
        return json_response({"is_paused": engine.paused})

    @found.post("/abort_requests", body=AbortAnyRequest, optional=True)
    async def abort_requests(_: Request, body: AbortAnyRequest) -> Response:
        """End requests by name, or all; each is answered with what it has."""
        tickets = service.tickets(body.request_ids or None)
        engine.abort(tickets)
        return json_response({"status": "aborted", "aborted": len(tickets)})

    async def forget(_: Request) -> Response:
        """Forget the keys and values of earlier prompts."""
        await engine.call(lambda each: each.reset_prefix_cache())
        return json_response({"status": "reset"})

    found.post("/reset_prefix_cache", "/flush_cache")(forget)
    found.get("/flush_cache")(forget)


def _add_updating(found: Routes, service: Service, update: _Update) -> None:
    @found.post("/init_weight_transfer_engine", body=InitWeightTransfer)
    async def init_weight_transfer_engine(_: Request, body: InitWeightTransfer) -> Response:
        """Agree on how weights come. There is nothing to prepare."""
        assert body.init_info.backend == "safetensors"
        return json_response({"message": "Weight transfer initialized"})

    @found.post("/start_weight_update", body=StartWeightUpdate, optional=True)
    async def start_weight_update(_: Request, body: StartWeightUpdate) -> Response:
        """Begin an update. The model keeps its weights, and goes on with them, until it is finished."""
        await update.start(body)
        return json_response({"message": "Weight update started"})

    @found.post("/update_weights", body=UpdateWeights, raw=True)
    async def update_weights(request: Request) -> Response:
        """Send weights, in any number of parts: a safetensors file as the body, or where such files are."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type == BINARY:
            data = await service.bodies.read(request, service.config.max_weight_chunk_bytes)
            missing = await update.add([WeightFile("body", data, None)])
        else:
            body = await service.bodies.read_json(request, UpdateWeights)
            if body.weight_dir is not None:
                version = await update.replace(body.weight_dir, None)
                return json_response({"message": "Weights updated", "missing": 0, "weight_version": version})
            missing = await update.add(await update.read(body.places))
        return json_response({"message": "Weights updated", "missing": missing})

    @found.post("/finish_weight_update", body=FinishWeightUpdate, optional=True, max_members=_MAX_WEIGHTS)
    async def finish_weight_update(_: Request, body: FinishWeightUpdate) -> Response:
        """Put the new weights in place between two steps, all of them or, where any is missing or wrong, none."""
        return json_response({"message": "Weight update finished", "weight_version": await update.finish(body)})

    @found.post("/update_weights_from_disk", body=WeightsFromDisk)
    async def update_weights_from_disk(_: Request, body: WeightsFromDisk) -> Response:
        """Replace all weights by those in files, in one."""
        if body.abort_all_requests:
            service.engine.abort(service.tickets())
        version = await update.replace(body.model_path, body.weight_version)
        return json_response({"success": True, "message": f"weights of version {version} are in place"})

    @found.post("/update_weight_version", body=RenameWeights)
    async def update_weight_version(_: Request, body: RenameWeights) -> Response:
        """Give the weights another name."""
        await service.engine.call(lambda engine: engine.rename_weights(body.new_version))
        return json_response({"success": True, "new_version": body.new_version})


def _add_checking(found: Routes, service: Service) -> None:
    @found.get("/weight_info", "/get_weight_version")
    async def weight_info(_: Request) -> Response:
        """The version of the weights, and whether any must be sent before requests are taken."""
        return json_response({"weight_version": service.weight_version, "awaited": service.awaits_weights})

    @found.get("/get_world_size", query=WorldSize)
    async def get_world_size(_: Request, query: WorldSize) -> Response:
        """Processes that need the weights."""
        assert query.include_dp in ("true", "false")
        return json_response({"world_size": 1})

    @found.post("/weight_checker", body=WeightCheck, max_members=_MAX_WEIGHTS)
    async def weight_checker(_: Request, body: WeightCheck) -> Response:
        """Tell, compare or overwrite the weights."""
        if body.action == "reset":
            seed = secrets.randbits(63)
            await service.engine.call(lambda engine: engine.randomize_weights(torch.Generator().manual_seed(seed)))
            return json_response({"status": "reset"})
        checksums = await service.engine.call(lambda engine: engine.weight_checksums())
        if body.action == "checksum":
            return json_response({"checksums": checksums})
        if not isinstance(body.baseline, dict):
            raise RequestError("baseline: compare needs what checksum told before", param="baseline")
        mismatches = _mismatches(checksums, body.baseline)
        return json_response({"match": not mismatches, "mismatches": mismatches})


class _Update:
    """The update that is under way, if any. One request at a time works on it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stage: WeightStage | None = None
        self._lock = asyncio.Lock()

    async def start(self, body: StartWeightUpdate) -> None:
        """Raises ApiError 409 while another update is unfinished, unless it is to be discarded."""
        async with self._lock:
            if self._stage is not None and not body.discard:
                raise ApiError(409, "an update is under way: finish it, or start with discard=true to drop it")
            engine = self._service.engine.engine
            self._stage = await asyncio.to_thread(engine.stage_weights, partial=body.partial, cast=body.cast)

    async def read(self, places: Sequence[str]) -> list[WeightFile]:
        """The files there. Raises ApiError 403 where none are read, RequestError where they are not to be had."""
        root = self._service.config.weights_dir
        if root is None:
            raise ApiError(
                403,
                "files are not read; start the server with --weights-dir, or send the weights as the body",
                param="update_info",
            )
        left = (
            8 * sum(value.numel() for value in self._service.engine.engine.runner.model.state_dict().values()) + 2**27
        )
        found: list[WeightFile] = []
        for place in places:
            found += await asyncio.to_thread(read_below, root, place, max_bytes=left)
            left = max(0, left - sum(len(file.data) for file in found))
        return found

    async def add(self, files: Sequence[WeightFile]) -> int:
        """Take these files, or none of them; returns how many weights are still missing."""
        async with self._lock:
            stage = self._started()
            await asyncio.to_thread(_add, stage, files)
            return len(stage.missing)

    async def finish(self, body: FinishWeightUpdate) -> str:
        """Returns the new version. An update that is refused stays under way."""
        async with self._lock:
            stage = self._started()
            stage.check_complete()
            if body.checksums is not None:
                await asyncio.to_thread(stage.check_checksums, body.checksums)
            version = await self._exchange(stage, body.weight_version)
            self._stage = None
            return version

    async def replace(self, place: str, version: str | None) -> str:
        """All steps in one: the weights there take the place of the model's. Returns their version."""
        async with self._lock:
            if self._stage is not None:
                raise ApiError(409, "an update is under way: finish it, or start with discard=true to drop it")
            stage = await asyncio.to_thread(self._service.engine.engine.stage_weights, partial=False, cast=True)
            await asyncio.to_thread(_add, stage, await self.read([place]))
            return await self._exchange(stage, version)

    async def _exchange(self, stage: WeightStage, version: str | None) -> str:
        version = await self._service.engine.call(lambda engine: engine.update_weights(stage, version))
        self._service.awaits_weights = False
        return version

    def _started(self) -> WeightStage:
        if self._stage is None:
            raise ApiError(409, "no update is under way; call /start_weight_update first")
        return self._stage


def _add(stage: WeightStage, files: Sequence[WeightFile]) -> None:
    """Stage the tensors of all files, each once. Raises RequestError, and stages none, where one is in two of them."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for file in files:
        for name, tensor in read_safetensors(file.data, name=file.name, names=file.tensors).items():
            if name in tensors:
                raise RequestError(
                    f"weights: {name} is in {places[name]} and in {file.name}; give it once", param="weights"
                )
            tensors[name], places[name] = tensor, file.name
    stage.add(tensors)


def _mismatches(checksums: Mapping[str, str], baseline: Mapping[str, Any]) -> list[str]:
    """Names of the weights that differ, or that only one side has."""
    return sorted(name for name in {*checksums, *baseline} if checksums.get(name) != baseline.get(name))
