"""The OpenAPI document: what each route takes and answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from keepmask.params import SamplingParams
from keepmask.server.control import (
    AbortAnyRequest,
    FinishWeightUpdate,
    InitWeightTransfer,
    RenameWeights,
    StartWeightUpdate,
    UpdateWeights,
    WeightCheck,
)
from keepmask.server.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from keepmask.server.sglang_schema import SGLangAbort, SGLangGenerate

__all__ = ["answers", "describe_api", "takes"]

_BODIES: tuple[type[BaseModel], ...] = (
    GenerateRequest,
    AbortRequest,
    CompletionRequest,
    ChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    SGLangGenerate,
    SGLangAbort,
    AbortAnyRequest,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeights,
    FinishWeightUpdate,
    RenameWeights,
    WeightCheck,
)
_WITH_SAMPLING = (CompletionRequest, ChatRequest)
"""Bodies that hold sampling parameters side by side with their own fields."""
_REFERENCE = "#/components/schemas/{model}"


class Problem(BaseModel):
    """Why a request was not served."""

    message: str
    type: str
    param: str | None = Field(description="The field at fault, where one is")
    code: int = Field(description="The HTTP status")


class ErrorAnswer(BaseModel):
    """Every answer other than 200."""

    error: Problem


def takes(body: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The part of a route's description that says it takes this JSON body."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def answers(*, stream: bool = False, media_type: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """The part of a route's description that says what it answers."""
    ok: dict[str, Any] = {media_type: {}}
    if stream:
        ok["text/event-stream"] = {}
    refusals = {
        400: "The request cannot be served as it is",
        401: "No valid API key",
        403: "Switched off on this server",
        404: "No such model",
        406: "Not available in the form asked for",
        409: "Not in this order",
        413: "The body is too long",
        415: "The body is not declared as JSON",
        429: "Too much at once; try again",
        431: "The headers are too long",
        500: "The engine failed while answering",
        503: "No requests are taken",
    }
    documented: dict[int | str, dict[str, Any]] = {200: {"description": "Done", "content": ok}}
    return documented | {status: {"model": ErrorAnswer, "description": text} for status, text in refusals.items()}


def describe_api(app: FastAPI) -> dict[str, Any]:
    """The document, with the schemas of all bodies."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
    sampling = definitions["$defs"][SamplingParams.__name__]["properties"]
    for body in _WITH_SAMPLING:
        schema = definitions["$defs"][body.__name__]
        schema["properties"] = {name: field for name, field in sampling.items() if name != "detokenize"} | schema[
            "properties"
        ]
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return document
