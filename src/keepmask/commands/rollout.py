"""`keepmask rollout`: roll out a file of prompts into a Parquet file, and go on where an earlier run stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from keepmask.commands.prompt_file import InvalidRow, describe, read_prompts
from keepmask.commands.prompt_row import PromptRow
from keepmask.config import EngineConfig
from keepmask.engine.loading import checkpoint
from keepmask.errors import ConfigError, RequestError
from keepmask.flags import add_flags, given
from keepmask.llm import LLM
from keepmask.models.digest import digests
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.progress import Progress
from keepmask.wire.atomic_files import write_atomically
from keepmask.wire.peer_arrays import brief
from keepmask.wire.rollout_file import Found, RolloutWriter

__all__ = ["Outcome", "add_arguments", "roll_out", "run"]

_DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_MAX_TOKENS = 256
_WRITE_INTERVAL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Complete every prompt of a file with sampling masks, into a Parquet file: JSON lines, Parquet, or a folder of "
        "a data set, with prompt (text, or a chat), messages, prompt_token_ids, ShareGPT's conversations, or requests "
        "of an OpenAI batch. Other columns are carried along. A second run goes on where the first stopped."
    )
    parser.add_argument("prompts", type=Path, metavar="PROMPTS")
    parser.add_argument("-o", "--output", type=Path, default=Path("rollouts.parquet"), metavar="ROLLOUTS.parquet")
    parser.add_argument("--overwrite", action="store_true", help="start afresh when the output file exists")
    parser.add_argument(
        "--skip-invalid",
        action="store_true",
        help="leave out rows that cannot be rolled out; they are written to ROLLOUTS.parquet.invalid.jsonl",
    )
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
    file = read_prompts(args.prompts)
    if file.invalid and not args.skip_invalid:
        raise RequestError(describe(args.prompts, file.invalid))
    params = SamplingParams(
        **{"max_tokens": _DEFAULT_MAX_TOKENS, "logprobs": 0, "return_sampling_mask": True} | given(args, SamplingParams)
    )
    options = {
        name: value for name, value in given(args, EngineConfig).items() if name not in SamplingParams.model_fields
    }
    options |= {"model": args.model, "seed": params.seed or 0, "logprobs_mode": "processed_logprobs"}
    done = roll_out(
        file.prompts,
        params.replace(seed=None),
        EngineConfig(**options),
        args.output,
        overwrite=args.overwrite,
        skip_invalid=args.skip_invalid,
    )
    invalid = sorted(file.invalid + done.invalid, key=lambda row: row.number)
    if done.invalid and not args.skip_invalid:
        raise RequestError(describe(args.prompts, invalid))
    _say(args, params, done, invalid)
    return 0


def _say(args: argparse.Namespace, params: SamplingParams, done: Outcome, invalid: list[InvalidRow]) -> None:
    """What came of it, on standard error; the rows left out in a file beside the output."""
    if done.num_new or done.invalid:
        message = f"{done.num_done} prompts x {params.n} completions in {args.output}"
    else:
        message = f"nothing to do: all {done.num_done} prompts are in {args.output}"
    if invalid:
        rejects = args.output.with_name(args.output.name + ".invalid.jsonl")
        with write_atomically(rejects) as stream:
            stream.writelines(json.dumps(each._asdict()).encode() + b"\n" for each in invalid)
        message += f"; {len(invalid)} rows left out, with reasons in {rejects}"
    print(message, file=sys.stderr)  # noqa: T201


class Outcome(NamedTuple):
    """What a run came to."""

    num_done: int
    """Prompts that the output holds now."""
    num_new: int
    """Those of them that were rolled out now."""
    invalid: list[InvalidRow]
    """Prompts the engine refuses. Where there are any, nothing was rolled out unless skip_invalid was given."""


def roll_out(
    prompts: Sequence[PromptRow],
    params: SamplingParams,
    config: EngineConfig,
    output: Path,
    *,
    overwrite: bool = False,
    skip_invalid: bool = False,
) -> Outcome:
    """Roll out the prompts that `output` does not hold yet.

    Each prompt has a seed of its own, made from the engine's seed, its request id and all that is asked, so that an
    interrupted run gives the rollouts it would have given anyway. What is finished is on the disk within seconds.
    Raises ConfigError when `output` holds rollouts of another model, tokenizer, parameters, or prompt of the same id.
    """
    metadata = {
        "model": config.model,
        "dtype": config.dtype,
        "seed": config.seed,
        "sampling_params": params.model_dump(exclude_defaults=True),
        **digests(checkpoint(config.model)),
    }
    pieces = _Pieces()
    with RolloutWriter(output, metadata, token_text=pieces, overwrite=overwrite) as writer:
        found = writer.found()
        left = [prompt for prompt in prompts if not _is_done(prompt, config.seed, found, output)]
        invalid: list[InvalidRow] = []
        requests: list[_Prepared] = []
        if left:
            llm = LLM(**config.model_dump(exclude_defaults=True))
            pieces.tokenizer = llm.get_tokenizer()
            for prompt in left:
                try:
                    requests.append(_prepare(llm, prompt, params))
                except RequestError as error:
                    invalid.append(InvalidRow(prompt.number, str(error), {prompt.kind: prompt.value, **prompt.extra}))
            if invalid and not skip_invalid:
                return Outcome(len(found), 0, invalid)
            with Progress(len(prompts), done=len(prompts) - len(left)) as progress:
                _run(llm, requests, writer, progress)
        writer.finish()
        return Outcome(len(found) + len(requests), len(requests), invalid)


def _is_done(prompt: PromptRow, seed: int, found: Mapping[str, Found], output: Path) -> bool:
    """Whether the prompt's rollouts are there. Raises ConfigError where another prompt's are, under its id."""
    there = found.get(prompt.request_id)
    if there is None:
        return False
    own = _seed(prompt, seed)
    if there.seed != own:
        raise ConfigError(
            f"{output}: request {prompt.request_id!r} is of another prompt or parameters: {brief(there.prompt)} (seed "
            f"{there.seed}) there, {brief(prompt.value)} (seed {own}) in row {prompt.number}; choose another name, or "
            "overwrite it (--overwrite)"
        )
    return True


def _seed(prompt: PromptRow, seed: int) -> int:
    """The seed of one prompt's draws: a digest of all that is asked, in [0, 2**63)."""
    asked = [prompt.params.get("seed", seed), prompt.request_id, prompt.kind, prompt.value, dict(prompt.params)]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _Pieces:
    """The text of each token id, once there is a tokenizer."""

    tokenizer: Any = None

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in token_ids]


