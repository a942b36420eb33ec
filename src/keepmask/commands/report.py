"""`keepmask report`: draw the page of a rollout file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepmask.report.page import write_report
from keepmask.wire.rollout_file import read_rollouts

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Draws support sizes, importance ratios (where the rollouts are scored) and the text with each "
        "token's support, as one self-contained HTML page."
    )
    parser.add_argument("rollouts", type=Path, metavar="ROLLOUTS.parquet")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: beside the file, with .html)")
    parser.add_argument("--max-rollouts", type=int, default=200, help="completions whose text is shown (default: 200)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    rollouts, metadata = read_rollouts(args.rollouts)
    page = args.output or args.rollouts.with_suffix(".html")
    write_report(page, rollouts, metadata=metadata, max_rollouts=args.max_rollouts)
    print(page, file=sys.stderr)  # noqa: T201
    return 0
