"""`/inference/v1`: token ids in, token ids with their supports out, in vLLM's shapes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from keepmask.backends.answers import MEDIA_TYPE as ARROW
from keepmask.backends.answers import encode_rollouts
from keepmask.engine.ticket import Ticket, follow
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.choices import Usage, mask_fields, version_spans
from keepmask.server.error_answers import ApiError
from keepmask.server.logprob_entries import by_id, by_text, prompt_entries
from keepmask.server.routing import EVENTS, JSON, Routes
from keepmask.server.schema import AbortRequest, GenerateRequest
from keepmask.server.service import Service
from keepmask.server.stream import JsonAnswer, json_response, respond

__all__ = ["routes"]

_NAMES = {"prompt": "token_ids", "prompt_token_ids": "token_ids"}
_ELSEWHERE = dict.fromkeys(
    ("prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")
)
"""What vLLM tells of other features, null without them."""


def routes(service: Service) -> Routes:
    """The routes."""
    found = Routes(service.bodies, "tokens")

    @found.post("/inference/v1/generate", body=GenerateRequest, media_types=(JSON, EVENTS, ARROW))
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Complete a prompt of token ids.

        `Accept: application/vnd.apache.arrow.stream` returns the rollouts as an Arrow table instead of JSON.
        """
        service.check_model(body.model)
        arrow = ARROW in request.headers.get("accept", "")
        if arrow and body.stream:
            raise ApiError(406, "accept: an Arrow answer comes whole; set stream=false", param="stream")
        interval = body.stream_interval or body.sampling_params.stream_interval or service.config.stream_interval
        order = await service.order(
            body.token_ids,
            _params(body, service.max_model_len - len(body.token_ids)),
            names=_NAMES,
            cache_salt=body.cache_salt,
            stream_interval=interval if body.stream else None,
        )
        name = service.name(body.request_id, request.headers.get("x-request-id"), "gen")
        (ticket,) = service.submit([order], name)
        shape = _Shape(service, body, name)

        def whole(outputs: Sequence[RequestOutput]) -> Response:
            (output,) = outputs
            if arrow:
                output.request_id = name
                return Response(encode_rollouts(output.rollouts()), media_type=ARROW)
            return JsonAnswer(service, shape.answer(output, ticket), name=name)

        events = shape.events(ticket) if body.stream else None
        return await respond(service, request, [ticket], name=name, whole=whole, events=events)

    @found.post("/inference/v1/abort_requests", body=AbortRequest)
    async def abort_requests(_: Request, body: AbortRequest) -> Response:
        """End requests by name; each is answered with what it has."""
        tickets = service.tickets(body.request_ids)
        service.engine.abort(tickets)
        return json_response({"status": "aborted", "aborted": len(tickets)})

    return found


def _params(body: GenerateRequest, room: int) -> SamplingParams:
    """The parameters as sent, but that completions may fill the context, of which `room` tokens are left: those without
    max_tokens and, as in vLLM, those with more.
    """
    params = body.sampling_params.params
    changes: dict[str, Any] = {}
    if "max_tokens" not in params.model_fields_set or (params.max_tokens or 0) > room > 0:
        changes["max_tokens"] = None
    if body.output_mode != "text" and not params.stop and "detokenize" not in params.model_fields_set:
        changes["detokenize"] = False  # no part of the answer shows text
    return params.replace(**changes) if changes else params


class _Shape:
    """Builds the answer to one request."""

    def __init__(self, service: Service, body: GenerateRequest, name: str) -> None:
        self._body, self._name = body, name
        self._model, self._mode = service.model_name, body.output_mode or "tokens"
        self._form = body.sampling_mask_format or service.config.mask_format
        self._token_bytes = service.outputs.token_bytes

    def answer(self, output: RequestOutput, ticket: Ticket) -> dict[str, Any]:
        """The whole answer."""
        usage = Usage([ticket])
        usage.add(sum(len(completion.token_ids) for completion in output.outputs))
        return {
            "request_id": self._name,
            "model": self._model,
            "created": int(time.time()),
            "output_mode": self._mode,
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": usage.as_dict(),
            "seed": output.seed,
            "prompt_logprobs": prompt_entries(output.prompt_logprobs),
            "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
            **_ELSEWHERE,
        }

    async def events(self, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes: what the request as a whole has is in the first chunk."""
        options = self._body.stream_options
        usage = Usage([ticket])
        head: dict[str, Any] = {"request_id": self._name, "output_mode": self._mode}
        first: dict[str, Any] = {"model": self._model, "created": int(time.time())}
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
                yield data
        if options is not None and options.include_usage:
            yield {**head, "choices": [], "usage": usage.as_dict()}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        text = self._mode == "text"
        top = self._body.sampling_params.params.logprobs or 0
        return {
            "index": output.index,
            **({"text": output.text} if text else {}),
            "token_ids": output.token_ids,
            "sampling_mask": None,
            **mask_fields(output, self._form),
            "logprobs": by_text(output, top=top, token_bytes=self._token_bytes) if text else by_id(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "routed_experts": None,
            "weight_versions": version_spans(output),
        }
