"""From drawn tokens to what the caller gets: text, stop conditions, log-prob entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from keepmask.engine.request import Completion, Request, State
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput, WeightVersionSpan
from keepmask.sampling import TokenLogprobs

__all__ = ["CompletionText", "OutputBuilder"]


class CompletionText:
    """The text of one completion as its tokens come, and the stop string it may run into.

    Text grows only by whole characters. With stop strings, the longest tail that may begin one is held back from
    `released` until it is decided.
    """

    __slots__ = (
        "_backend",
        "_ended",
        "_held_back",
        "_ids",
        "_include_stop",
        "_skip_special_tokens",
        "_stop",
        "_stream",
        "text",
    )

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._stop = tuple(stop)
        self._held_back = max((len(text) for text in self._stop), default=1) - 1
        self._include_stop = include_stop
        self._ended = False
        self.text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return len(self._ids)

    def push(self, token_ids: Iterable[int]) -> str | None:
        """Append tokens; returns the stop string that now ends the text, which is cut there, or None."""
        for token_id in token_ids:
            self._ids.append(token_id)
            piece = self._stream.step(self._backend, token_id)
            if piece and (found := self._extend(piece)) is not None:
                return found
        return None

    def end(self) -> None:
        """No more tokens: what is held back, and a last character left incomplete, belong to the text."""
        if self._ended:
            return
        self._ended = True
        whole = self._backend.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        if whole.startswith(self.text):
            self.text = whole

    def released(self) -> str:
        """The part of the text that no later token can change."""
        if self._ended or not self._held_back:
            return self.text
        return self.text[: max(0, len(self.text) - self._held_back)]

    def _extend(self, piece: str) -> str | None:
        """Append text; cut at the stop string that occurs first, if any."""
        start = max(0, len(self.text) - self._held_back)
        self.text += piece
        hits = [(at, stop) for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self.text = self.text[: at + (len(stop) if self._include_stop else 0)]
        self._ended = True
        return stop


class OutputBuilder:
    """Builds what callers see of requests. Knows the tokenizer, or None where completions carry no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def open_text(self, request: Request) -> CompletionText | None:
        """A new completion's text; None where the request wants none."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return CompletionText(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
        )

    def request_output(self, request: Request) -> RequestOutput:
        """All there is of the request so far."""
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self.completion_output(completion) for completion in request.completions],
            finished=request.finished,
            seed=request.seed,
            prompt_logprobs=self._prompt_logprobs(request),
            num_cached_tokens=request.num_cached_tokens,
            sampling_params=request.params,
        )

    def completion_output(self, completion: Completion, start: int = 0, text_start: int = 0) -> CompletionOutput:
        """The completion from token `start` and character `text_start` on; log-probs, rows and versions follow.

        cumulative_logprob is of the whole completion so far.
        """
        finished = completion.state is State.FINISHED
        text = self._text(completion, finished=finished)
        wanted = completion.request.params.logprobs is not None
        entries = completion.logprobs
        return CompletionOutput(
            index=completion.index,
            text=text[text_start:],
            token_ids=completion.token_ids[start:],
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            logprobs=[self._entries(entry) for entry in entries[start:]] if wanted else None,
            sampling_mask=None if completion.supports is None else completion.supports.mask(start),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            weight_versions=[
                WeightVersionSpan(max(span.start, start) - start, span.end - start, span.version)
                for span in completion.weight_versions
                if span.end > start
            ],
        )

    def _text(self, completion: Completion, *, finished: bool) -> str:
        """Text so far; a stop token that ended the completion shows only when the request includes it."""
        state = completion.text
        if state is None:
            return ""
        params = completion.request.params
        ended_by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        hidden = 1 if ended_by_token and not params.include_stop_str_in_output else 0
        state.push(completion.token_ids[state.num_tokens : len(completion.token_ids) - hidden])
        if finished:
            state.end()
        return state.released()

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.prompt_logprobs is None:
            return None
        return [None if entry is None else self._entries(entry) for entry in request.prompt_logprobs]

    def _entries(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        columns = zip(entry.ids.tolist(), entry.values.tolist(), entry.ranks.tolist(), strict=True)
        return {token_id: Logprob(value, rank, self._piece(token_id)) for token_id, value, rank in columns}

    def _piece(self, token_id: int) -> str | None:
        """The token's own text."""
        if self._tokenizer is None:
            return None
        if token_id not in self._pieces:
            self._pieces[token_id] = self._tokenizer.decode([token_id])
        return self._pieces[token_id]
