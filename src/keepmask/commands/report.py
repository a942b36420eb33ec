"""`keepmask report`: draw the page of a rollout file, or of a training run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepmask.errors import ConfigError
from keepmask.report.page import write_report
from keepmask.report.run_page import write_run_report
from keepmask.wire.rollout_file import read_rollouts

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Draws one self-contained HTML page: of a rollout file, its support sizes, importance ratios (where the "
        "rollouts are scored) and the text with each token's support; of a training run's folder, its curves."
    )
    parser.add_argument("source", type=Path, metavar="ROLLOUTS.parquet|RUN")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: beside the file, or in the run's folder)")
    parser.add_argument("--max-rollouts", type=int, default=200, help="completions whose text is shown (default: 200)")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="another run, whose curves are drawn dashed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.source.is_dir():
        page = write_run_report(args.output or args.source / "report.html", args.source, compare=args.compare)
    elif args.compare is not None:
        raise ConfigError(
            f"--compare {args.compare}: needs a run's folder to compare with, and {args.source} is a file"
        )
    else:
        rollouts, metadata = read_rollouts(args.source)
        page = args.output or args.source.with_suffix(".html")
        write_report(page, rollouts, metadata=metadata, max_rollouts=args.max_rollouts)
    print(page, file=sys.stderr)  # noqa: T201
    return 0
