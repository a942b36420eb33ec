"""`create_app`: the routes and what stands before them."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepmask import __version__
from keepmask.errors import KeepmaskError
from keepmask.server import model_routes, openai, sglang, tokens, weight_routes
from keepmask.server.auth import Auth
from keepmask.server.document import describe_api
from keepmask.server.error_answers import ApiError, Unforeseen, error_response
from keepmask.server.head_checks import HeadChecks
from keepmask.server.prometheus import MEDIA_TYPE as METRICS_TYPE
from keepmask.server.routing import Routes
from keepmask.server.service import Service
from keepmask.server.stream import json_response

__all__ = ["create_app"]

_log = logging.getLogger(__name__)


def create_app(service: Service) -> Starlette:
    """The ASGI application of one served model; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        # The model and its libraries stay: looking through their objects for garbage would hold every stream up.
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
        await asyncio.get_running_loop().run_in_executor(None, service.engine.close)
        service.texts.close()

    kinds = (tokens, openai, sglang, model_routes, weight_routes)
    routes = [*_basics(service).routes, *(route for kind in kinds for route in kind.routes(service).routes)]
    document: dict[str, Any] = {}

    async def openapi(_: Request) -> Response:
        if not document:
            document.update(describe_api(routes))
        return json_response(document)

    config = service.config
    hosts = None if config.api_keys else ["localhost", config.host, *config.allowed_hosts]
    return Starlette(
        routes=[*routes, Route("/openapi.json", openapi)],
        middleware=[
            Middleware(HeadChecks, max_bytes=config.max_header_bytes, hosts=hosts),
            Middleware(Auth, keys=config.api_keys),
            Middleware(Unforeseen),
        ],
        exception_handlers={KeepmaskError: _on_refusal, HTTPException: _on_http_exception},
        lifespan=lifespan,
    )


def _basics(service: Service) -> Routes:
    routes = Routes(service.bodies, "server")

    @routes.get("/health", "/ping")
    async def health(_: Request) -> Response:
        """200 while requests are taken, 503 once the engine has stopped or the server is about to."""
        service.check_ready()
        return json_response({})

    @routes.get("/version")
    async def version(_: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    @routes.get("/metrics", media_types=("text/plain",))
    async def metrics(_: Request) -> Response:
        """Prometheus metrics, with vLLM's names where vLLM has them."""
        return Response(await asyncio.to_thread(service.metrics.exposition), media_type=METRICS_TYPE)

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