class _Prepared(NamedTuple):
    """What `Engine.add` takes, and what is written beside the rollouts."""

    request_id: str
    token_ids: Sequence[int]
    text: str | None
    params: SamplingParams
    extra: Mapping[str, Any]


def _prepare(llm: LLM, prompt: PromptRow, params: SamplingParams) -> _Prepared:
    """Tokenize and check one prompt. Raises RequestError."""
    is_chat = prompt.kind == "messages"
    token_ids, text = llm.tokenize(llm.render_chat(prompt.value) if is_chat else {str(prompt.kind): prompt.value})
    own = params.replace(**dict(prompt.params) | {"seed": _seed(prompt, llm.config.seed)})
    llm.engine.resolve(token_ids, own)
    return _Prepared(prompt.request_id, token_ids, text, own, prompt.extra)


def _run(llm: LLM, requests: list[_Prepared], writer: RolloutWriter, progress: Progress) -> None:
    """Run all requests, a bounded number in the engine at a time; write them as they finish."""
    queue = iter(requests)
    extras = {each.request_id: each.extra for each in requests}
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
                    made = llm.engine.output(request).rollouts()
                    finished += [replace(rollout, extra=extras[rollout.request_id]) for rollout in made]
                    num_done += 1
            progress.update(start + num_done, llm.engine.stats().num_generated_tokens)
            if finished and time.monotonic() - written_s > _WRITE_INTERVAL_S:
                writer.write(finished)
                finished, written_s = [], time.monotonic()
    finally:  # also when interrupted
        writer.write(finished)
