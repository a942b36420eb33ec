"""`/v1/completions` and `/v1/chat/completions`: OpenAI's routes, with vLLM's extra fields and the masks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from keepmask.engine.completion_text import TextOffsets
from keepmask.engine.ticket import Ticket, follow
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.choices import Usage, mask_fields, present, version_spans
from keepmask.server.logprob_entries import Entry, by_text, legacy, prompt_entries
from keepmask.server.routing import EVENTS, JSON, Routes
from keepmask.server.schema import ChatRequest, CompletionRequest, OpenAIFields
from keepmask.server.service import Service
from keepmask.server.stream import JsonAnswer, respond
from keepmask.server.texts import Encoded

__all__ = ["routes"]

_ELSEWHERE = dict.fromkeys(
    ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
)
"""What vLLM tells of other features, null without them."""
_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


def routes(service: Service) -> Routes:
    """The routes."""
    found = Routes(service.bodies, "openai")

    @found.post("/v1/completions", body=CompletionRequest, media_types=(JSON, EVENTS))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete one prompt or several."""
        params = body.params if body.max_tokens is None else body.params.replace(max_tokens=body.max_tokens or 1)
        if body.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = params.replace(prompt_logprobs=params.logprobs)
        prompts = await _prompts(service, body, params)
        shape = _Completions(service, request, body, params)
        if body.echo and params.logprobs is not None:
            firsts = {prompt.token_ids[0] for prompt in prompts if prompt.token_ids}
            shape.first_texts = {first: await service.texts.decode([first]) for first in firsts}
        return await _answer(service, request, shape, prompts)

    @found.post("/v1/chat/completions", body=ChatRequest, media_types=(JSON, EVENTS))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        params = body.params.replace(
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        prompt = await service.texts.render(
            body.messages, add_special_tokens=bool(body.add_special_tokens), template=body.rendering()
        )
        return await _answer(service, request, _Chat(service, request, body, params), [prompt])

    return found


async def _prompts(service: Service, body: CompletionRequest, params: SamplingParams) -> list[Encoded]:
    """The prompts as text and tokens; those that came as tokens have no text, but where it is asked for."""
    given: Any = body.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    prompts = [given] if single else given
    service.admission.check_count(len(prompts), params.n)
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded = await service.texts.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            service.check_token_ids(prompt, param="prompt")
            encoded = Encoded(await service.texts.decode(prompt) if body.echo else None, prompt)
        found.append(encoded)
    return found


async def _answer(service: Service, request: Request, shape: _Shape, prompts: Sequence[Encoded]) -> Response:
    """Queue the prompts, and answer whole or as it comes."""
    body = shape.body
    service.check_model(body.model)
    interval = (body.stream_interval or service.config.stream_interval) if body.stream else None
    orders = [
        await service.order(
            prompt.token_ids,
            shape.params,
            names=shape.names,
            prompt=prompt.text,
            cache_salt=body.cache_salt,
            stream_interval=interval,
        )
        for prompt in prompts
    ]
    tickets = service.submit(orders, shape.name)

    def whole(outputs: Sequence[RequestOutput]) -> Response:
        return JsonAnswer(service, shape.answer(outputs, tickets), name=shape.name)

    events = shape.events(tickets) if body.stream else None
    return await respond(service, request, tickets, name=shape.name, whole=whole, events=events)


class _Shape(ABC):
    """Builds the answers of one route. Choice c of prompt p has index p * n + c."""

    prefix: str
    whole_object: str
    chunk_object: str
    names: Mapping[str, str]
    """What the route calls the engine's fields."""

    def __init__(self, service: Service, request: Request, body: OpenAIFields, params: SamplingParams) -> None:
        self.body, self.params = body, params
        self.name = service.name(body.request_id, request.headers.get("x-request-id"), self.prefix)
        self._model, self._created = service.model_name, int(time.time())
        self._form = body.sampling_mask_format or service.config.mask_format

    def answer(self, outputs: Sequence[RequestOutput], tickets: Sequence[Ticket]) -> dict[str, Any]:
        """The whole answer."""
        usage = Usage(tickets)
        choices = []
        for number, output in enumerate(outputs):
            for completion in map(self.shown, output.outputs):
                usage.add(len(completion.token_ids))
                choices.append(
                    {
                        "index": number * self.params.n + completion.index,
                        **self.whole(completion, output),
                        **self._common(completion),
                        "routed_experts": None,
                        "seed": output.seed,
                        **self.of_prompt(output),
                    }
                )
        return {
            **self._head(self.whole_object),
            "choices": choices,
            "usage": usage.as_dict(),
            **_ELSEWHERE,
            **self.of_request(outputs),
        }

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes."""
        options = self.body.stream_options
        usage = Usage(tickets)
        head = self._head(self.chunk_object)
        begun: set[int] = set()
        async for chunks in follow(tickets):
            for number, drawn in chunks:
                chunk = self.shown(drawn)
                usage.add(len(chunk.token_ids))
                index = number * self.params.n + chunk.index
                choice = {"index": index, **self.part(chunk, index), **self._common(chunk)}
                data = {**head, "choices": [choice]}
                if index not in begun:
                    choice["seed"] = tickets[number].seed
                    self.begin(data, choice, tickets[number])
                    begun.add(index)
                if options is not None and (options.include_usage or options.continuous_usage_stats):
                    data["usage"] = usage.as_dict() if options.continuous_usage_stats else None
                yield data
        if options is not None and options.include_usage:
            yield {**head, "choices": [], "usage": usage.as_dict()}

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        """What is shown of a completion, or of a chunk of one."""
        return completion

    @abstractmethod
    def whole(self, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The text of a whole choice, with its log-probs."""

    @abstractmethod
    def part(self, chunk: CompletionOutput, index: int) -> dict[str, Any]:
        """The text of a chunk, with its log-probs."""

    @abstractmethod
    def begin(self, data: dict[str, Any], choice: dict[str, Any], ticket: Ticket) -> None:
        """Add what only the first chunk of a choice has."""

    @abstractmethod
    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What each choice tells of its prompt."""

    @abstractmethod
    def of_request(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What the answer tells of the only prompt."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self._created, "model": self._model}

    def _common(self, output: CompletionOutput) -> dict[str, Any]:
        """What is the same in choices and chunks of both routes. Rows come with the tokens they belong to."""
        with_ids = self.body.return_token_ids or output.sampling_mask is not None
        return {
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if with_ids else None,
            **mask_fields(output, self._form),
            **present({"weight_versions": version_spans(output)}),
        }

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
            "prompt_logprobs": prompt_entries(output.prompt_logprobs),
        }


class _Completions(_Shape):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    names = MappingProxyType({"prompt": "prompt", "prompt_token_ids": "prompt"})

    def __init__(self, service: Service, request: Request, body: CompletionRequest, params: SamplingParams) -> None:
        super().__init__(service, request, body, params)
        self._echo, self._prompt_alone = bool(body.echo), body.max_tokens == 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self.first_texts: dict[int, str] = {}
        """Texts of the first tokens of echoed prompts, which have no log-prob."""
        self._open_offsets = partial(service.outputs.text_offsets, params)
        self._offsets: dict[int, TextOffsets] = {}
        """Of the choices of a stream."""

    def shown(self, completion: CompletionOutput) -> CompletionOutput:
        if not self._prompt_alone:
            return completion
        logprobs, mask = completion.logprobs and [], completion.sampling_mask and completion.sampling_mask[:0]
        return replace(completion, text="", token_ids=[], logprobs=logprobs, sampling_mask=mask, weight_versions=[])

    def whole(self, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        text, token_ids, entries = completion.text, completion.token_ids, completion.logprobs
        if entries is None:
            return {"text": self._echoed(output) + text, "logprobs": None}
        offsets = [min(at, len(text)) for at in self._open_offsets().push(token_ids)]
        if self._echo:
            prompt = self._echoed(output)
            text = prompt + text
            before = self._open_offsets().push(output.prompt_token_ids)
            offsets = [*(min(at, len(prompt)) for at in before), *(len(prompt) + at for at in offsets)]
            token_ids = output.prompt_token_ids + token_ids
            entries = [*(output.prompt_logprobs or ()), *entries]
        return {"text": text, "logprobs": self._logprobs(token_ids, entries, offsets)}

    def _echoed(self, output: RequestOutput) -> str:
        return (output.prompt or "") if self._echo else ""

    def part(self, chunk: CompletionOutput, index: int) -> dict[str, Any]:
        if chunk.logprobs is None:
            return {"text": chunk.text, "logprobs": None}
        offsets = self._offsets.setdefault(index, self._open_offsets()).push(chunk.token_ids)
        return {"text": chunk.text, "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs, offsets)}

    def begin(self, data: dict[str, Any], choice: dict[str, Any], ticket: Ticket) -> None:
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = ticket.order.prompt_token_ids
        if self._echo:
            choice["text"] = (ticket.order.prompt or "") + choice["text"]

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return self._prompt_fields(output)

    def of_request(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {}

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        return legacy(token_ids, entries, offsets=offsets, as_ids=self._as_ids, texts=self.first_texts)


class _Chat(_Shape):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: Request, body: ChatRequest, params: SamplingParams) -> None:
        super().__init__(service, request, body, params)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._top = body.top_logprobs or 0
        self._token_bytes = service.outputs.token_bytes
        self.names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens:
            self.names |= {"max_tokens": "max_completion_tokens"}

    def whole(self, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, **_MESSAGE}
        return {"message": message, "logprobs": self._logprobs(completion)}

    def part(self, chunk: CompletionOutput, index: int) -> dict[str, Any]:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(chunk)}

    def begin(self, data: dict[str, Any], choice: dict[str, Any], ticket: Ticket) -> None:
        choice["delta"] = {"role": "assistant", **choice["delta"]}
        if self.body.return_token_ids:
            data["prompt_token_ids"] = ticket.order.prompt_token_ids

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def of_request(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**self._prompt_fields(outputs[0]), "prompt_text": None}

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        return by_text(output, top=self._top, token_bytes=self._token_bytes, as_ids=self._as_ids)
