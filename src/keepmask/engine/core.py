"""`Engine`: requests in, one synchronous step at a time, outputs out. Everything is token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepmask.config import EngineConfig
from keepmask.engine.admission import Admission
from keepmask.engine.kvcache import BlockPool, prefix_hashes
from keepmask.engine.loading import eos_token_ids, load_tokenizer, unmapped_token_ids
from keepmask.engine.model_runner import LMHead, ModelRunner
from keepmask.engine.output_builder import OutputBuilder
from keepmask.engine.policy_weights import copy_changed, policy_weights
from keepmask.engine.request import Completion, Request, State, SupportRows
from keepmask.engine.scheduler import ScheduledChunk, Scheduler
from keepmask.engine.speculation import Speculation, speculation_of
from keepmask.engine.weights import WeightStage, checksums, randomize, read_safetensors, safetensors_files
from keepmask.errors import RequestError
from keepmask.forward.forward_batch import ForwardBatch
from keepmask.grammars.grammar_compiler import GrammarCompiler, GrammarState
from keepmask.mask import SamplingMask
from keepmask.outputs import CompletionOutput, RequestOutput
from keepmask.params import SamplingParams
from keepmask.sampling import LogitsProcessor, SampledBatch, Sampler, SamplerSpec, prompt_logprobs

__all__ = ["Engine", "EngineStats"]

_PROMPT_LOGPROB_ROWS = 64  # positions whose logits over the vocabulary are held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine is doing now, and has done since it started."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    num_steps: int
    num_generated_tokens: int
    num_draft_tokens: int
    """Guessed tokens that were verified."""
    num_accepted_tokens: int
    """Those of them that were drawn."""


class Engine:
    """Continuous batching over one model.

    `add` queues a request, `step` computes one forward and draws, `output` reads a request at any time. Not
    thread-safe: one thread owns an engine. A request that fails ends alone; an exception out of `step` means the
    engine itself failed.
    """

    def __init__(
        self, config: EngineConfig, *, processors: Sequence[LogitsProcessor] = (), module: nn.Module | None = None
    ) -> None:
        self.config = config
        self.runner = ModelRunner(config, module)
        self.tokenizer: Any | None = load_tokenizer(config)
        self.eos_token_ids = eos_token_ids(self.runner.model, self.tokenizer)
        self.weight_version = "default"  # as vLLM calls the weights it was started with
        self.sampler = Sampler(
            SamplerSpec(
                vocab_size=self.runner.vocab_size,
                eos_token_ids=self.eos_token_ids,
                logprobs_mode=config.logprobs_mode,
                semantics=config.sampling_semantics,
                contract=config.sampling_mask_contract,
                return_sampling_mask=config.return_sampling_mask,
                max_logprobs=self.runner.vocab_size if config.max_logprobs < 0 else config.max_logprobs,
                max_mask_bytes_per_request=config.max_mask_bytes_per_request,
                banned_token_ids=unmapped_token_ids(config, self.tokenizer, self.runner.vocab_size),
                thinking_start_token_ids=tuple(config.thinking_start_token_ids),
                thinking_end_token_ids=tuple(config.thinking_end_token_ids),
                processors=tuple(processors),
            )
        )
        self._admission = Admission(
            self.sampler, self.tokenizer, vocab_size=self.runner.vocab_size, max_model_len=self.max_model_len
        )
        self._pool = BlockPool(self.runner.num_blocks, config.block_size)
        self._speculation = speculation_of(config, self.runner, self.sampler, self.tokenizer)
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            speculation=self._speculation,
        )
        self.outputs = OutputBuilder(self.tokenizer)
        self._grammars = (
            None
            if self.tokenizer is None
            else GrammarCompiler(self.tokenizer, vocab_size=self.runner.vocab_size, stop_token_ids=self.eos_token_ids)
        )
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._num_steps = 0
        self._num_generated = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        return self.runner.max_model_len

    @property
    def num_unfinished(self) -> int:
        """Requests that still have tokens to come."""
        return len(self._requests)

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            num_draft_tokens=self._speculation.num_drafted if self._speculation is not None else 0,
            num_accepted_tokens=self._speculation.num_accepted if self._speculation is not None else 0,
        )

    def resolve(self, prompt_token_ids: Sequence[int], params: SamplingParams, *, cut: bool = False) -> SamplingParams:
        """`params` with its defaults filled in for this prompt, checked against everything this engine knows.

        cut: max_tokens that the context has no room for become what it has room for, as in vLLM's `LLM`. Raises
        RequestError naming the field, the rule and the remedy; the engine is unchanged.
        """
        params = self._admission.resolve(len(self._admission.token_ids(prompt_token_ids)), params, cut=cut)
        self._admission.bad_words(params)
        self.open_form(params)
        return params

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Queue a request. Raises RequestError, and changes nothing, when it cannot be served."""
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r}: is in use by an unfinished request", param="request_id")
        token_ids = self._admission.token_ids(prompt_token_ids)
        params = self._admission.resolve(len(token_ids), params)
        bad_words = self._admission.bad_words(params)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._next_seed() if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids),
            stop_names=self._admission.stop_ids(params),
        )
        for index in range(params.n):
            row = self.sampler.open_row(
                params,
                prompt_token_ids=token_ids,
                seed=request.seed,
                completion_index=index,
                bad_words_token_ids=bad_words,
                grammar=self.open_form(params),
            )
            completion = Completion(request=request, index=index, row=row, text=self.outputs.open_text(request))
            if row.returns_mask:
                completion.supports = SupportRows(with_logprobs=row.returns_mask_logprobs)
            request.completions.append(completion)
        if params.prompt_logprobs is None:
            salt = f"{cache_salt}\0{self.weight_version}".encode()
            request.block_hashes = prefix_hashes(token_ids, self._pool.block_size, salt)
        else:
            request.prompt_logprobs = [None]
        self._requests[request_id] = request
        self._scheduler.add(request)
        if self._speculation is not None:
            self._speculation.begin(request)
        return request

    def refused(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        reason: str,
        prompt: str | None = None,
    ) -> RequestOutput:
        """The output of a request that was never added: completions without a token that ended in an error."""
        asked = params.return_sampling_mask
        masked = self.sampler.spec.return_sampling_mask if asked is None else asked
        outputs = [
            CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                logprobs=None if params.logprobs is None else [],
                sampling_mask=SamplingMask.from_lists([]) if masked else None,
                finish_reason="error",
                stop_reason=reason,
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=outputs,
            finished=True,
            seed=params.seed or 0,
            sampling_params=params,
        )

    def open_form(self, params: SamplingParams) -> GrammarState | None:
        """Where a text begins in the form that the params ask for, compiled if it is not yet; from any thread.

        Raises RequestError for a form that has no meaning, takes too much to compile, or no text has.
        """
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise RequestError(
                "structured_outputs: need a tokenizer, and this engine has none", param="structured_outputs"
            )
        return self._grammars.open(params.structured_outputs)

    def speculate(self, speculation: Speculation | None) -> None:
        """Guess by this from the next step on, or not any more; nothing but the number of steps changes."""
        self._speculation = self._scheduler.speculation = speculation
        if speculation is not None:
            for request in self._requests.values():
                speculation.begin(request)

    def output(self, request: Request) -> RequestOutput:
        """All there is of the request so far."""
        return self.outputs.request_output(request)

    def delta(self, completion: Completion, start: int, text_start: int) -> CompletionOutput:
        """The completion from token `start` and character `text_start` on: one chunk of a stream."""
        return self.outputs.completion_output(completion, start, text_start)

    def abort(self, request_ids: Iterable[str], error: str | None = None) -> list[Request]:
        """End these requests where they stand; they keep their tokens and rows. Unknown ids are passed over.

        error: why they fail; without it they are aborted.
        """
        aborted = [request for request_id in request_ids if (request := self._requests.get(request_id)) is not None]
        for request in aborted:
            for completion in request.completions:
                if completion.state is not State.FINISHED:
                    completion.finish("abort" if error is None else "error", error)
                    self._scheduler.remove(completion)
            self._forget(request)
        return aborted

    def abort_all(self) -> list[Request]:
        """`abort` every request."""
        return self.abort(list(self._requests))

    def reset_prefix_cache(self) -> None:
        """New requests compute their prompts anew, whatever was computed before."""
        self._pool.forget_all()

    def stage_weights(
        self,
        weights: Mapping[str, Tensor] | str | Path = MappingProxyType({}),
        *,
        partial: bool = False,
        cast: bool = False,
    ) -> WeightStage:
        """Where to collect new weights, see `WeightStage`, with `weights` in it: tensors by their names, a safetensors
        file or a folder of them. Safe to call and to fill on another thread while the engine steps.
        """
        stage = WeightStage(self.runner.model, partial=partial, cast=cast)
        if isinstance(weights, Mapping):
            stage.add(weights)
        else:
            for file, names in safetensors_files(Path(weights)).items():
                stage.add(read_safetensors(file.read_bytes(), name=str(file), names=names))
        return stage

    def update_weights(self, stage: WeightStage, version: str | None = None) -> str:
        """Replace the model's weights by the staged ones, all or none; returns the version they have from now on.

        version: their name in `weight_versions`; by default the old one plus one. Running requests go on with what
        they have computed; nothing computed before is found by requests added later. Raises RequestError, and changes
        nothing, when weights are missing.
        """
        stage.check_complete()
        stage.exchange()
        return self._weights_changed(_next_version(self.weight_version) if version is None else version)

    def sync_weights(self, module: nn.Module, version: str | None = None) -> str:
        """Replace the weights by those of a trainer's module, see `copy_changed`; returns their version."""
        copy_changed(self.runner.model, lambda: policy_weights(module))
        return self._weights_changed(_next_version(self.weight_version) if version is None else version)

    def rename_weights(self, version: str) -> None:
        """What the weights are called in `weight_versions` from now on."""
        self.weight_version = version

    def weights(self) -> dict[str, Tensor]:
        """A copy of every weight, by its name in the model's state dict."""
        return {name: tensor.clone() for name, tensor in self.runner.model.state_dict().items()}

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight, by its name in the model's state dict."""
        return checksums(self.runner.model)

    def randomize_weights(self, generator: torch.Generator) -> str:
        """Overwrite the weights with noise, as a test of what transfers them; returns the version of the noise."""
        randomize(self.runner.model, generator)
        return self._weights_changed(f"{self.weight_version}+random")

    def step(self) -> list[Request]:
        """One forward and the draws that follow from it; returns the requests that have new tokens or ended."""
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return []
        self._num_steps += 1
        batch = self.runner.lay_out(plan.chunks)
        hidden = self.runner.forward(batch, plan.copies)
        self._score_prompts(batch, hidden)
        for chunk in batch.chunks:
            self._scheduler.computed(chunk)
        if not batch.rounds:
            return []
        self._draw(batch, self.runner.head(hidden[batch.draw_rows]))
        touched = dict.fromkeys(batch.chunks[at].completion.request for at in batch.rounds[0])
        for request in touched:
            if request.finished:
                self._forget(request)
        return list(touched)

    def _draw(self, batch: ForwardBatch[ScheduledChunk], head: LMHead) -> None:
        """Draw the next token of each chunk that has one, and go on with those whose draw is what was guessed.

        Each round draws one token a completion, with all that the tokens before it changed: penalties, bans, stops.
        """
        num_before = {at: len(batch.chunks[at].completion.token_ids) for at in batch.rounds[0]}
        first, verified = 0, set(num_before)
        for number, chunks in enumerate(batch.rounds):
            drawing = [(first + row, at) for row, at in enumerate(chunks) if at in verified]
            first += len(chunks)
            if not drawing:
                break
            rows = [row for row, _ in drawing]
            completions = [batch.chunks[at].completion for _, at in drawing]
            sampled = self.sampler.sample(head.take(rows), [completion.row for completion in completions])
            for index, (_, at) in enumerate(drawing):
                completion, draft = completions[index], batch.chunks[at].draft
                self._accept(completion, sampled, index)
                if completion.state is State.FINISHED or draft[number : number + 1] != completion.token_ids[-1:]:
                    verified.discard(at)
                else:  # the token's keys and values are in the cache already
                    completion.num_computed += 1
        if self._speculation is not None:
            for at, count in num_before.items():
                completion = batch.chunks[at].completion
                self._speculation.committed(completion, batch.chunks[at].draft, len(completion.token_ids) - count)

    def _forget(self, request: Request) -> None:
        """The request has ended."""
        del self._requests[request.request_id]
        if self._speculation is not None:
            self._speculation.end(request)

    def _accept(self, completion: Completion, sampled: SampledBatch, at: int) -> None:
        """Commit what was drawn for the completion, or end it."""
        if (error := sampled.errors.get(at)) is not None:
            completion.finish("error", str(error))
            self._scheduler.remove(completion)
            return
        completion.commit(int(sampled.token_ids[at]), self.weight_version)
        self._num_generated += 1
        if (entry := sampled.logprobs.row_logprobs(at)) is not None:
            completion.logprobs.append(entry)
            completion.cumulative_logprob += float(entry.values[0])
        if completion.supports is not None:
            assert sampled.mask is not None
            completion.supports.append(*sampled.mask.wait().row(at))
        if self._stop(completion):
            self._scheduler.remove(completion)

    def _stop(self, completion: Completion) -> bool:
        """Finish the completion if its last token ends it."""
        request, token_id = completion.request, completion.token_ids[-1]
        params = request.params
        may_stop = len(completion.token_ids) > params.min_tokens
        if may_stop and token_id in self.eos_token_ids and not params.ignore_eos:
            completion.finish("stop")
        elif may_stop and token_id in request.stop_token_ids:
            completion.finish("stop", request.stop_names.get(token_id, token_id))
        elif params.stop and completion.text and (found := completion.text.push([token_id])) is not None:
            completion.finish("stop", found)
        elif completion.row.grammar is not None and completion.row.grammar.ended:
            completion.finish("stop")
        elif len(completion.token_ids) == params.max_tokens:
            completion.finish("length")
        return completion.state is State.FINISHED

    def _score_prompts(self, batch: ForwardBatch[ScheduledChunk], hidden: Tensor) -> None:
        """Prompt log-probs of the chunks whose requests asked for them; None where the logits hold NaN or +inf."""
        begin = 0
        for chunk in batch.chunks:
            request, start = chunk.completion.request, chunk.completion.num_computed
            rows = hidden[begin : begin + chunk.num_tokens]
            begin += chunk.num_rows
            known = request.prompt_logprobs
            if known is None or len(known) == len(request.prompt_token_ids):
                continue
            first = len(known) - 1  # the position whose logits score the next prompt token
            targets = request.prompt_token_ids[first + 1 : start + chunk.num_tokens + 1]
            num_logprobs = request.params.prompt_logprobs
            assert num_logprobs is not None
            for low in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
                part = targets[low : low + _PROMPT_LOGPROB_ROWS]
                at = first - start + low
                head = self.runner.head(rows[at : at + len(part)])
                logits = head.float32(torch.arange(len(part), device=hidden.device))
                entries = prompt_logprobs(logits, torch.tensor(part, device=hidden.device), num_logprobs)
                known += (entry if np.isfinite(entry.values).all() else None for entry in entries)

    def _weights_changed(self, version: str) -> str:
        self.weight_version = version
        self._scheduler.weights_changed()
        return version

    def _next_seed(self) -> int:
        """A seed for a request that brought none: a hash of the engine's seed and the request's order of arrival."""
        self._num_added += 1
        digest = hashlib.sha256(f"{self.config.seed}:{self._num_added}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def _next_version(version: str) -> str:
    if version == "default":
        return "1"
    return str(int(version) + 1) if version.isdecimal() else f"{version}+1"
