"""`keepmask verify`: does replay of these rollouts give the engine's own log-probabilities, and if not, why not."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from keepmask.commands.demo import arithmetic_prompts
from keepmask.commands.prompt_file import read_prompts
from keepmask.commands.score_rollouts import score_rollouts
from keepmask.config import EngineConfig
from keepmask.conform.json_client import JsonClient
from keepmask.engine.loading import checkpoint, load_tokenizer
from keepmask.errors import ConfigError, MaskError
from keepmask.flags import add_flags, given
from keepmask.outputs import Rollout
from keepmask.params import SamplingParams
from keepmask.progress import Progress
from keepmask.replay.mismatch import measure_mismatch
from keepmask.report.page import write_report
from keepmask.verify.causes import Explanation, explain
from keepmask.verify.live import ask
from keepmask.verify.rollout_sources import read_any
from keepmask.verify.row_logits import bare

__all__ = ["add_arguments", "run"]

_KEY_VARIABLE = "KEEPMASK_API_KEY"
_LIVE = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_tokens": 64}
_EXPLAINED_TOKENS = 1024  # of the rollouts that causes are tested on
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROWS = (
    ("importance ratio, mean", "ratio_{}_mean", "{:.6f}"),
    ("importance ratio, median", "ratio_{}_median", "{:.6f}"),
    ("share outside [0.9, 1.1]", "ratio_{}_outside_0.1", "{:.2%}"),
    ("log-ratio, mean (nats)", "log_ratio_{}_mean", "{:+.6f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Scores rollouts of any engine with a transformers model on their recorded masks, prints the importance ratios "
        "before and after replay, tells what precision leaves from what truncation causes, and names the cause of what "
        "remains. Exits with 1 where more remains than the threshold."
    )
    parser.add_argument(
        "source",
        metavar="ROLLOUTS|ANSWERS|URL",
        help="a rollout file; JSON of vLLM, SGLang, SkyRL, slime, miles or verifiers; or a server that runs",
    )
    parser.add_argument("--model", required=True, help=EngineConfig.model_fields["model"].description)
    parser.add_argument("--dtype", choices=_DTYPES, help="the engine's type (default: the file's, else the model's)")
    parser.add_argument(
        "--also", action="append", default=[], metavar="MODEL", help="a model that may have drawn them in its place"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.05, help="largest share of ratios outside [0.9, 1.1] (default: 0.05)"
    )
    parser.add_argument("--report", type=Path, metavar="PATH", help="draw the page of the scored rollouts there")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    server = parser.add_argument_group("with a URL")
    server.add_argument("--api", choices=("vllm", "sglang"), default="vllm", help="the route it speaks")
    server.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: ${_KEY_VARIABLE})")
    server.add_argument("--prompts", type=Path, help="a file of prompts (default: 16 questions)")
    server.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each answer")
    add_flags(
        parser, SamplingParams, title="what is asked of the server, or was, where answers come without their request"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    disable_progress_bar()
    config = EngineConfig(model=args.model, dtype="float32", device="cpu")
    tokenizer: Any = load_tokenizer(config)
    params = given(args, SamplingParams)
    SamplingParams(**params)
    is_url = args.source.startswith(("http://", "https://"))
    rollouts, metadata = _ask(args, tokenizer, params) if is_url else read_any(Path(args.source), params)
    usable = [rollout for rollout in rollouts if rollout.token_ids.size]
    if lacking := sum(rollout.sampling_mask is None or rollout.logprobs is None for rollout in usable):
        raise MaskError(f"{args.source}: {lacking} of {len(usable)} completions are without masks or log-probs")
    if not usable:
        raise MaskError(f"{args.source}: holds no generated tokens")
    named = args.dtype or metadata.get("dtype")
    columns = {dtype: _scored(args, usable, dtype) for dtype in dict.fromkeys(("float32", _dtype(args, named)))}
    engine = list(columns.values())[-1]
    outside = engine.table["ratio_replayed_outside_0.1"]
    sample = _sample(usable)
    with Progress(len(sample), label="Testing causes") as progress:
        explanation = explain(
            engine.model,
            sample,
            tokenizer=tokenizer,
            others={name: partial(_load, name, engine.model.dtype) for name in args.also},
            threshold=args.threshold,
            on_progress=progress.update,
        )
    _say(args, columns, explanation)
    if args.report is not None:
        texts = {i: tokenizer.decode([i]) for i in sorted({int(i) for r in usable for i in _ids(r)})}
        shown = {"model": args.model, "dtype": str(engine.model.dtype).removeprefix("torch."), "token_text": texts}
        write_report(args.report, engine.rollouts, metadata=shown, table=engine.table)
    return int(outside > args.threshold)


class _Column(NamedTuple):
    """What the model gave in one type."""

    model: Any
    rollouts: list[Rollout]
    table: dict[str, float]


def _dtype(args: argparse.Namespace, named: str | None) -> str:
    if named in _DTYPES:
        return named
    found = str(AutoConfig.from_pretrained(checkpoint(args.model)).dtype).removeprefix("torch.")
    return found if found in _DTYPES else "bfloat16"


def _load(name: str, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(checkpoint(name, dtype), dtype=dtype).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r}: cannot be loaded: {str(error)[:300]}") from error


def _scored(args: argparse.Namespace, rollouts: Sequence[Rollout], dtype: str) -> _Column:
    model = _load(args.model, _DTYPES[dtype])
    done = 0
    with Progress(len(rollouts), label=f"Scoring in {dtype}") as progress:

        def on_progress(num_rollouts: int) -> None:
            nonlocal done
            done += num_rollouts
            progress.update(done)

        scored = score_rollouts(model, [bare(rollout) for rollout in rollouts], on_progress=on_progress)
    names = ("policy_logprobs", "policy_full_logprobs")
    whole = [
        dataclasses.replace(rollout, **{name: getattr(each, name) for name in names})
        for rollout, each in zip(rollouts, scored, strict=True)
    ]
    return _Column(model, whole, measure_mismatch(whole).table())


def _sample(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Whole rollouts, evenly from all, of about as many tokens as causes are tested on."""
    mean = sum(rollout.token_ids.size for rollout in rollouts) / len(rollouts)
    step = max(1, round(len(rollouts) * mean / _EXPLAINED_TOKENS))
    return list(rollouts[::step])


