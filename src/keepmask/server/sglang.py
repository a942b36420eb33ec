"""`/generate` and `/abort_request`: SGLang's routes, for clients of that shape (slime, miles)."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from keepmask.engine.ticket import Order, Ticket, follow, joined
from keepmask.errors import RequestError
from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.body import read_json
from keepmask.server.choices import present, version_spans
from keepmask.server.document import answers, takes
from keepmask.server.error_answers import ApiError
from keepmask.server.service import Service
from keepmask.server.sglang_schema import CustomParams, SGLangAbort, SGLangGenerate
from keepmask.server.stream import Attended, EventStream, answered, event, json_response
from keepmask.server.texts import Encoded
from keepmask.wire.fields import mask_to_fields

__all__ = ["router"]

_NO_TOP_K = 1 << 30  # how SGLang writes "off"
_DEFAULT_MAX_TOKENS = 128
_OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_TAKEN = {
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "n", "ignore_eos", "skip_special_tokens", "logit_bias", "sampling_semantics"),
    *_OURS,
}
_IGNORED = ("spaces_between_special_tokens",)
"""Without effect on fast tokenizers, the only ones there are."""


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["sglang"])

    @routes.post("/generate", openapi_extra=takes(SGLangGenerate), responses=answers(stream=True))
    async def generate(request: Request) -> Response:
        """Complete one prompt or several."""
        body = await read_json(request, SGLangGenerate, service.config.max_body_bytes)
        prompts, single = await _prompts(service, body)
        params = _params(body, len(prompts))
        interval = service.config.stream_interval if body.stream else None
        orders = [
            _order(
                service, prompt, each, stream_interval=interval, param="text" if body.input_ids is None else "input_ids"
            )
            for prompt, each in zip(prompts, params, strict=True)
        ]
        names = _names(body.rid, len(prompts), service)
        tickets = service.submit(orders, names)
        shape = _Shape(service, body, names)
        single = single and orders[0].params.n == 1
        if body.stream:
            return EventStream(service.engine, tickets, shape.events(tickets, single=single), config=service.config)
        async with Attended(service.engine, tickets, request.receive, timeout_s=service.config.request_timeout_s):
            outputs = [await ticket.output() for ticket in tickets]

        def build() -> Response:
            found = [shape.whole(output, number, tickets[number]) for number, output in enumerate(outputs)]
            flat = [each for one in found for each in one]
            return json_response(flat[0] if single else flat)

        return await answered(outputs, build)

    @routes.post("/abort_request", openapi_extra=takes(SGLangAbort), responses=answers())
    async def abort_request(request: Request) -> Response:
        """End requests; each is answered with what it has."""
        body = await read_json(request, SGLangAbort, service.config.max_body_bytes)
        if body.abort_all and not service.config.enable_weight_updates:
            raise ApiError(
                403, "abort_all: ends the requests of others; start the server with --enable-weight-updates to allow it"
            )
        service.engine.abort(service.tickets(None if body.abort_all else [body.rid]))
        return json_response({})

    return routes


async def _prompts(service: Service, body: SGLangGenerate) -> tuple[list[Encoded], bool]:
    """The prompts, and whether the answer is one object and not a list."""
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        service.admission.check_count(len(texts), 1)
        return [await service.texts.encode(text, param="text") for text in texts], isinstance(body.text, str)
    given: Any = body.input_ids
    single = isinstance(given[0], int)
    return [Encoded(None, token_ids) for token_ids in ([given] if single else given)], single


def _names(rid: str | Sequence[str] | None, count: int, service: Service) -> list[str]:
    """A name for each prompt: those given, or one given as the beginning of each, as in SGLang."""
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{number}" for number in range(count)]
    if rid is not None and len(rid) != count:
        raise RequestError(f"rid: {len(rid)} names for {count} prompts; give each one", param="rid")
    return list(rid) if rid is not None else [service.new_name("sgl") for _ in range(count)]


def _order(
    service: Service, prompt: Encoded, params: SamplingParams, *, stream_interval: int | None, param: str
) -> Order:
    try:
        return service.order(prompt.token_ids, params, param=param, prompt=prompt.text, stream_interval=stream_interval)
    except RequestError as error:
        raise _by_their_name(error) from None


def _params(body: SGLangGenerate, count: int) -> list[SamplingParams]:
    """Our parameters for each prompt."""
    given = body.sampling_params or {}
    each = given if isinstance(given, list) else [given] * count
    if len(each) != count:
        raise RequestError(f"sampling_params: {len(each)} for {count} prompts; give each one", param="sampling_params")
    with_logprobs = body.return_logprob or body.return_sampling_mask
    asked: dict[str, Any] = {
        "logprobs": body.top_logprobs_num or 0 if with_logprobs else None,
        "return_sampling_mask": bool(body.return_sampling_mask),
        "return_sampling_mask_logprobs": bool(body.return_sampling_mask) and body.sampling_logprobs_mode == "support",
    }
    if body.return_logprob and body.logprob_start_len is not None and body.logprob_start_len >= 0:
        asked["prompt_logprobs"] = body.top_logprobs_num or 0
    return [_translated(one, asked) for one in each]


def _translated(given: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """Our parameters from SGLang's, which write null for what they leave open."""
    fields = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    asked = {**asked, "return_sampling_mask": asked["return_sampling_mask"] or _wants_top_p_ids(given)}
    for name in fields:
        if name not in _TAKEN and name != "custom_params":
            legal = ", ".join(sorted(_TAKEN))
            raise RequestError(
                f"sampling_params.{name[:80]}: not known, or not supported; known are {legal}", param=name[:80]
            )
    fields.pop("custom_params", None)
    if fields.get("top_k") == _NO_TOP_K:
        fields["top_k"] = 0
    ours = {_OURS.get(name, name): value for name, value in fields.items()}
    try:
        params = SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **ours}, **asked)
    except RequestError as error:
        raise _by_their_name(error) from None
    if asked["return_sampling_mask"] and not (params.truncates or params.greedy):
        raise RequestError(
            "return_sampling_mask=true: SGLang lists every id of a support, here the whole vocabulary for each token; "
            "set top_k, top_p or min_p",
            param="top_k",
        )
    return params


