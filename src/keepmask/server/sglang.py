"""`/generate` and what goes with it: SGLang's routes, for clients of that shape (slime, miles)."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from keepmask.engine.ticket import Ticket, follow, joined
from keepmask.errors import RequestError
from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.choices import present, version_spans
from keepmask.server.error_answers import ApiError
from keepmask.server.json_rows import MaskRows
from keepmask.server.routing import EVENTS, JSON, Routes
from keepmask.server.service import Service
from keepmask.server.sglang_schema import SGLangAbort, SGLangGenerate, SGLangSampling
from keepmask.server.stream import JsonAnswer, json_response, respond
from keepmask.server.texts import Encoded

__all__ = ["routes"]

_NO_TOP_K = 1 << 30  # how SGLang writes "off"
_OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""The forms a text may have to have, and their names in `StructuredOutputsParams`."""
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_NOT_DRAWN_WITH = {
    name for name in SGLangSampling.model_fields if _OURS.get(name, name) not in SamplingParams.model_fields
}


class _Asked(NamedTuple):
    """What the answer to one prompt has to tell."""

    params: SamplingParams
    logprobs: bool
    top: int
    prompt_from: int | None
    """First position of the prompt to tell log-probs of."""
    mask: bool
    whole_supports: bool
    no_tokens: bool
    """The prompt alone is scored."""


def routes(service: Service) -> Routes:
    """The routes."""
    found = Routes(service.bodies, "sglang")

    @found.post("/generate", body=SGLangGenerate, media_types=(JSON, EVENTS))
    async def generate(request: Request, body: SGLangGenerate) -> Response:
        """Complete one prompt or several."""
        prompts, single = await _prompts(service, body)
        asked = _asked(body, len(prompts))
        salts = _each(body.cache_salt or body.extra_key, len(prompts), "cache_salt")
        sampling = body.sampling_params[0] if isinstance(body.sampling_params, list) else body.sampling_params
        interval = (sampling and sampling.stream_interval) or service.config.stream_interval
        field = "text" if body.input_ids is None else "input_ids"
        fields = {**_THEIRS, "prompt": field, "prompt_token_ids": field, "logprobs": "top_logprobs_num"}
        orders = [
            await service.order(
                prompt.token_ids,
                each.params,
                names=fields,
                prompt=prompt.text,
                cache_salt=salt,
                stream_interval=interval if body.stream else None,
            )
            for prompt, each, salt in zip(prompts, asked, salts, strict=True)
        ]
        name = service.name(None, request.headers.get("x-request-id"), "sgl")
        names = _names(body.rid or name, len(prompts))
        tickets = service.submit(orders, names)
        shape = _Shape(service, body, names, asked, single=single and asked[0].params.n == 1)

        def whole(outputs: Sequence[RequestOutput]) -> Response:
            return JsonAnswer(service, shape.answer(outputs, tickets), name=name)

        events = shape.events(tickets) if body.stream else None
        return await respond(service, request, tickets, name=names[0], whole=whole, events=events)

    @found.post("/abort_request", body=SGLangAbort)
    async def abort_request(_: Request, body: SGLangAbort) -> Response:
        """End requests; each is answered with what it has."""
        if body.abort_all and not service.config.enable_weight_updates:
            raise ApiError(
                403, "abort_all: ends the requests of others; start the server with --enable-weight-updates to allow it"
            )
        service.engine.abort(service.tickets(None if body.abort_all else [body.rid]))
        return json_response({})

    @found.get("/health_generate")
    async def health_generate(_: Request) -> Response:
        """200 once a token has been drawn, unless generation is paused."""
        service.check_ready()
        if not service.engine.paused:
            order = await service.order([0], SamplingParams(max_tokens=1, detokenize=False), names={"prompt": "prompt"})
            (ticket,) = service.submit([order], service.name(None, None, "health"))
            await ticket.output()
        return json_response({})

    return found


async def _prompts(service: Service, body: SGLangGenerate) -> tuple[list[Encoded], bool]:
    """The prompts, and whether the answer is one object and not a list."""
    if body.input_ids is None:
        texts = [body.text] if isinstance(body.text, str) else body.text or []
        service.admission.check_count(len(texts), 1)
        return [await service.texts.encode(text, param="text") for text in texts], isinstance(body.text, str)
    given: Any = body.input_ids
    single = isinstance(given[0], int)
    return [Encoded(None, token_ids) for token_ids in ([given] if single else given)], single


