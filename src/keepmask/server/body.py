"""`Bodies`: request bodies, read within limits and parsed strictly.

Written by hand, since the libraries have no place for it: Starlette and uvicorn read a body without a bound on its
size or its time; `json` takes NaN, and neither it nor pydantic bounds what a body turns into before it has done so.
Models, types and ranges are pydantic's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from keepmask.errors import RequestError
from keepmask.params import MAX_LOGIT_BIAS
from keepmask.server.error_answers import ApiError
from keepmask.server.schema import known_fields

__all__ = ["Bodies"]

Model = TypeVar("Model", bound=BaseModel)

_log = logging.getLogger(__name__)

_READ_S = 60.0  # for a body to arrive, and as much more as it takes at
_LEAST_RATE = 2**18  # bytes a second
_MAX_CONTAINERS = 2**16  # objects and lists in one body: a batch of 1024 prompts has some thousands
_MAX_VALUES = 2**20  # in lists and objects of one body: 128 prompts of 8,192 tokens. Parsing them takes 60 ms
_LONG_BYTES = 2**16  # bodies from here on are parsed on a thread
_UNION_MEMBER = re.compile(r"(str|int|bool|float|none|constrained-\w+|list\[.*\]|literal\[.*\]|[A-Z]\w+)")
"""How pydantic names the alternative of a union in the place of an error."""
_SAMPLING = "sampling_params."
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class Bodies:
    """Reads the bodies of requests to one server.

    max_bytes: of one body. ignore_unknown: unknown fields are warned of, once each, and dropped; otherwise they are
    refused, at every level.
    """

    read_s = _READ_S

    def __init__(self, max_bytes: int, *, ignore_unknown: bool = False) -> None:
        self._max_bytes, self._ignore_unknown = max_bytes, ignore_unknown
        self._warned: set[str] = set()

    async def read(self, request: Request, max_bytes: int | None = None) -> bytes:
        """The whole body. Raises ApiError 413 as soon as it is known to be longer, 408 when it comes too slowly, 400
        when the client stops sending it.
        """
        most = self._max_bytes if max_bytes is None else max_bytes
        declared = request.headers.get("content-length")
        if declared is not None and declared.isdecimal() and int(declared) > most:
            raise _too_long(most)
        parts: list[bytes] = []
        size, began_s = 0, asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(began_s + self.read_s + size / _LEAST_RATE):
                    message = await request.receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self.read_s:.0f} s", close=True) from None
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client went away before the body was complete", close=True)
            size += len(message.get("body", b""))
            if size > most:
                raise _too_long(most)
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def read_json(
        self, request: Request, model: type[Model], *, optional: bool = False, max_members: int = MAX_LOGIT_BIAS
    ) -> Model:
        """The body as `model`. optional: no body counts as an empty object. max_members: as in `parse`.

        Raises ApiError 415 for another content type, and whatever `read` and `parse` raise.
        """
        body = await self.read(request)
        if optional and not body:
            return self.check({}, model)
        # A browser sends any other type to any server without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "content-type: must be application/json")
        if len(body) < _LONG_BYTES:
            return self.parse(body, model, max_members=max_members)
        return await asyncio.to_thread(self.parse, body, model, max_members=max_members)

    def parse(self, body: bytes, model: type[Model], *, max_members: int = MAX_LOGIT_BIAS) -> Model:
        """The JSON text as `model`. max_members: most members of one object, since each wrong one costs an error.

        Raises RequestError naming the field.
        """
        _check_size(body)
        try:
            value = pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise RequestError(f"body: not a JSON text: {error}") from None
        _check_members(value, max_members)
        return self.check(value, model)

    def check(self, value: Any, model: type[Model]) -> Model:
        """The value as `model`. Raises RequestError naming the field."""
        try:
            return model.model_validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            unknown = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
            if not unknown or not self._ignore_unknown:
                raise _request_error(problems, model) from None
        for location in unknown:
            self._drop(value, location)
        return self.check(value, model)

    def _drop(self, value: Any, location: tuple[int | str, ...]) -> None:
        """Remove the member at this place, and say so the first time. Parts that name a type lead nowhere."""
        path = re.sub(r"\[\d+\]", "[]", _path(location))
        if path not in self._warned and len(self._warned) < _MAX_CONTAINERS:
            self._warned.add(path)
            _log.warning("%s: unknown field, ignored", path[:200])
        for part in location[:-1]:
            inside = isinstance(value, list) if isinstance(part, int) else isinstance(value, dict) and part in value
            value = value[part] if inside else value
        del value[location[-1]]


def _check_size(body: bytes) -> None:
    """Refuse texts of more objects, lists and values than any request has: each takes tens of times its bytes, and the
    time of everybody else, since nothing runs while they are made.
    """
    if body.count(b"[") + body.count(b"{") <= _MAX_CONTAINERS and body.count(b",") <= _MAX_VALUES:
        return
    outside_strings = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    containers = outside_strings.count(b"[") + outside_strings.count(b"{")
    if containers > _MAX_CONTAINERS:
        raise RequestError(
            f"body: {containers} objects and lists; at most {_MAX_CONTAINERS} are taken, split the request"
        )
    if (values := outside_strings.count(b",")) > _MAX_VALUES:
        raise RequestError(f"body: {values} values; at most {_MAX_VALUES} are taken, split the request")


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


def _request_error(problems: list[ErrorDetails], model: type[BaseModel]) -> RequestError:
    """The first problem pydantic found, as a sentence: where, what came, what is legal."""
    problem = _nearest(problems)
    inner = problem.get("ctx", {}).get("error")
    if isinstance(inner, RequestError):
        return inner
    where = _path(problem["loc"]).removeprefix(_SAMPLING)  # as SamplingParams names its own
    if problem["type"] == "extra_forbidden":
        known = f"; known are {', '.join(known_fields(model, problem['loc'][:-1]))}" if "." not in where else ""
        return RequestError(f"{where[:80]}: unknown field{known}", param=where[:80])
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
