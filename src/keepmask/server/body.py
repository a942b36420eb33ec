"""Request headers and bodies: read within limits, parsed strictly."""

from __future__ import annotations

import asyncio
import re
import reprlib
from collections.abc import Container
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from keepmask.errors import RequestError
from keepmask.params import MAX_LOGIT_BIAS, SamplingParams
from keepmask.server.error_answers import ApiError, error_response

__all__ = ["HeaderLimit", "parse_json", "read_body", "read_json", "read_sampling"]

Model = TypeVar("Model", bound=BaseModel)

_READ_TIMEOUT_S = 60.0  # for one piece of a body to arrive
_MAX_CONTAINERS = 2**16  # objects and lists in one body: a batch of 1024 prompts has some thousands
_UNION_MEMBER = re.compile(r"(str|int|bool|float|none|constrained-\w+|list\[.*\]|literal\[.*\]|[A-Z]\w+)")
"""How pydantic names the alternative of a union in the place of an error."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class HeaderLimit:
    """ASGI middleware that refuses a request line and headers beyond `max_bytes`.

    The HTTP parser stops at the same size when headers come in pieces, but not when they come in one.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 431."""
        if scope["type"] == "http":
            size = len(scope["raw_path"]) + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in scope["headers"])
            if size > self._max_bytes:
                refusal = ApiError(431, f"headers: at most {self._max_bytes} bytes are accepted", close=True)
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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


async def read_json(
    request: Request,
    model: type[Model],
    max_bytes: int,
    *,
    optional: bool = False,
    max_members: int = MAX_LOGIT_BIAS,
) -> Model:
    """The body as `model`. optional: no body counts as an empty object. max_members: as in `parse_json`.

    Raises ApiError 415 for another content type, and whatever `read_body` and `parse_json` raise.
    """
    if optional and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return parse_json(b"{}", model)
    return parse_json(await _json_body(request, max_bytes), model, max_members=max_members)


async def read_sampling(
    request: Request, model: type[Model], max_bytes: int, *, without: Container[str] = ()
) -> tuple[Model, dict[str, Any]]:
    """The body as `model`, and the fields of SamplingParams that stand beside those of the model.

    without: sampling fields that the route does not take. A sampling field that is null counts as left out. Raises as
    `read_json` does; unknown fields are refused.
    """
    value = _parse(await _json_body(request, max_bytes))
    if not isinstance(value, dict):
        raise RequestError(f"body: must be an object, got {_SHORT.repr(value)}")
    own = {name: member for name, member in value.items() if name in model.model_fields}
    params = {name: member for name, member in value.items() if name not in own}
    known = [name for name in SamplingParams.model_fields if name not in without]
    for name in params:
        if name not in known:
            legal = ", ".join(sorted({*known, *model.model_fields}))
            raise RequestError(f"{_SHORT.repr(name)[1:-1]}: unknown field; known are {legal}", param=name[:80])
    return _validate(own, model), {name: member for name, member in params.items() if member is not None}


def parse_json(body: bytes, model: type[Model], *, max_members: int = MAX_LOGIT_BIAS) -> Model:
    """The JSON text as `model`; unknown fields are refused at every level. Raises RequestError naming the field.

    max_members: most members of one object. Each wrong one would cost an error of its own.
    """
    return _validate(_parse(body, max_members), model)


async def _json_body(request: Request, max_bytes: int) -> bytes:
    body = await read_body(request, max_bytes)
    # A browser sends any other type to any server without asking first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "content-type: must be application/json")
    return body


def _parse(body: bytes, max_members: int = MAX_LOGIT_BIAS) -> Any:
    _check_containers(body)
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"body: not a JSON text: {error}") from None
    _check_members(value, max_members)
    return value


def _check_containers(body: bytes) -> None:
    """Refuse texts of more objects and lists than any request has: each takes a hundred times its bytes and the time
    of everybody else, since nothing runs while they are made.
    """
    if body.count(b"[") + body.count(b"{") <= _MAX_CONTAINERS:
        return
    outside_strings = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    count = outside_strings.count(b"[") + outside_strings.count(b"{")
    if count > _MAX_CONTAINERS:
        raise RequestError(f"body: {count} objects and lists; at most {_MAX_CONTAINERS} are taken, split the request")


def _validate(value: Any, model: type[Model]) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _request_error(error, model) from None


def _check_members(value: object, most: int) -> None:
    """Refuse objects with more members than any field takes."""
    if isinstance(value, dict):
        if len(value) > most:
            raise RequestError(f"body: an object with {len(value)} members; the largest taken have {most}")
        for member in value.values():
            _check_members(member, most)
    elif isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        for item in value:
            _check_members(item, most)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"body: at most {max_bytes} bytes are accepted", close=True)


def _request_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    """The first problem pydantic found, as a sentence: where, what came, what is legal."""
    problem = _nearest(error.errors(include_url=False))
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, RequestError):
        return inner
    where = _path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = f"; known are {', '.join(sorted(model.model_fields))}" if len(problem["loc"]) == 1 else ""
        return RequestError(f"{where}: unknown field{known}", param=where)
    if problem["type"] == "missing":
        return RequestError(f"{where}: must be given", param=where)
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    field = model.model_fields.get(where)
    described = f". {field.description}" if field is not None and field.description else ""
    return RequestError(f"{where or 'body'}={_SHORT.repr(problem['input'])}: {rule}{described}", param=where or None)


def _nearest(problems: list[ErrorDetails]) -> ErrorDetails:
    """The first problem; where what came could be read in several ways, that of the way which got furthest."""
    first = _path(problems[0]["loc"])
    within = [problem for problem in problems if _path(problem["loc"]).startswith(first)]
    return max(within, key=lambda problem: len(_path(problem["loc"])))


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content")."""
    path = ""
    for part in location:
        if path and isinstance(part, str) and _UNION_MEMBER.fullmatch(part):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
