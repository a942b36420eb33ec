"""`/inference/v1`: token ids in, token ids with their supports out, in vLLM's shapes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from keepmask.backends.answers import MEDIA_TYPE as ARROW
from keepmask.backends.answers import encode_rollouts
from keepmask.engine.ticket import Ticket, follow
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.body import read_json
from keepmask.server.choices import Usage, mask_fields, present, version_spans
from keepmask.server.document import answers, takes
from keepmask.server.error_answers import ApiError
from keepmask.server.logprob_entries import by_id, by_text, prompt_entries
from keepmask.server.schema import AbortRequest, GenerateRequest
from keepmask.server.service import Service
from keepmask.server.stream import Attended, EventStream, answered, event, json_response
from keepmask.wire.fields import JsonForm

__all__ = ["router"]


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/inference/v1/generate", openapi_extra=takes(GenerateRequest), responses=answers(stream=True))
    async def generate(request: Request) -> Response:
        """Complete a prompt of token ids.

        `Accept: application/vnd.apache.arrow.stream` returns the rollouts as an Arrow table instead of JSON.
        """
        body = await read_json(request, GenerateRequest, service.config.max_body_bytes)
        service.check_model(body.model)
        arrow = ARROW in request.headers.get("accept", "")
        if arrow and body.stream:
            raise ApiError(406, "accept: an Arrow answer comes whole; set stream=false", param="stream")
        interval = (body.stream_interval or service.config.stream_interval) if body.stream else None
        order = service.order(
            body.token_ids, _params(body), param="token_ids", cache_salt=body.cache_salt, stream_interval=interval
        )
        name = body.request_id or service.new_name("gen")
        (ticket,) = service.submit([order], name)
        shape = _Shape(service, body, name)
        if body.stream:
            return EventStream(service.engine, [ticket], shape.events(ticket), config=service.config)
        async with Attended(service.engine, [ticket], request.receive, timeout_s=service.config.request_timeout_s):
            output = await ticket.output()

        def build() -> Response:
            if arrow:
                output.request_id = name
                return Response(encode_rollouts(output.rollouts()), media_type=ARROW)
            return json_response(shape.answer(output, ticket))

        return await answered([output], build)

    @routes.post("/inference/v1/abort_requests", openapi_extra=takes(AbortRequest), responses=answers())
    async def abort_requests(request: Request) -> Response:
        """End requests by name; each is answered with what it has."""
        body = await read_json(request, AbortRequest, service.config.max_body_bytes)
        tickets = service.tickets(body.request_ids)
        service.engine.abort(tickets)
        return json_response({"status": "aborted", "aborted": len(tickets)})

    return routes


def _params(body: GenerateRequest) -> SamplingParams:
    """The parameters as sent, but that completions without max_tokens may fill the context."""
    params = body.sampling_params
    changes: dict[str, Any] = {}
    if "max_tokens" not in params.model_fields_set:
        changes["max_tokens"] = None
    if body.output_mode == "tokens" and not params.stop and "detokenize" not in params.model_fields_set:
        changes["detokenize"] = False  # no part of the answer shows text
    return params.replace(**changes) if changes else params


class _Shape:
    """Builds the answer to one request."""

    def __init__(self, service: Service, body: GenerateRequest, name: str) -> None:
        self._body, self._name = body, name
        self._model = service.model_name
        self._form: JsonForm = body.sampling_mask_format or service.config.mask_format

    def answer(self, output: RequestOutput, ticket: Ticket) -> dict[str, Any]:
        """The whole answer."""
        usage = Usage([ticket])
        usage.add(sum(len(completion.token_ids) for completion in output.outputs))
        return {
            "request_id": self._name,
            "created": int(time.time()),
            "model": self._model,
            "output_mode": self._body.output_mode,
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": usage.as_dict(),
            "seed": output.seed,
            **present(
                {
                    "prompt_logprobs": prompt_entries(output.prompt_logprobs),
                    "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
                }
            ),
        }

    async def events(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answer as it comes: what the request as a whole has is in the first chunk."""
        options = self._body.stream_options
        usage = Usage([ticket])
        head: dict[str, Any] = {"request_id": self._name, "output_mode": self._body.output_mode}
        first = {"model": self._model, "created": int(time.time())}
        if self._body.return_token_ids:
            first["prompt_token_ids"] = ticket.order.prompt_token_ids
        async for chunks in follow([ticket]):
            for _, chunk in chunks:
                usage.add(len(chunk.token_ids))
                data = {**head, "choices": [self._choice(chunk)]}
                if first:
                    data |= {**first, "seed": ticket.seed}
                    first = {}
                if options is not None and options.continuous_usage_stats:
                    data["usage"] = usage.as_dict()
                yield event(data)
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": usage.as_dict()})

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        text = self._body.output_mode == "text"
        logprobs = by_text(output, top=self._body.sampling_params.logprobs or 0) if text else by_id(output)
        return {
            "index": output.index,
            **({"text": output.text} if text else {}),
            "token_ids": output.token_ids,
            **mask_fields(output, self._form),
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            **present({"stop_reason": output.stop_reason, "weight_versions": version_spans(output)}),
        }