def _ids(rollout: Rollout) -> list[int]:
    mask = rollout.sampling_mask
    assert mask is not None
    return [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist(), *mask.ids.tolist()]


def _ask(args: argparse.Namespace, tokenizer: Any, params: Mapping[str, Any]) -> tuple[list[Rollout], dict[str, Any]]:
    rows = arithmetic_prompts(16) if args.prompts is None else read_prompts(args.prompts).prompts
    prompts = [
        row.value
        if row.kind == "prompt_token_ids"
        else tokenizer.encode(row.value)
        if row.kind == "prompt"
        else tokenizer.encode(
            tokenizer.apply_chat_template(row.value, add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )
        for row in rows
    ]
    key = args.api_key or os.environ.get(_KEY_VARIABLE) or None
    with (
        JsonClient(args.source, api_key=key, timeout_s=args.timeout) as client,
        Progress(len(prompts), label="Asking") as progress,
    ):
        return ask(client, args.api, prompts, {**_LIVE, **params}, on_progress=progress.update), {}


def _say(args: argparse.Namespace, columns: Mapping[str, _Column], found: Explanation) -> None:
    """The table, what remains and its cause, on standard output."""
    tables = {dtype: column.table for dtype, column in columns.items()}
    if args.json:
        document = {"tables": tables, "threshold": args.threshold, **dataclasses.asdict(found)}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    shown = Table(title=f"{args.source}: trainer over sampler, {args.model}")
    last = list(tables.values())[-1]
    headings = ("", "full vocabulary", *(f"replayed, {dtype}" for dtype in tables))
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left")
    for label, name, form in _ROWS:
        replayed = (table[name.format("replayed")] for table in tables.values())
        shown.add_row(label, *(form.format(value) for value in (last[name.format("full")], *replayed)))
    largest = (f"{table['logprob_diff_max']:.2e}" for table in tables.values())
    shown.add_row("largest |log-prob difference|", "", *largest)
    shown.add_row("tokens", f"{last['num_tokens']:,.0f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(shown)
    for line in _verdict(args, tables, found):
        console.print(line, highlight=False, soft_wrap=True)


def _verdict(args: argparse.Namespace, tables: Mapping[str, Mapping[str, float]], found: Explanation) -> list[str]:
    name = "ratio_{}_outside_0.1"
    last = list(tables.values())[-1]
    full, left = last[name.format("full")], last[name.format("replayed")]
    in_float32 = next(iter(tables.values()))[name.format("replayed")]
    lines = [
        f"Truncation causes {max(full - left, 0):.2%} of ratios outside [0.9, 1.1]; {left:.2%} are left by replay in "
        f"{list(tables)[-1]}, {in_float32:.2%} in float32.",
        *(f"Note: {note}." for note in found.notes),
    ]
    if left <= args.threshold:
        return [*lines, f"Replay gives the engine's log-probabilities: {left:.2%} <= {args.threshold:.2%}."]
    if found.cause is None:
        tried = ", ".join(each.name for each in found.tried[1:])
        remedy = "weights of another version are what is left: name them with --also"
        return [
            *lines,
            f"Replay leaves {left:.2%} > {args.threshold:.2%}, and none of these explains it: {tried}; {remedy}.",
        ]
    cause, before = found.cause, found.tried[0].difference
    return [
        *lines,
        f"Replay leaves {left:.2%} > {args.threshold:.2%}. Likely cause: {cause.name}, which leaves "
        f"{cause.outside:.2%} (mean |difference| {cause.difference:.1e} nats in place of {before:.1e}): {cause.says}.",
    ]
