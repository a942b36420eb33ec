"""`keepmask train`: GRPO on the recorded supports, one command from a task to a trained model."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from keepmask.errors import ConfigError
from keepmask.flags import add_flags, given
from keepmask.train.run import METRICS, describe, train
from keepmask.train.tasks import TASKS
from keepmask.train.train_config import TrainConfig

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    listed = "; ".join(f"{task.name}: {task.summary}" for task in TASKS.values())
    parser.description = (
        f"Trains a model with GRPO on a task, scoring on the supports the rollouts were drawn from. Tasks: {listed}; "
        "reasoning-gym:DATASET where reasoning-gym is installed."
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the run's folder: metrics.jsonl, model/, ...")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or TOML of the options below; flags go first")
    parser.add_argument("--dry-run", action="store_true", help="print everything that was resolved, and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in the folder")
    parser.add_argument("--overwrite", action="store_true", help="start afresh where the folder holds a run")
    add_flags(parser, TrainConfig, title="training")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of names that TRL and PEFT still use in transformers
    config = TrainConfig.read(args.config, given(args, TrainConfig))
    if args.dry_run:
        print(json.dumps(describe(config), indent=1, default=str))  # noqa: T201
        return 0
    if args.output is None:
        raise ConfigError("--output DIR: must be given; it is where the metrics and the trained model go")
    last = train(config, args.output, resume=args.resume, overwrite=args.overwrite)
    reward = f"; held-out reward {last['heldout_reward']:.3f}" if last else ""
    print(f"{args.output / METRICS}{reward}", file=sys.stderr)  # noqa: T201
    return 0
