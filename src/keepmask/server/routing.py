"""`Routes`: handlers by path and method, with the models of what they take.

A handler gets the request and, where the route names them, its query and its body as models, checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepmask.params import MAX_LOGIT_BIAS
from keepmask.server.body import Bodies
from keepmask.server.schema import Strict

__all__ = ["BINARY", "EVENTS", "JSON", "Routes", "Taken"]

JSON, EVENTS, BINARY = "application/json", "text/event-stream", "application/octet-stream"

Handler = Callable[..., Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one route takes and answers.

    raw: whether the handler reads the body itself, which may also be bytes.
    """

    tag: str
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    optional: bool = False
    raw: bool = False
    max_members: int = MAX_LOGIT_BIAS
    media_types: tuple[str, ...] = (JSON,)


class Routes:
    """Collects the routes of one kind. before: called ahead of every handler; what it raises is the answer."""

    def __init__(self, bodies: Bodies, tag: str, *, before: Callable[[], None] | None = None) -> None:
        self.routes: list[Route] = []
        self._bodies, self._tag, self._before = bodies, tag, before

    def get(self, *paths: str, **taken: Any) -> Callable[[Handler], Handler]:
        """Route GET and HEAD of these paths to the decorated handler. taken: fields of `Taken`."""
        return self._add("GET", paths, Taken(tag=self._tag, **taken))

    def post(self, *paths: str, **taken: Any) -> Callable[[Handler], Handler]:
        """Route POST of these paths to the decorated handler. taken: fields of `Taken`."""
        return self._add("POST", paths, Taken(tag=self._tag, **taken))

    def _add(self, method: str, paths: tuple[str, ...], taken: Taken) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            @wraps(handler)
            async def endpoint(request: Request) -> Response:
                if self._before is not None:
                    self._before()
                return await handler(request, *await self._arguments(request, taken))

            endpoint.taken = taken  # type: ignore[attr-defined]
            self.routes += [Route(path, endpoint, methods=[method]) for path in paths]
            return handler

        return add

    async def _arguments(self, request: Request, taken: Taken) -> list[BaseModel]:
        arguments: list[BaseModel] = []
        query = dict(request.query_params)
        if taken.query is not None:
            arguments.append(self._bodies.check(query, taken.query))
        elif query and request.method == "POST":
            self._bodies.check(query, Strict)
        if taken.body is not None and not taken.raw:
            arguments.append(
                await self._bodies.read_json(
                    request, taken.body, optional=taken.optional, max_members=taken.max_members
                )
            )
        return arguments
