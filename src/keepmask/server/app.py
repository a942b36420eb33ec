"""`create_app`: the routes and what stands before them."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from keepmask import __version__
from keepmask.errors import KeepmaskError
from keepmask.server import model_routes, openai, sglang, tokens, weight_routes
from keepmask.server.auth import Auth
from keepmask.server.body import HeaderLimit
from keepmask.server.document import answers, describe_api
from keepmask.server.error_answers import ApiError, Unforeseen, error_response
from keepmask.server.prometheus import MEDIA_TYPE as METRICS_TYPE
from keepmask.server.service import Service
from keepmask.server.stream import json_response

__all__ = ["create_app"]

_log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The ASGI application of one served model; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        # The model and its libraries stay: looking through their objects for garbage would hold every stream up.
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
        await asyncio.get_running_loop().run_in_executor(None, service.engine.close)
        service.texts.close()

    app = FastAPI(
        title="keepmask",
        version=__version__,
        description="Rollouts with the exact support of every token",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.include_router(_basics(service))
    for routes in (tokens, openai, sglang, model_routes, weight_routes):
        app.include_router(routes.router(service))
    app.add_middleware(Unforeseen)
    app.add_middleware(Auth, keys=service.config.api_keys)
    app.add_middleware(HeaderLimit, max_bytes=service.config.max_header_bytes)
    app.add_exception_handler(KeepmaskError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_exception)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(describe_api(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _basics(service: Service) -> APIRouter:
    routes = APIRouter(tags=["server"])

    @routes.get("/health", responses=answers())
    async def health() -> Response:
        """200 while requests are taken, 503 once the engine has stopped or the server is about to."""
        service.check_ready()
        return json_response({})

    @routes.get("/version", responses=answers())
    async def version() -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    @routes.get("/metrics", responses=answers(media_type="text/plain"))
    async def metrics() -> Response:
        """Prometheus metrics, with vLLM's names where vLLM has them."""
        return Response(service.metrics.exposition(), media_type=METRICS_TYPE)

    return routes


async def _on_refusal(_: Request, error: Exception) -> Response:
    response = error_response(error)
    if response.status_code == 500:
        _log.error("a request failed", exc_info=error)
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in our shape."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path[:200], (error.headers or {}).get("Allow")
    if error.status_code == 404:
        return error_response(ApiError(404, f"{path}: no such route; GET /openapi.json tells those there are"))
    if error.status_code == 405 and allowed:
        response = error_response(ApiError(405, f"{request.method} {path}: only {allowed} is taken there"))
        response.headers["allow"] = allowed
        return response
    return error_response(ApiError(error.status_code, str(error.detail)))
