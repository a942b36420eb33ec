"""`/v1/models`, `/tokenize` and `/detokenize`: what is served, and how it spells text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from keepmask.server.body import read_json
from keepmask.server.document import answers, takes
from keepmask.server.schema import DetokenizeRequest, TokenizeRequest
from keepmask.server.service import Service
from keepmask.server.stream import json_response

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["model"])

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "keepmask",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    @routes.get("/v1/models", responses=answers())
    async def models() -> Response:
        """The served model, and how many tokens its context holds."""
        return json_response({"object": "list", "data": [card()]})

    @routes.get("/v1/models/{model_name:path}", responses=answers())
    async def model(model_name: str) -> Response:
        """The model of this name."""
        service.check_model(model_name)
        return json_response(card())

    @routes.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=answers())
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or conversation."""
        body = await read_json(request, TokenizeRequest, service.config.max_body_bytes)
        service.check_model(body.model)
        if body.messages is not None:
            encoded = await service.texts.render(
                [message.for_template() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            encoded = await service.texts.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        answer: dict[str, Any] = {
            "count": len(encoded.token_ids),
            "max_model_len": service.max_model_len,
            "tokens": encoded.token_ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = await service.texts.names(encoded.token_ids)
        return json_response(answer)

    @routes.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=answers())
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = await read_json(request, DetokenizeRequest, service.config.max_body_bytes)
        service.check_model(body.model)
        service.check_token_ids(body.tokens, param="tokens")
        return json_response({"prompt": await service.texts.decode(body.tokens)})

    return routes
