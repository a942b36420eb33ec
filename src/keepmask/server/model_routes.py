"""`/v1/models`, `/tokenize` and `/detokenize`: what is served, and how it spells text."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from keepmask import __version__
from keepmask.server.routing import Routes
from keepmask.server.schema import DetokenizeRequest, TokenizeRequest
from keepmask.server.service import Service
from keepmask.server.stream import json_response

__all__ = ["routes"]


def routes(service: Service) -> Routes:
    """The routes."""
    found = Routes(service.bodies, "model")

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

    @found.get("/v1/models")
    async def models(_: Request) -> Response:
        """The served model, and how many tokens its context holds."""
        return json_response({"object": "list", "data": [card()]})

    @found.get("/v1/models/{model_name:path}")
    async def model(request: Request) -> Response:
        """The model of this name."""
        service.check_model(request.path_params["model_name"])
        return json_response(card())

    @found.get("/server_info", "/get_server_info", "/model_info", "/get_model_info")
    async def server_info(_: Request) -> Response:
        """What is served: by the names of SGLang and, in vllm_config, by those of vLLM."""
        return json_response(_server_info(service))

    @found.post("/tokenize", body=TokenizeRequest)
    async def tokenize(_: Request, body: TokenizeRequest) -> Response:
        """The tokens of a text or conversation."""
        service.check_model(body.model)
        if body.messages is not None:
            encoded = await service.texts.render(
                body.messages, add_special_tokens=bool(body.add_special_tokens), template=body.rendering()
            )
        else:
            encoded = await service.texts.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        answer: dict[str, Any] = {
            "count": len(encoded.token_ids),
            "max_model_len": service.max_model_len,
            "tokens": encoded.token_ids,
            "token_strs": await service.texts.names(encoded.token_ids) if body.return_token_strs else None,
        }
        return json_response(answer)

    @found.post("/detokenize", body=DetokenizeRequest)
    async def detokenize(_: Request, body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        service.check_model(body.model)
        service.check_token_ids(body.tokens, param="tokens")
        return json_response({"prompt": await service.texts.decode(body.tokens)})

    return found


def _server_info(service: Service) -> dict[str, Any]:
    config = service.engine_config
    return {
        "model_path": config.model,
        "served_model_name": service.model_name,
        "is_generation": True,
        "context_length": service.max_model_len,
        "weight_version": service.weight_version,
        "version": __version__,
        "vllm_config": {
            "model_config": {
                "model": config.model,
                "served_model_name": service.model_name,
                "max_model_len": service.max_model_len,
                "logprobs_mode": config.logprobs_mode,
                "return_sampling_mask": config.return_sampling_mask,
            },
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 1},
            "weight_transfer_config": {"backend": "safetensors"},
        },
    }
