"""`/v1/completions` and `/v1/chat/completions`: OpenAI's routes, with vLLM's extra fields and the masks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from keepmask.engine.ticket import Ticket, follow
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams
from keepmask.server.body import read_sampling
from keepmask.server.choices import Usage, mask_fields, present, version_spans
from keepmask.server.document import answers, takes
from keepmask.server.logprob_entries import by_text, legacy, prompt_entries
from keepmask.server.schema import ChatRequest, CompletionRequest, OpenAIFields
from keepmask.server.service import Service
from keepmask.server.stream import Attended, EventStream, answered, event, json_response
from keepmask.server.texts import Encoded

__all__ = ["router"]

_NOT_TAKEN = ("detokenize",)  # these routes are about text


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["openai"])

    @routes.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=answers(stream=True))
    async def completions(request: Request) -> Response:
        """Complete one prompt or several."""
        body, fields = await read_sampling(
            request, CompletionRequest, service.config.max_body_bytes, without=_NOT_TAKEN
        )
        params = SamplingParams(**fields)
        prompts = await _prompts(service, body, params)
        return await _answer(service, request, _Completions(service, body, params), prompts, param="prompt")

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=answers(stream=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body, fields = await read_sampling(request, ChatRequest, service.config.max_body_bytes, without=_NOT_TAKEN)
        params = SamplingParams(
            **fields,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        prompt = await service.texts.render(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
        )
        return await _answer(service, request, _Chat(service, body, params), [prompt], param="messages")

    return routes


async def _prompts(service: Service, body: CompletionRequest, params: SamplingParams) -> list[Encoded]:
    """The prompts as text and tokens; those that came as tokens have no text."""
    given: Any = body.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    prompts = [given] if single else given
    service.admission.check_count(len(prompts), params.n)
    add_special_tokens = body.add_special_tokens is not False
    return [
        await service.texts.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str)
        else Encoded(None, prompt)
        for prompt in prompts
    ]


async def _answer(
    service: Service, request: Request, shape: _Shape, prompts: Sequence[Encoded], *, param: str
) -> Response:
    """Queue the prompts, and answer whole or as it comes."""
    body = shape.body
    service.check_model(body.model)
    interval = (body.stream_interval or service.config.stream_interval) if body.stream else None
    orders = [
        service.order(
            prompt.token_ids,
            shape.params,
            param=param,
            prompt=prompt.text,
            cache_salt=body.cache_salt,
            stream_interval=interval,
        )
        for prompt in prompts
    ]
    tickets = service.submit(orders, shape.name)
    if body.stream:
        return EventStream(service.engine, tickets, shape.events(tickets), config=service.config)
    async with Attended(service.engine, tickets, request.receive, timeout_s=service.config.request_timeout_s):
        outputs = [await ticket.output() for ticket in tickets]
    return await answered(outputs, lambda: json_response(shape.answer(outputs, tickets)))


class _Shape(ABC):
    """Builds the answers of one route. Choice c of prompt p has index p * n + c."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, service: Service, body: OpenAIFields, params: SamplingParams) -> None:
        self.body, self.params = body, params
        self.name = body.request_id or service.new_name(self.prefix)
        self._model, self._created = service.model_name, int(time.time())
        self._form = body.sampling_mask_format or service.config.mask_format

    def answer(self, outputs: Sequence[RequestOutput], tickets: Sequence[Ticket]) -> dict[str, Any]:
        """The whole answer."""
        usage = Usage(tickets)
        choices = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                usage.add(len(completion.token_ids))
                choices.append(
                    {
                        "index": number * self.params.n + completion.index,
                        **self.whole(completion),
                        **self._common(completion),
                        "seed": output.seed,
                        **self.of_prompt(output),
                    }
                )
        return {
            **self._head(self.whole_object),
            "choices": choices,
            "usage": usage.as_dict(),
            **self.of_request(outputs),
        }

    async def events(self, tickets: Sequence[Ticket]) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        options = self.body.stream_options
        usage = Usage(tickets)
        head = self._head(self.chunk_object)
        begun: set[int] = set()
        async for chunks in follow(tickets):
            for number, chunk in chunks:
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
                yield event(data)
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], "usage": usage.as_dict()})

    @abstractmethod
    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
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
            **({"token_ids": output.token_ids} if with_ids else {}),
            **mask_fields(output, self._form),
            **present({"weight_versions": version_spans(output)}),
        }

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        return present(
            {
                "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
                "prompt_logprobs": prompt_entries(output.prompt_logprobs),
            }
        )


class _Completions(_Shape):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, params: SamplingParams) -> None:
        super().__init__(service, body, params)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._offsets: dict[int, int] = {}

    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
        return self._text(completion, 0)

    def part(self, chunk: CompletionOutput, index: int) -> dict[str, Any]:
        part = self._text(chunk, self._offsets.get(index, 0))
        if part["logprobs"] is not None:
            self._offsets[index] = self._offsets.get(index, 0) + sum(map(len, part["logprobs"]["tokens"]))
        return part

    def begin(self, data: dict[str, Any], choice: dict[str, Any], ticket: Ticket) -> None:
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = ticket.order.prompt_token_ids

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return self._prompt_fields(output)

    def of_request(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {}

    def _text(self, output: CompletionOutput, offset: int) -> dict[str, Any]:
        return {"text": output.text, "logprobs": legacy(output, text_offset=offset, as_ids=self._as_ids)}


class _Chat(_Shape):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, params: SamplingParams) -> None:
        super().__init__(service, body, params)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._top = body.top_logprobs or 0

    def whole(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": completion.text}, "logprobs": self._logprobs(completion)}

    def part(self, chunk: CompletionOutput, index: int) -> dict[str, Any]:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(chunk)}

    def begin(self, data: dict[str, Any], choice: dict[str, Any], ticket: Ticket) -> None:
        choice["delta"] = {"role": "assistant", **choice["delta"]}
        if self.body.return_token_ids:
            data["prompt_token_ids"] = ticket.order.prompt_token_ids

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {}

    def of_request(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._prompt_fields(outputs[0])

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        return by_text(output, top=self._top, as_ids=self._as_ids)
