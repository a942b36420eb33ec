"""`OutputBuilder`: from drawn tokens to what the caller gets."""

from __future__ import annotations

from typing import Any

from keepmask.engine.completion_text import CompletionText, TextOffsets
from keepmask.engine.request import Completion, Request, State
from keepmask.engine.token_bytes import TokenBytes, byte_values
from keepmask.outputs import CompletionOutput, Logprob, RequestOutput, WeightVersionSpan
from keepmask.params import SamplingParams
from keepmask.sampling import TokenLogprobs

__all__ = ["OutputBuilder"]


class OutputBuilder:
    """Builds what callers see of requests. Knows the tokenizer, or None where completions carry no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = None if tokenizer is None else TokenBytes(tokenizer.backend_tokenizer)
        self._byte_ids = frozenset() if tokenizer is None else frozenset(byte_values(tokenizer.backend_tokenizer))
        self._pieces: dict[int, str] = {}

    def open_text(self, request: Request) -> CompletionText | None:
        """A new completion's text; None where the request wants none."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        return CompletionText(
            self._tokenizer.backend_tokenizer,
            byte_ids=self._byte_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=[each for each in params.stop if each not in request.stop_names.values()],
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def text_offsets(self, params: SamplingParams) -> TextOffsets:
        """For the tokens of a completion with these params."""
        assert self._tokenizer is not None
        return TextOffsets(
            CompletionText(
                self._tokenizer.backend_tokenizer,
                byte_ids=self._byte_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
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
        text = self._text(completion)
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

    def _text(self, completion: Completion) -> str:
        """Text so far; a stop token that ended the completion shows only when the request includes it."""
        text, params = completion.text, completion.request.params
        if text is None:
            return ""
        ended_by_token = completion.finish_reason == "stop" and not text.cut
        hidden = 1 if ended_by_token and not params.include_stop_str_in_output else 0
        new = completion.token_ids[text.num_tokens : len(completion.token_ids) - hidden]
        if completion.state is State.FINISHED:
            text.end(new)
        else:
            text.push(new)
        return text.released()

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
