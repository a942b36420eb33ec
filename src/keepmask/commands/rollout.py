"""`keepmask rollout`: roll out a file of prompts into a Parquet file, and go on where an earlier run stopped."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from keepmask.commands.prompt_file import PromptLine, read_prompts
from keepmask.config import EngineConfig
from keepmask.errors import RequestError
from keepmask.flags import add_flags, given
from keepmask.llm import LLM
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.progress import Progress
from keepmask.wire.rollout_file import RolloutWriter

__all__ = ["add_arguments", "roll_out", "run"]

_DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_MAX_TOKENS = 256
_WRITE_INTERVAL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Complete every prompt of a JSONL file (a string, or an object with prompt, messages or "
        "prompt_token_ids a line) with sampling masks, into a Parquet file. A second run goes on where the first "
        "stopped."
    )
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=Path("rollouts.parquet"), metavar="ROLLOUTS.parquet")
    parser.add_argument("--overwrite", action="store_true", help="start afresh when the output file exists")
    parser.add_argument(
        "--model",
        default=_DEFAULT_MODEL,
        help=f"{EngineConfig.model_fields['model'].description} (default: {_DEFAULT_MODEL})",
    )
    add_flags(parser, SamplingParams, title="sampling", exclude=("detokenize",))
    engine_only = {"model", "logprobs_mode", "skip_tokenizer_init", *SamplingParams.model_fields}
    add_flags(parser, EngineConfig, title="engine", exclude=engine_only)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    disable_progress_bar()
    prompts = read_prompts(args.prompts)
    params = SamplingParams(
        **{"max_tokens": _DEFAULT_MAX_TOKENS, "logprobs": 0, "return_sampling_mask": True} | given(args, SamplingParams)
    )
    options = {
        name: value for name, value in given(args, EngineConfig).items() if name not in SamplingParams.model_fields
    }
    options |= {"model": args.model, "seed": params.seed or 0, "logprobs_mode": "processed_logprobs"}
    config = EngineConfig(**options)
    num_done = roll_out(prompts, params.replace(seed=None), config, args.output, overwrite=args.overwrite)
    print(f"{num_done} prompts x {params.n} completions in {args.output}", file=sys.stderr)  # noqa: T201
    return 0


def roll_out(
    prompts: Sequence[PromptLine], params: SamplingParams, config: EngineConfig, output: Path, *, overwrite: bool
) -> int:
    """Roll out the prompts that `output` does not hold yet; returns the number of prompts it holds then.

    Each prompt has a seed of its own, made from the engine's seed and its request id, so that an interrupted run gives
    the rollouts it would have given anyway. What is finished is on the disk within seconds.
    """
    metadata = {
        "model": config.model,
        "dtype": config.dtype,
        "seed": config.seed,
        "sampling_params": params.model_dump(exclude_defaults=True),
    }
    pieces = _Pieces()
    with RolloutWriter(output, metadata, token_text=pieces, overwrite=overwrite) as writer:
        done = writer.completed()
        left = [prompt for prompt in prompts if prompt.request_id not in done]
        if left:
            llm = LLM(**config.model_dump(exclude_defaults=True))
            pieces.tokenizer = llm.get_tokenizer()
            requests = [_prepare(llm, prompt, params) for prompt in left]
            with Progress(len(prompts), done=len(prompts) - len(left)) as progress:
                _run(llm, requests, writer, progress)
        writer.finish()
        return len(done) + len(left)


class _Pieces:
    """The text of each token id, once there is a tokenizer."""

    tokenizer: Any = None

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in token_ids]


def _prepare(llm: LLM, prompt: PromptLine, params: SamplingParams) -> _Prepared:
    """Tokenize and check one prompt. Raises RequestError naming its line."""
    try:
        rendered = llm.render_chat(prompt.value) if prompt.kind == "messages" else {prompt.kind: prompt.value}
        token_ids, text = llm.tokenize(rendered)
        digest = hashlib.sha256(f"{llm.config.seed}:{prompt.request_id}".encode()).digest()
        own = params.replace(seed=int.from_bytes(digest[:8], "little") >> 1)
        llm.engine.resolve(token_ids, own)
    except RequestError as error:
        raise RequestError(f"line {prompt.line}: {error}", param=error.param) from None
    return _Prepared(prompt.request_id, token_ids, text, own)


class _Prepared(NamedTuple):
    """What `Engine.add` takes."""

    request_id: str
    token_ids: Sequence[int]
    text: str | None
    params: SamplingParams


def _run(llm: LLM, requests: list[_Prepared], writer: RolloutWriter, progress: Progress) -> None:
    """Run all requests, a bounded number in the engine at a time; write them as they finish."""
    queue = iter(requests)
    finished: list[Rollout] = []
    start, written_s = progress.done, time.monotonic()
    num_done = 0
    try:
        while True:
            room = max(1, 2 * llm.config.max_num_seqs - llm.engine.num_unfinished)
            for each in islice(queue, room):
                llm.engine.add(each.request_id, each.token_ids, each.params, prompt=each.text)
            if not llm.engine.num_unfinished:
                break
            for request in llm.step():
                if request.finished:
                    finished += llm.engine.output(request).rollouts()
                    num_done += 1
            progress.update(start + num_done, llm.engine.stats().num_generated_tokens)
            if finished and time.monotonic() - written_s > _WRITE_INTERVAL_S:
                writer.write(finished)
                finished, written_s = [], time.monotonic()
    finally:  # also when interrupted
        writer.write(finished)
