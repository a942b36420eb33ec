"""`LLM`: offline rollouts with vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine
from keepmask.engine.request import Request
from keepmask.errors import ConfigError, EngineError, RequestError
from keepmask.outputs import RequestOutput
from keepmask.params import SamplingParams
from keepmask.sampling import LogitsProcessor

__all__ = ["LLM", "Prompt"]

Prompt = str | Mapping[str, Any]
"""Text, {"prompt": text}, or {"prompt_token_ids": [...]}."""


class LLM:
    """A model with its engine, in this process.

    model: a packaged model's name, a checkpoint folder, or a Hugging Face hub id. The other options are the fields of
    `EngineConfig`. logits_processors: custom steps between bad words and temperature, in this order.

    Raises ConfigError when the engine cannot start as configured.
    """

    def __init__(self, model: str, *, logits_processors: Sequence[LogitsProcessor] = (), **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self.engine = Engine(self.config, processors=logits_processors)
        self._num_requests = 0

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self.engine.tokenizer is None:
            raise ConfigError("skip_tokenizer_init=True: this engine has no tokenizer")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given no parameters."""
        return SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[[Iterable[Any]], Any] = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; outputs come in the order of the prompts.

        sampling_params: one for all prompts, or one each. use_tqdm: show a progress bar with tokens/s.
        Raises RequestError, before anything runs, when a request cannot be served. A completion that fails while
        running ends with finish_reason "error" and does not disturb the others.
        """
        requests = self._add(prompts, sampling_params)
        if use_tqdm:
            from keepmask.progress import Progress  # rich loads when a bar is shown

            before = self.engine.stats().num_generated_tokens
            with Progress(len(requests)) as progress:
                self._run(
                    requests, lambda done: progress.update(done, self.engine.stats().num_generated_tokens - before)
                )
        else:
            self._run(requests, lambda _done: None)
        return [self.engine.output(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Complete one conversation or a list of them, rendered with the model's own chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.render_chat(each, add_generation_prompt=add_generation_prompt) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> dict[str, Any]:
        """A conversation as a prompt: its text and token ids. Raises RequestError when the template refuses it."""
        tokenizer = self.get_tokenizer()
        try:
            text = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # templates raise whatever they like
            raise RequestError(f"messages: the chat template refused them: {error}", param="messages") from error
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def tokenize(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        """Token ids of a prompt, and its text where there is one. Raises RequestError for anything else."""
        if isinstance(prompt, str):
            return self.get_tokenizer().encode(prompt), prompt
        if not isinstance(prompt, Mapping) or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise RequestError(
                "prompt: must be text, {'prompt': text} or {'prompt_token_ids': [...]}, got " + type(prompt).__name__,
                param="prompt",
            )
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise RequestError(f"prompt: unknown key {sorted(unknown)[0]!r}", param="prompt")
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            return prompt["prompt_token_ids"], text
        return self.get_tokenizer().encode(text), text

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The request's output after every step that changed it, each with everything so far."""
        (request,) = self._add(prompt, sampling_params)
        try:
            while not request.finished:
                if request in self.step():
                    yield self.engine.output(request)
        finally:
            self.engine.abort([request.request_id])

    def step(self) -> list[Request]:
        """One step of the engine; returns the requests that have new tokens or ended.

        Raises EngineError when the engine itself failed.
        """
        try:
            return self.engine.step()
        except Exception as error:
            raise EngineError(f"the engine failed while computing a step: {error}") from error

    def _add(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Queue all prompts, or none when one of them cannot be served."""
        items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise RequestError(
                f"sampling_params: {len(params)} for {len(items)} prompts; give one for all or one for each",
                param="sampling_params",
            )
        requests: list[Request] = []
        try:
            for item, each in zip(items, params, strict=True):
                token_ids, text = self.tokenize(item)
                self._num_requests += 1
                requests.append(self.engine.add(str(self._num_requests - 1), token_ids, each, prompt=text))
        except BaseException:
            self.engine.abort([request.request_id for request in requests])
            raise
        return requests

    def _run(self, requests: list[Request], on_step: Callable[[int], None]) -> None:
        """Step until these requests are done; on any exception none of them is left in the engine.

        on_step: called after each step with how many are done.
        """
        unfinished = set(requests)
        try:
            while unfinished:
                unfinished.difference_update(request for request in self.step() if request.finished)
                on_step(len(requests) - len(unfinished))
        except BaseException:
            self.engine.abort([request.request_id for request in requests])
            raise
