"""RL control: pausing, and replacing the weights, in vLLM's routes. Off unless enabled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, get_args

import torch
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from keepmask.engine.engine_thread import PauseMode
from keepmask.engine.weights import WeightStage, read_safetensors
from keepmask.errors import RequestError
from keepmask.server.body import read_body, read_json
from keepmask.server.control import (
    AbortAnyRequest,
    FinishWeightUpdate,
    InitWeightTransfer,
    RenameWeights,
    StartWeightUpdate,
    UpdateWeights,
    WeightCheck,
)
from keepmask.server.document import answers, takes
from keepmask.server.error_answers import ApiError
from keepmask.server.folder_files import read_below
from keepmask.server.service import Service
from keepmask.server.stream import json_response

__all__ = ["router"]

_BINARY = "application/octet-stream"
_MAX_WEIGHTS = 100_000  # of one model
_MODES = get_args(PauseMode)


def router(service: Service) -> APIRouter:
    """The routes."""

    async def enabled() -> None:
        if not service.config.enable_weight_updates:
            raise ApiError(403, "this is switched off; start the server with --enable-weight-updates and an API key")
        service.check_alive()

    routes = APIRouter(tags=["control"], dependencies=[Depends(enabled)])
    _add_pausing(routes, service)
    _add_updating(routes, service, _Update(service))
    _add_checking(routes, service)
    return routes


def _add_pausing(routes: APIRouter, service: Service) -> None:
    engine, limit = service.engine, service.config.max_body_bytes

    @routes.post("/pause", openapi_extra=_query(mode={"enum": [*_MODES]}, clear_cache={"type": "boolean"}))
    async def pause(request: Request) -> Response:
        """Stop generating. mode: end all requests (abort, the default), wait for them (wait), or freeze them (keep).

        New requests wait for the resumption. clear_cache: forget cached prefixes, but with keep; true by default.
        """
        given = _read_query(request, {"mode": _MODES, "clear_cache": ("true", "false")})
        mode: Any = given.get("mode", "abort")
        if not await engine.pause(mode, clear_cache=given.get("clear_cache") != "false"):
            raise ApiError(409, "resumed before the requests in flight had ended")
        return json_response({"status": "paused"})

    @routes.post("/resume", responses=answers())
    async def resume(request: Request) -> Response:
        """Go on generating."""
        _read_query(request, {})
        await engine.resume()
        return json_response({"status": "resumed"})

    @routes.get("/is_paused", responses=answers())
    async def is_paused() -> Response:
        """Whether a pause is in force or on its way."""
        return json_response({"is_paused": engine.paused})

    @routes.post("/abort_requests", openapi_extra=takes(AbortAnyRequest, required=False), responses=answers())
    async def abort_requests(request: Request) -> Response:
        """End requests by name, or all; each is answered with what it has."""
        body = await read_json(request, AbortAnyRequest, limit, optional=True)
        tickets = service.tickets(body.request_ids or None)
        engine.abort(tickets)
        return json_response({"status": "aborted", "aborted": len(tickets)})

    @routes.post("/reset_prefix_cache", responses=answers())
    async def reset_prefix_cache() -> Response:
        """Forget the keys and values of earlier prompts."""
        await engine.call(lambda each: each.reset_prefix_cache())
        return json_response({"status": "reset"})


def _add_updating(routes: APIRouter, service: Service, update: _Update) -> None:
    limit = service.config.max_body_bytes

    @routes.post("/init_weight_transfer_engine", openapi_extra=takes(InitWeightTransfer), responses=answers())
    async def init_weight_transfer_engine(request: Request) -> Response:
        """Agree on how weights come. There is nothing to prepare."""
        await read_json(request, InitWeightTransfer, limit)
        return json_response({"message": "Weight transfer initialized"})

    @routes.post("/start_weight_update", openapi_extra=takes(StartWeightUpdate, required=False), responses=answers())
    async def start_weight_update(request: Request) -> Response:
        """Begin an update. The model keeps its weights, and goes on with them, until it is finished."""
        await update.start(await read_json(request, StartWeightUpdate, limit, optional=True))
        return json_response({"message": "Weight update started"})

    @routes.post("/update_weights", openapi_extra=_takes_weights(), responses=answers())
    async def update_weights(request: Request) -> Response:
        """Send weights, in any number of parts: a safetensors file as the body, or where such files are."""
        missing = await update.add(request)
        return json_response({"message": "Weights updated", "missing": missing})

    @routes.post("/finish_weight_update", openapi_extra=takes(FinishWeightUpdate, required=False), responses=answers())
    async def finish_weight_update(request: Request) -> Response:
        """Put the new weights in place between two steps, all of them or, where any is missing or wrong, none."""
        body = await read_json(request, FinishWeightUpdate, limit, optional=True, max_members=_MAX_WEIGHTS)
        version = await update.finish(body)
        return json_response({"message": "Weight update finished", "weight_version": version})

    @routes.post("/update_weight_version", openapi_extra=takes(RenameWeights), responses=answers())
    async def update_weight_version(request: Request) -> Response:
        """Give the weights another name."""
        body = await read_json(request, RenameWeights, limit)
        await service.engine.call(lambda engine: engine.rename_weights(body.new_version))
        return json_response({"success": True, "new_version": body.new_version})


def _add_checking(routes: APIRouter, service: Service) -> None:
    @routes.get("/weight_info", responses=answers())
    async def weight_info() -> Response:
        """The version of the weights, and whether any must be sent before requests are taken."""
        return json_response({"weight_version": service.weight_version, "awaited": service.awaits_weights})

    @routes.get("/get_world_size", responses=answers(), openapi_extra=_query(include_dp={"type": "boolean"}))
    async def get_world_size(request: Request) -> Response:
        """Processes that need the weights."""
        _read_query(request, {"include_dp": ("true", "false")})
        return json_response({"world_size": 1})

    @routes.post("/weight_checker", openapi_extra=takes(WeightCheck), responses=answers())
    async def weight_checker(request: Request) -> Response:
        """Tell, compare or overwrite the weights."""
        body = await read_json(request, WeightCheck, service.config.max_body_bytes, max_members=_MAX_WEIGHTS)
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

    async def add(self, request: Request) -> int:
        """Take one part; returns how many weights are still missing."""
        async with self._lock:
            stage = self._started()
            for name, data in (await self._parts(request)).items():
                await asyncio.to_thread(_add, stage, name, data)
            return len(stage.missing)

    async def finish(self, body: FinishWeightUpdate) -> str:
        """Returns the new version. An update that is refused stays under way."""
        async with self._lock:
            stage = self._started()
            stage.check_complete()
            if body.checksums is not None:
                await asyncio.to_thread(stage.check_checksums, body.checksums)
            version = await self._service.engine.call(lambda engine: engine.update_weights(stage, body.weight_version))
            self._stage = None
            self._service.awaits_weights = False
            return version

    def _started(self) -> WeightStage:
        if self._stage is None:
            raise ApiError(409, "no update is under way; call /start_weight_update first")
        return self._stage

    async def _parts(self, request: Request) -> dict[str, bytes]:
        """Safetensors files, by their names."""
        config = self._service.config
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == _BINARY:
            return {"body": await read_body(request, config.max_weight_chunk_bytes)}
        body = await read_json(request, UpdateWeights, config.max_body_bytes)
        if config.weights_dir is None:
            raise ApiError(
                403,
                "files are not read; start the server with --weights-dir, or send the weights as the body",
                param="update_info",
            )
        places = body.update_info if isinstance(body.update_info, list) else [body.update_info]
        limit = 8 * sum(value.numel() for value in self._service.engine.engine.runner.model.state_dict().values())
        found: dict[str, bytes] = {}
        for place in places:
            found |= await asyncio.to_thread(read_below, config.weights_dir, place.path, max_bytes=limit + 2**27)
        return found


def _add(stage: WeightStage, name: str, data: bytes) -> None:
    stage.add(read_safetensors(data, name=name))


def _mismatches(checksums: Mapping[str, str], baseline: Mapping[str, Any]) -> list[str]:
    """Names of the weights that differ, or that only one side has."""
    return sorted(name for name in {*checksums, *baseline} if checksums.get(name) != baseline.get(name))


def _query(**parameters: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in parameters.items()]}


def _read_query(request: Request, legal: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The query's parameters. Raises RequestError for others, and for other values than the legal ones."""
    for name, value in request.query_params.multi_items():
        if name not in legal:
            known = f"known are {', '.join(legal)}" if legal else "there are none"
            raise RequestError(f"{name[:80]}: unknown query parameter; {known}", param=name[:80])
        if value not in legal[name]:
            raise RequestError(f"{name}={value[:80]!r}: must be one of {', '.join(legal[name])}", param=name)
    return dict(request.query_params)


def _takes_weights() -> dict[str, Any]:
    described = takes(UpdateWeights)
    described["requestBody"]["content"][_BINARY] = {"schema": {"type": "string", "format": "binary"}}
    return described