def _wants_top_p_ids(given: Mapping[str, Any]) -> bool:
    custom = given.get("custom_params")
    if custom is None:
        return False
    try:
        return CustomParams.model_validate(custom).return_top_p_token_ids
    except ValidationError:
        raise RequestError(
            f"custom_params={str(custom)[:80]}: only return_top_p_token_ids, true or false, is known",
            param="custom_params",
        ) from None


def _by_their_name(error: RequestError) -> RequestError:
    """The error with SGLang's name of the field."""
    return error.renamed(_THEIRS[error.param]) if error.param in _THEIRS else error


class _Shape:
    """Builds the answers."""

    def __init__(self, service: Service, body: SGLangGenerate, names: Sequence[str]) -> None:
        self._body, self._names = body, names
        self._whole_vocabulary = range(service.vocab_size)
        self._began_s = time.monotonic()

    def whole(self, output: RequestOutput, number: int, ticket: Ticket) -> list[dict[str, Any]]:
        """The answer to one prompt, one object a completion."""
        return [self._one(completion, number, ticket, output.prompt_logprobs) for completion in output.outputs]

    async def events(self, tickets: Sequence[Ticket], *, single: bool) -> AsyncIterator[bytes]:
        """With every chunk, everything so far of its completion."""
        so_far: dict[tuple[int, int], CompletionOutput] = {}
        n = tickets[0].order.params.n
        async for chunks in follow(tickets):
            for number, chunk in chunks:
                key = (number, chunk.index)
                so_far[key] = joined([so_far[key], chunk]) if key in so_far else chunk
                data = self._one(so_far[key], number, tickets[number], None)
                yield event(data if single else {**data, "index": number * n + chunk.index})

    def _one(
        self,
        output: CompletionOutput,
        number: int,
        ticket: Ticket,
        prompt_logprobs: Sequence[dict[int, Logprob] | None] | None,
    ) -> dict[str, Any]:
        order = ticket.order
        meta: dict[str, Any] = {
            "id": self._names[number],
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(order.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": ticket.num_cached_tokens,
            "e2e_latency": time.monotonic() - self._began_s,
            **present({"weight_versions": version_spans(output)}),
        }
        if output.weight_versions:
            meta["weight_version"] = output.weight_versions[-1].version
        if self._body.return_logprob:
            meta |= self._logprobs(output, order, prompt_logprobs)
        if self._body.return_sampling_mask and output.sampling_mask is not None:
            meta |= self._mask(output, output.sampling_mask)
        elif output.sampling_mask is not None and output.finish_reason is not None:
            meta |= _top_p_ids(output.sampling_mask)
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _logprobs(
        self, output: CompletionOutput, order: Order, prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    ) -> dict[str, Any]:
        entries = output.logprobs or []
        found: dict[str, Any] = {
            "output_token_logprobs": [
                self._entry(entry[token_id], token_id)
                for token_id, entry in zip(output.token_ids, entries, strict=True)
            ]
        }
        if self._body.top_logprobs_num:
            found["output_top_logprobs"] = [self._top(entry) for entry in entries]
        if prompt_logprobs is not None:
            start = self._body.logprob_start_len or 0
            prompt = list(zip(order.prompt_token_ids, prompt_logprobs, strict=True))[start:]
            found["input_token_logprobs"] = [
                [None, token_id, None] if entry is None else self._entry(entry[token_id], token_id)
                for token_id, entry in prompt
            ]
            if self._body.top_logprobs_num:
                found["input_top_logprobs"] = [None if entry is None else self._top(entry) for _, entry in prompt]
        return found

    def _top(self, entry: Mapping[int, Logprob]) -> list[list[Any]]:
        likely = sorted(entry.items(), key=lambda item: item[1].rank or 0)[: self._body.top_logprobs_num]
        return [self._entry(logprob, token_id) for token_id, logprob in likely]

    def _entry(self, logprob: Logprob, token_id: int) -> list[Any]:
        return [logprob.logprob, token_id, logprob.decoded_token if self._body.return_text_in_logprobs else None]

    def _mask(self, output: CompletionOutput, mask: SamplingMask) -> dict[str, Any]:
        fields = mask_to_fields(mask)
        rows = [row or list(self._whole_vocabulary) for row in fields["sampling_mask"]]
        if self._body.sampling_logprobs_mode == "support":
            logprobs = fields["sampling_mask_logprobs"]
        else:
            entries = zip(output.token_ids, output.logprobs or [], strict=True)
            logprobs = [entry[token_id].logprob for token_id, entry in entries]
        return {
            "output_token_sampling_mask": rows,
            "output_token_sampling_logprobs": logprobs,
            "output_token_sampling_mask_length": len(rows),
        }


def _finish_reason(output: CompletionOutput) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(output.token_ids)}
        case "stop":
            return {
                "type": "stop",
                "matched": output.token_ids[-1] if output.stop_reason is None else output.stop_reason,
            }
        case "abort":
            return {"type": "abort", "message": "Aborted"}
        case "error":
            failure = {"message": output.stop_reason, "status_code": 500, "err_type": "InternalServerError"}
            return {"type": "abort", **failure}


def _top_p_ids(mask: SamplingMask) -> dict[str, str]:
    """CSR as slime's SGLang sends it; a row of no ids is the whole vocabulary there too."""
    ids, offsets = mask.ids.astype("<i4").tobytes(), mask.offsets.astype("<i4").tobytes()
    return {
        "top_p_token_ids": base64.b64encode(ids).decode(),
        "top_p_token_offsets": base64.b64encode(offsets).decode(),
    }
