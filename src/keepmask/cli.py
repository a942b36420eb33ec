"""The `keepmask` command."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module

from keepmask import __version__
from keepmask.errors import KeepmaskError

__all__ = ["main"]

_COMMANDS = {
    "demo": ("keepmask.commands.demo", "roll out, replay and report on a packaged model"),
    "rollout": ("keepmask.commands.rollout", "roll out a file of prompts with sampling masks"),
    "report": ("keepmask.commands.report", "draw the page of a rollout file"),
    "verify": (
        "keepmask.commands.verify",
        "score any engine's rollouts on their masks, and say why what remains remains",
    ),
    "serve": ("keepmask.commands.serve", "serve a model to RL clients over HTTP"),
    "train": ("keepmask.commands.train", "train a model on a task with verifiable rewards, on the recorded supports"),
    "bench": ("keepmask.commands.bench", "measure how fast the engine is on this machine, and where its time goes"),
    "conform": ("keepmask.commands.conform", "find out which sampling rules an engine follows"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="keepmask", description="Rollouts with sampling masks, and their replay.")
    parser.add_argument("--version", action="version", version=f"keepmask {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    with _clear_errors():
        for name, (module, summary) in _COMMANDS.items():
            command = commands.add_parser(name, help=summary)
            if name == chosen:  # only its own module is imported: the others may need what is not installed
                import_module(module).add_arguments(command)
        args = parser.parse_args(arguments)
        return int(args.run(args))


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """End the process with one clear line instead of a traceback where the user can do something about it."""
    try:
        yield
    except KeepmaskError as error:
        sys.exit(f"keepmask: {error}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "keepmask":
            raise
        sys.exit(f"keepmask: this command needs {error.name}; install it with: pip install 'keepmask[demo]'")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"keepmask: {where}{error.strerror or error}")
    except KeyboardInterrupt:
        sys.stderr.write("keepmask: interrupted\n")
        sys.exit(128 + signal.SIGINT)
