"""Request bodies: read within a limit, parsed strictly."""

from __future__ import annotations

import asyncio
import reprlib
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from keepmask.errors import RequestError
from keepmask.server.errors import ApiError

__all__ = ["parse_json", "read_body", "read_json"]

Model = TypeVar("Model", bound=BaseModel)

_READ_TIMEOUT_S = 60.0  # for one piece of a body to arrive
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be longer, 400 when the client stops sending it."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), _READ_TIMEOUT_S)
        except TimeoutError:
            raise ApiError(400, f"the body stopped arriving for {_READ_TIMEOUT_S:.0f} s", close=True) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client went away before the body was complete", close=True)
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise _too_long(max_bytes)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def read_json(request: Request, model: type[Model], max_bytes: int, *, optional: bool = False) -> Model:
    """The body as `model`. optional: no body counts as an empty object.

    Raises ApiError 415 for another content type, and whatever `read_body` and `parse_json` raise.
    """
    body = await read_body(request, max_bytes)
    if optional and not body:
        return parse_json(b"{}", model)
    # A browser sends any other type to any server without asking first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "content-type: must be application/json")
    return parse_json(body, model)


def parse_json(body: bytes, model: type[Model]) -> Model:
    """The JSON text as `model`; unknown fields are refused at every level. Raises RequestError naming the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error, model) from None


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"body: at most {max_bytes} bytes are accepted", close=True)


def _request_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    """The first problem pydantic found, as a sentence: where, what came, what is legal."""
    problem = error.errors(include_url=False)[0]
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, RequestError):
        return inner
    where = _path(problem["loc"])
    if problem["type"] == "json_invalid":
        return RequestError(f"body: not a JSON text: {problem['ctx']['error']}")
    if problem["type"] == "extra_forbidden":
        known = f"; known are {', '.join(sorted(model.model_fields))}" if len(problem["loc"]) == 1 else ""
        return RequestError(f"{where}: unknown field{known}", param=where)
    if problem["type"] == "missing":
        return RequestError(f"{where}: must be given", param=where)
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    field = model.model_fields.get(where)
    described = f". {field.description}" if field is not None and field.description else ""
    return RequestError(f"{where or 'body'}={_SHORT.repr(problem['input'])}: {rule}{described}", param=where or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
