"""`LLM`: offline rollouts with vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine
from keepmask.engine.fair_turns import Turns
from keepmask.engine.prompts import Prompt, Prompts
from keepmask.engine.request import Request
from keepmask.errors import EngineError, RequestError
from keepmask.messages import Message, read_messages, render_chat
from keepmask.outputs import RequestOutput, Rollout
from keepmask.params import SamplingParams
from keepmask.sampling import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["LLM", "Prompt"]


class _Checked(NamedTuple):
    """A prompt and its params, which the engine can serve; or why the prompt does not fit."""

    token_ids: Sequence[int]
    text: str | None
    params: SamplingParams
    refusal: RequestError | None = None


@dataclass(slots=True)
class _Batch:
    """The requests of one call of `generate`."""

    num_unfinished: int


class LLM:
    """A model with its engine, in this process.

    model: a packaged model's name, a checkpoint folder, or a Hugging Face hub id. The other options are the fields of
    `EngineConfig`. logits_processors: custom steps between bad words and temperature, in this order.

    Any number of threads may call its methods: their requests are computed in the same steps. Raises ConfigError when
    the engine cannot start as configured.
    """

    def __init__(self, model: str, *, logits_processors: Sequence[LogitsProcessor] = (), **options: Any) -> None:
        self._serve(Engine(EngineConfig(model=model, **options), processors=logits_processors))

    @classmethod
    def from_module(
        cls, module: nn.Module, *, logits_processors: Sequence[LogitsProcessor] = (), **options: Any
    ) -> LLM:
        """An engine for a trainer's module: a causal LM of transformers, PEFT's adapters merged.

        It has weights of its own, which follow the module's by `sync`. options: as of `LLM`; type, device and name are
        by default the module's, and the tokenizer that of its name.
        """
        base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
        weight = next(base.parameters())
        given = {
            "model": getattr(base, "name_or_path", "") or type(base).__name__,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
        }
        llm = cls.__new__(cls)
        llm._serve(Engine(EngineConfig(**given | options), processors=logits_processors, module=module))
        return llm

    def _serve(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.config
        self._prompts = Prompts(self.engine.tokenizer)
        self._num_requests = 0
        self._turns = Turns()
        """Whoever has it owns the engine."""
        self._batch_of: dict[str, _Batch] = {}
        """By the ids of unfinished requests."""

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._prompts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given no parameters."""
        return SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; outputs come in the order of the prompts.

        sampling_params: one for all prompts, or one each. A completion ends with finish_reason "length" where the
        context is full. use_tqdm: show a progress bar with tokens/s.
        Raises RequestError, before anything runs, when a request cannot be served. A prompt of a list that is too long
        for the context, and a completion that fails while running, ends with finish_reason "error" and does not
        disturb the others.
        """
        checked = self._check(prompts, sampling_params)
        requests: list[Request] = []
        try:
            with self._turns:
                requests += [self._add(each) for each in checked if each.refusal is None]
                batch = _Batch(len(requests))
                self._batch_of.update((request.request_id, batch) for request in requests)
            if use_tqdm:
                self._run_with_progress(batch)
            else:
                self._run(batch, lambda _num_left: None)
            with self._turns:
                served = iter(requests)
                return [self._refused(each) if each.refusal else self.engine.output(next(served)) for each in checked]
        finally:
            self._abort(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation or a list of them, rendered with the model's own chat template.

        template: arguments of `render_chat`.
        """
        prompts: list[Prompt] = [self.render_chat(each, **template) for each in _conversations(messages)]
        one = len(prompts) == 1 and _is_message(messages[0])
        return self.generate(prompts[0] if one else prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt: its text and token ids.

        messages: `{"role", "content"}` each, and the other fields of `keepmask.messages.Message`. Content is text or a
        list of text parts. tools, chat_template_kwargs: for templates that show them. Raises RequestError for what is
        no message, and when the template refuses them.
        """
        text = render_chat(
            self.get_tokenizer(),
            read_messages(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return {"prompt": text, "prompt_token_ids": self._prompts.encode(text, add_special_tokens=False)}

    def tokenize(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        """Token ids of a prompt, and its text where there is one. Raises RequestError for anything else."""
        return self._prompts.read(prompt)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The request's output after every step that changed it, each with everything so far.

        Raises RequestError at once when it cannot be served. Closing the iterator early ends the request.
        """
        (checked,) = self._check([prompt], sampling_params)
        return self._stream(checked)

    def _stream(self, checked: _Checked) -> Iterator[RequestOutput]:
        with self._turns:
            request = self._add(checked)
        try:
            shown = _progress(request)
            while True:
                with self._turns:
                    # Others may have stepped the engine between two outputs of this one.
                    if _progress(request) == shown:
                        self._step()
                    if _progress(request) == shown:
                        continue
                    shown = _progress(request)
                    output = self.engine.output(request)
                yield output
                if output.finished:
                    return
        finally:
            self._abort([request])

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See `backends.base.Rollouts`, which this class satisfies."""
        return [output.rollouts() for output in self.generate(_as_prompts(prompts), params, use_tqdm=False)]

    def rollouts_as_finished(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """See `backends.base.Rollouts`."""
        return self._as_finished(self._check(_as_prompts(prompts), params))

    def _as_finished(self, checked: list[_Checked]) -> Iterator[tuple[int, list[Rollout]]]:
        left: dict[Request, int] = {}
        try:
            with self._turns:
                left = {self._add(each): at for at, each in enumerate(checked) if each.refusal is None}
                refused = [(at, self._refused(each)) for at, each in enumerate(checked) if each.refusal]
            yield from ((at, output.rollouts()) for at, output in refused)
            while left:
                with self._turns:
                    if not any(request.finished for request in left):
                        self._step()
                    done = [request for request in left if request.finished]
                    finished = [(left.pop(request), self.engine.output(request)) for request in done]
                yield from ((at, output.rollouts()) for at, output in finished)
        finally:
            self._abort(list(left))

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """The parameters that the draws of this prompt (token ids) would use, every default resolved."""
        return self.engine.resolve(np.asarray(prompt).tolist(), params, cut=True)

    @property
    def weight_version(self) -> str:
        """Of the weights that draw the next token."""
        return self.engine.weight_version

    def weight_checksums(self) -> dict[str, str]:
        """The SHA-256 of every weight, by its name in the model's state dict."""
        with self._turns:
            return self.engine.weight_checksums()

    def close(self) -> None:
        """End every request under way: other threads get what there is of theirs. The engine goes with the object."""
        with self._turns:
            self.engine.abort_all()
            for request_id in list(self._batch_of):
                self._ended(request_id)

    def update_weights(
        self,
        weights: Mapping[str, Tensor] | str | Path,
        *,
        version: str | None = None,
        partial: bool = False,
        cast: bool = False,
    ) -> str:
        """Replace the model's weights; returns the version that `weight_versions` tells from now on.

        weights: tensors by their names in the model's state dict, or a safetensors file or a folder of them. All must
        be there, in the model's shapes and type, or nothing is changed; partial leaves what is not given as it is, and
        cast rounds other floating-point types. version: by default the old one plus one. Requests that `stream` has
        under way go on. Raises RequestError naming what does not fit.
        """
        stage = self.engine.stage_weights(weights, partial=partial, cast=cast)
        with self._turns:
            return self.engine.update_weights(stage, version)

    def sync(self, module: nn.Module, *, version: str | None = None) -> str:
        """Take over the weights of a trainer's module, adapters merged; returns their version, as `update_weights`.

        Tensors that have not changed are left, the others are written over one by one, rounded to the engine's type: no
        second copy of the weights is held, and the module's are not touched. Raises RequestError, and changes nothing,
        when they are not those of this model.
        """
        with self._turns:
            return self.engine.sync_weights(module, version)

    def reset_prefix_cache(self) -> bool:
        """New requests compute their prompts anew. Always True: nothing holds a cached prefix back."""
        with self._turns:
            self.engine.reset_prefix_cache()
        return True

    def step(self) -> list[Request]:
        """One step of the engine; returns the requests that have new tokens or ended.

        Raises EngineError when the engine itself failed.
        """
        with self._turns:
            return self._step()

    def _check(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Checked]:
        """All prompts with their params. Raises RequestError when one of them cannot be served."""
        items = [prompts] if isinstance(prompts, str | Mapping) else prompts
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        for name, value in (("prompts", items), ("sampling_params", given)):
            if not isinstance(value, SamplingParams | Sequence) or isinstance(value, str):
                raise RequestError(f"{name}: must be one or a list of them, got {type(value).__name__}", param=name)
        params = [given] * len(items) if isinstance(given, SamplingParams) else given
        if len(params) != len(items):
            raise RequestError(
                f"sampling_params: {len(params)} for {len(items)} prompts; give one for all or one for each",
                param="sampling_params",
            )
        return [
            self._check_one(item, each, alone=items is not prompts) for item, each in zip(items, params, strict=True)
        ]

    def _check_one(self, prompt: Prompt, params: SamplingParams, *, alone: bool) -> _Checked:
        token_ids, text = self.tokenize(prompt)
        try:
            return _Checked(token_ids, text, self.engine.resolve(token_ids, params, cut=True))
        except RequestError as error:
            if alone or error.code != "context_length_exceeded":
                raise
            return _Checked(token_ids, text, params, error)

    # Within a turn

    def _add(self, checked: _Checked) -> Request:
        return self.engine.add(self._next_id(), checked.token_ids, checked.params, prompt=checked.text)

    def _refused(self, checked: _Checked) -> RequestOutput:
        return self.engine.refused(
            self._next_id(), checked.token_ids, checked.params, prompt=checked.text, reason=str(checked.refusal)
        )

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests - 1)

    def _step(self) -> list[Request]:
        try:
            requests = self.engine.step()
        except Exception as error:
            raise EngineError(f"the engine failed while computing a step: {type(error).__name__}: {error}") from error
        for request in requests:
            if request.finished:
                self._ended(request.request_id)
        return requests

    def _ended(self, request_id: str) -> None:
        if (batch := self._batch_of.pop(request_id, None)) is not None:
            batch.num_unfinished -= 1

    # Between turns

    def _abort(self, requests: Sequence[Request]) -> None:
        with self._turns:
            self.engine.abort([request.request_id for request in requests])
            for request in requests:
                self._ended(request.request_id)

    def _run(self, batch: _Batch, on_step: Callable[[int], None]) -> None:
        """Step until these requests are done; on_step is told how many are left after each step."""
        while batch.num_unfinished:
            with self._turns:
                if batch.num_unfinished:  # whoever had the turn before may have done the last step
                    self._step()
            on_step(batch.num_unfinished)

    def _run_with_progress(self, batch: _Batch) -> None:
        from keepmask.progress import Progress  # rich loads when a bar is shown

        size, before = batch.num_unfinished, self.engine.stats().num_generated_tokens
        with Progress(size) as progress:
            self._run(
                batch,
                lambda num_left: progress.update(size - num_left, self.engine.stats().num_generated_tokens - before),
            )


def _as_prompts(prompts: Sequence[ArrayLike]) -> list[Prompt]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _progress(request: Request) -> tuple[int, bool]:
    """What changes when the request has something new to show."""
    return sum(len(completion.token_ids) for completion in request.completions), request.finished


def _conversations(messages: Any) -> list[Any]:
    """A list of conversations, from one or a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or (messages and _is_message(messages[0])):
        return [messages]
    return list(messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping | Message)
