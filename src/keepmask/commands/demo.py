"""`keepmask demo`: the whole job on a packaged model — roll out with masks, replay, and see the mismatch vanish."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from keepmask.commands.prompt_row import PromptRow
from keepmask.commands.rollout import roll_out
from keepmask.commands.score_rollouts import score_rollouts
from keepmask.config import EngineConfig
from keepmask.models import bundled
from keepmask.params import SamplingParams
from keepmask.progress import Progress
from keepmask.replay.mismatch import measure_mismatch
from keepmask.report.page import write_report
from keepmask.wire.rollout_file import read_rollouts, write_rollouts

__all__ = ["add_arguments", "arithmetic_prompts", "run"]

_MODEL = "smollm2-135m"
_PARAMS = SamplingParams(
    n=4, temperature=1.0, top_k=50, top_p=0.95, max_tokens=64, logprobs=0, return_sampling_mask=True,
    return_sampling_mask_logprobs=True,
)  # fmt: skip

_ROWS = (
    ("importance ratio, mean", "ratio_{}_mean", "{:.6f}"),
    ("importance ratio, median", "ratio_{}_median", "{:.6f}"),
    ("share outside [0.9, 1.1]", "ratio_{}_outside_0.1", "{:.2%}"),
    ("log-ratio, mean (nats)", "log_ratio_{}_mean", "{:+.6f}"),
)
_SIZES = (
    ("kept mass, mean", "kept_mass_mean", "{:.4f}"),
    ("support size, mean", "support_size_mean", "{:.2f}"),
    ("support size, median", "support_size_median", "{:.0f}"),
    ("support size, 99th percentile", "support_size_p99", "{:.0f}"),
    ("share of singletons", "support_singleton_share", "{:.2%}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Rolls out arithmetic prompts on the packaged SmolLM2-135M-Instruct with sampling masks, scores "
        "every token on a plain transformers forward of the same weights, with and without replay, prints the "
        "importance ratios, and writes rollouts.parquet and report.html."
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("keepmask-demo"), help="folder for the two files")
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="arithmetic prompts (default: 32)")
    parser.add_argument("--max-tokens", type=int, default=_PARAMS.max_tokens, help="tokens a completion (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the table as one JSON line last")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    disable_progress_bar()
    console = Console(stderr=True)
    args.output.mkdir(parents=True, exist_ok=True)
    file, page = args.output / "rollouts.parquet", args.output / "report.html"
    with console.status(f"Preparing {_MODEL} (the first run converts its weights, about 15 s)"):
        folder = bundled.path(_MODEL)
    # Both sides in float32, so that what remains of the mismatch is rounding.
    config = EngineConfig(
        model=_MODEL, dtype="float32", device="cpu", seed=args.seed, max_model_len=1024, max_num_seqs=64,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    prompts = arithmetic_prompts(args.prompts)
    started_s = time.perf_counter()
    roll_out(prompts, _PARAMS.replace(max_tokens=args.max_tokens), config, file, overwrite=True)
    rollout_s = time.perf_counter() - started_s

    rollouts, metadata = read_rollouts(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    done = 0
    with Progress(len(rollouts), label="Scoring    ") as progress:

        def on_progress(num_rollouts: int) -> None:
            nonlocal done
            done += num_rollouts
            progress.update(done)

        rollouts = score_rollouts(model, rollouts, on_progress=on_progress)
    token_text = metadata.pop("token_text")
    metadata.pop("keepmask")
    write_rollouts(file, rollouts, metadata, token_text=lambda ids: [token_text[i] for i in ids], overwrite=True)
    table = measure_mismatch(rollouts).table()
    write_report(page, rollouts, metadata=metadata | {"token_text": token_text}, table=table)

    table["tokens_per_s"] = table["num_tokens"] / rollout_s
    _print_table(table)
    console.print(f"Rollouts: {file}\nReport:   {page}", highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(json.dumps(table) + "\n")
    return 0


def arithmetic_prompts(num_prompts: int) -> list[PromptRow]:
    """Small word-for-word arithmetic questions as chats, the same ones on every machine."""
    words = {"+": "plus", "-": "minus", "*": "times"}
    prompts = []
    for i in range(num_prompts):
        a, b, sign = 2 + 7 * i % 41, 3 + 5 * i % 17, "+-*"[i % 3]
        question = f"What is {a} {words[sign]} {b}? Think step by step, then give the answer."
        chat = [{"role": "user", "content": question}]
        prompts.append(PromptRow(number=i + 1, request_id=f"{i:04d}", kind="messages", value=chat))
    return prompts


def _print_table(table: Mapping[str, float]) -> None:
    """The numbers, on standard output."""
    shown = Table(title="The same weights on both sides: the ratio should be 1")
    for column in ("", "full vocabulary", "replayed on the mask"):
        shown.add_column(column, justify="left" if not column else "right")
    for label, name, form in _ROWS:
        shown.add_row(label, *(form.format(table[name.format(side)]) for side in ("full", "replayed")))
    shown.add_row("largest |log-prob difference|", "", f"{table['logprob_diff_max']:.2e}", end_section=True)
    for label, name, form in _SIZES:
        shown.add_row(label, "", form.format(table[name]))
    shown.add_row("tokens", "", f"{table['num_tokens']:,.0f}")
    shown.add_row("tokens/s", "", f"{table['tokens_per_s']:,.0f}")
    Console().print(shown)