def _names(rid: str | Sequence[str], count: int) -> list[str]:
    """A name for each prompt: those given, or one given as the beginning of each, as in SGLang."""
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{number}" for number in range(count)]
    return _each(rid, count, "rid")


def _each(given: Any, count: int, name: str) -> list[Any]:
    """One for each prompt, where one may be given for all. Raises RequestError for another number."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name}: {len(given)} for {count} prompts; give each one", param=name)
    return given


def _asked(body: SGLangGenerate, count: int) -> list[_Asked]:
    """What is asked for each prompt."""
    names = ("sampling_params", "return_logprob", "top_logprobs_num", "logprob_start_len", "return_sampling_mask")
    columns = [_each(getattr(body, name), count, name) for name in (*names, "sampling_logprobs_mode")]
    return [_one_asked(*row) for row in zip(*columns, strict=True)]


def _one_asked(
    given: SGLangSampling | None,
    logprobs: bool | None,
    top: int | None,
    start: int | None,
    with_mask: bool | None,
    mode: str | None,
) -> _Asked:
    given = given or SGLangSampling.model_validate({})
    custom = given.custom_params
    mask = bool(with_mask) or (custom is not None and custom.return_top_p_token_ids)
    prompt_from = start if logprobs and start is not None and start >= 0 else None
    fields = {
        _OURS.get(name, name): value for name, value in given if name not in _NOT_DRAWN_WITH and value is not None
    }
    forms = {ours: form for theirs, ours in _FORMS.items() if (form := getattr(given, theirs)) is not None}
    if forms:
        fields["structured_outputs"] = forms
    fields["max_tokens"] = given.max_new_tokens or (None if given.max_new_tokens is None else 1)
    if fields.get("top_k") == _NO_TOP_K:
        fields["top_k"] = 0
    try:
        params = SamplingParams(
            **fields,
            logprobs=top or 0 if logprobs or with_mask else None,
            prompt_logprobs=None if prompt_from is None else top or 0,
            return_sampling_mask=mask,
            return_sampling_mask_logprobs=bool(with_mask) and mode == "support",
        )
    except RequestError as error:
        name = _THEIRS.get(error.param or "")
        raise error.renamed(name) if name else error from None
    if mask and not (params.truncates or params.greedy):
        raise RequestError(
            "top_k: SGLang lists every id of a support, here the whole vocabulary for each token; set top_k, top_p or "
            "min_p with return_sampling_mask",
            param="top_k",
        )
    return _Asked(
        params=params,
        logprobs=bool(logprobs),
        top=top or 0,
        prompt_from=prompt_from,
        mask=bool(with_mask),
        whole_supports=mode == "support",
        no_tokens=given.max_new_tokens == 0,
    )


class _Shape:
    """Builds the answers. single: one object, where others are lists."""

    def __init__(
        self, service: Service, body: SGLangGenerate, names: Sequence[str], asked: Sequence[_Asked], *, single: bool
    ) -> None:
        self._body, self._names, self._asked, self._single = body, names, asked, single
        self._vocab_size = service.vocab_size
        self._max_mask_bytes = service.engine_config.max_mask_bytes_per_request
        self._began_s = time.monotonic()

    def answer(self, outputs: Sequence[RequestOutput], tickets: Sequence[Ticket]) -> Any:
        """The answer to all prompts, one object a completion."""
        found = [
            self._one(completion, number, tickets[number], output.prompt_logprobs)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return found[0] if self._single else found

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """With every chunk, everything so far of its completion."""
        so_far: dict[tuple[int, int], CompletionOutput] = {}
        n = tickets[0].order.params.n
        async for chunks in follow(tickets):
            for number, chunk in chunks:
                key = (number, chunk.index)
                so_far[key] = joined([so_far[key], chunk]) if key in so_far else chunk
                data = self._one(so_far[key], number, tickets[number], None)
                yield data if self._single else {**data, "index": number * n + chunk.index}

    def _one(
        self,
        output: CompletionOutput,
        number: int,
        ticket: Ticket,
        prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None,
    ) -> dict[str, Any]:
        asked, prompt = self._asked[number], ticket.order.prompt_token_ids
        if asked.no_tokens:
            mask, logprobs = output.sampling_mask and output.sampling_mask[:0], output.logprobs and []
            spans = [span._replace(end=0) for span in output.weight_versions[:1]]
            output = replace(
                output, text="", token_ids=[], logprobs=logprobs, sampling_mask=mask, weight_versions=spans
            )
        output = self._within_budget(output, asked)
        meta: dict[str, Any] = {
            "id": self._names[number],
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": ticket.num_cached_tokens,
            "cached_tokens_details": {"device": ticket.num_cached_tokens, "host": 0},
            "reasoning_tokens": 0,
            "num_retractions": 0,
            "dp_rank": None,
            "e2e_latency": time.monotonic() - self._began_s,
            **present({"weight_versions": version_spans(output)}),
        }
        if output.weight_versions:
            meta["weight_version"] = output.weight_versions[-1].version
        if asked.logprobs:
            meta |= self._logprobs(output, asked, prompt, prompt_logprobs)
        if asked.mask and output.sampling_mask is not None:
            meta |= self._mask(output, output.sampling_mask, asked)
        elif output.sampling_mask is not None and output.finish_reason is not None:
            meta |= _top_p_ids(output.sampling_mask)
        ids = {"prompt_token_ids": prompt} if self._body.return_prompt_token_ids else {}
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta, **ids}

    def _within_budget(self, output: CompletionOutput, asked: _Asked) -> CompletionOutput:
        """The output, or its failure where its supports, with the whole vocabulary listed, go beyond the budget."""
        mask = output.sampling_mask
        if mask is None or not asked.mask:
            return output
        num_ids = mask.ids.size + self._vocab_size * int((mask.counts == 0).sum())
        if 4 * num_ids <= self._max_mask_bytes:
            return output
        reason = (
            f"the supports list {num_ids} ids, more than max_mask_bytes_per_request={self._max_mask_bytes} allows: "
            "SGLang lists those of the whole vocabulary too; lower top_p or top_k"
        )
        return replace(output, sampling_mask=None, finish_reason="error", stop_reason=reason)

    def _logprobs(
        self,
        output: CompletionOutput,
        asked: _Asked,
        prompt: Sequence[int],
        prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None,
    ) -> dict[str, Any]:
        drawn = list(zip(output.token_ids, output.logprobs or [], strict=True))
        found: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._entry(token_id, entry[token_id]) for token_id, entry in drawn],
            "output_token_logprobs_length": len(drawn),
        }
        if asked.top:
            found["output_top_logprobs"] = [self._top(entry, asked.top) for _, entry in drawn]
        if prompt_logprobs is not None:
            scored = list(zip(prompt, prompt_logprobs, strict=True))[asked.prompt_from :]
            found["input_token_logprobs"] = [
                [None, token_id, None] if entry is None else self._entry(token_id, entry[token_id])
                for token_id, entry in scored
            ]
            if asked.top:
                found["input_top_logprobs"] = [
                    None if entry is None else self._top(entry, asked.top) for _, entry in scored
                ]
        return found

    def _top(self, entry: Mapping[int, Logprob], top: int) -> list[list[Any]]:
        likely = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:top]
        return [self._entry(*item) for item in likely]

    def _entry(self, token_id: int, logprob: Logprob) -> list[Any]:
        return [logprob.logprob, token_id, logprob.decoded_token if self._body.return_text_in_logprobs else None]

    def _mask(self, output: CompletionOutput, mask: SamplingMask, asked: _Asked) -> dict[str, Any]:
        logprobs: Any = MaskRows(mask, of_logprobs=True)
        if not asked.whole_supports:
            entries = zip(output.token_ids, output.logprobs or [], strict=True)
            logprobs = [entry[token_id].logprob for token_id, entry in entries]
        return {
            "output_token_sampling_mask": MaskRows(mask, whole_row=self._whole_row(mask)),
            "output_token_sampling_logprobs": logprobs,
            "output_token_sampling_mask_length": len(mask),
        }

    def _whole_row(self, mask: SamplingMask) -> bytes:
        """What a row that is the whole vocabulary is written as: every id."""
        if mask.counts.all():
            return b"[]"
        return pydantic_core.to_json(list(range(self._vocab_size)))


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
