"""The OpenAPI document, from the routes and the models of their bodies.

Written by hand: FastAPI makes one of the models in a handler's signature, but reads their bodies itself, without the
limits of `body.py`. The schemas are pydantic's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from keepmask import __version__
from keepmask.params import SamplingParams
from keepmask.server.routing import BINARY, JSON, Taken

__all__ = ["describe_api"]

_REFERENCE = "#/components/schemas/{model}"
_REFUSALS = {
    400: "The request cannot be served as it is",
    401: "No valid API key",
    403: "Switched off on this server, or not for this host",
    404: "No such model",
    406: "Not available in the form asked for",
    408: "The body came too slowly",
    409: "Not in this order",
    413: "The body is too long",
    415: "The body is not declared as JSON",
    429: "Too much at once; try again",
    431: "The headers are too long",
    500: "The engine failed while answering",
    503: "No requests are taken",
}


class Problem(BaseModel):
    """Why a request was not served."""

    message: str
    type: str
    param: str | None = Field(description="The field at fault, where one is")
    code: int | str = Field(description="The HTTP status, or what tells this error from others of it")


class ErrorAnswer(BaseModel):
    """Every answer other than 200."""

    error: Problem


def describe_api(routes: Iterable[Route]) -> dict[str, Any]:
    """The document, with the schemas of all bodies."""
    paths: dict[str, Any] = {}
    bodies: list[type[BaseModel]] = [ErrorAnswer]
    for route in routes:
        taken: Taken = vars(route.endpoint)["taken"]
        (method,) = (route.methods or set()) - {"HEAD"}
        paths.setdefault(route.path.replace(":path", ""), {})[method.lower()] = _operation(route, taken)
        if taken.body is not None and taken.body not in bodies:
            bodies.append(taken.body)
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    schemas: dict[str, Any] = definitions["$defs"]
    for schema in schemas.values():
        _flatten(schema, schemas[SamplingParams.__name__]["properties"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "keepmask",
            "version": __version__,
            "description": "Rollouts with the exact support of every token",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: Route, taken: Taken) -> dict[str, Any]:
    """One method of one path."""
    refusal = {"content": {JSON: {"schema": {"$ref": _REFERENCE.format(model=ErrorAnswer.__name__)}}}}
    operation: dict[str, Any] = {
        "tags": [taken.tag],
        "operationId": f"{route.name}{route.path_format.replace('/', '_')}",
        "description": inspect.getdoc(route.endpoint),
        "responses": {
            "200": {"description": "Done", "content": {media_type: {} for media_type in taken.media_types}},
            **{str(status): {"description": text, **refusal} for status, text in _REFUSALS.items()},
        },
    }
    parameters = [{"name": name, "in": "path", "required": True, "schema": {}} for name in route.param_convertors]
    if taken.query is not None:
        properties = taken.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    if parameters:
        operation["parameters"] = parameters
    if taken.body is not None:
        content: dict[str, Any] = {JSON: {"schema": {"$ref": _REFERENCE.format(model=taken.body.__name__)}}}
        if taken.raw:
            content[BINARY] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": not taken.optional, "content": content}
    return operation


def _flatten(schema: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Show the sampling parameters where they stand on the wire: side by side with the other fields."""
    if "params" in schema.get("properties", {}):
        del schema["properties"]["params"]
        schema["required"] = [name for name in schema.get("required", ()) if name != "params"]
        schema["properties"] = sampling | schema["properties"]
