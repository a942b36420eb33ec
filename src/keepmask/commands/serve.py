"""`keepmask serve`: an engine behind HTTP."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine
from keepmask.errors import ConfigError
from keepmask.flags import add_flags, given
from keepmask.server.app import create_app
from keepmask.server.lifecycle import build_server, check_address
from keepmask.server.service import Service
from keepmask.server.settings import ServerConfig
from keepmask.server.summary import summary

__all__ = ["KEY_VARIABLE", "add_arguments", "add_parser", "read_keys", "run"]

KEY_VARIABLE = "KEEPMASK_API_KEY"

_log = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to others."""
    parser = subparsers.add_parser("serve", help="serve a model to RL clients over HTTP")
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Serve a model: token ids or text in, tokens with the exact support of each out. Speaks vLLM's and OpenAI's "
        "routes, and SGLang's /generate. SIGTERM finishes what was begun, a second one stops."
    )
    parser.add_argument("model", metavar="MODEL", help=EngineConfig.model_fields["model"].description)
    parser.add_argument(
        "--api-key",
        metavar="SOURCE",
        help="where the API keys are: file:PATH, one a line, or env:NAME. Every request but GET /health must bring "
        f"one. (default: env:{KEY_VARIABLE} where that is set, else none)",
    )
    add_flags(parser, ServerConfig, title="server", exclude=("api_keys",))
    add_flags(parser, EngineConfig, title="engine", exclude=("model",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code, 1 where requests were not finished or the engine failed."""
    config = ServerConfig(**given(args, ServerConfig), api_keys=read_keys(args.api_key))
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = EngineConfig(**given(args, EngineConfig))
    if config.weights_dir is not None and not Path(config.weights_dir).is_dir():
        raise ConfigError(f"weights_dir={config.weights_dir!r}: is no folder; create it, or name another")
    check_address(config)
    service = Service(Engine(settings), config)
    server = build_server(create_app(service), service)
    _log.info("%s", summary(service))
    try:
        server.run()
        if server.force_exit:
            # At once: without waiting for the engine's step, and with nothing left to take down in order.
            logging.shutdown()
            os._exit(server.exit_code)
    finally:
        service.engine.close()
    return server.exit_code


def read_keys(source: str | None) -> tuple[str, ...]:
    """The API keys at `source`, a file or an environment variable; none where it is None and the default is not set.

    Keys themselves are refused: the command line of a process can be seen by others. Raises ConfigError.
    """
    if source is None:
        return _lines(os.environ.get(KEY_VARIABLE, ""))
    kind, _, place = source.partition(":")
    if kind == "env" and place:
        keys = _lines(os.environ.get(place, ""))
    elif kind == "file" and place:
        try:
            keys = _lines(Path(place).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key file:{place}: cannot be read: {error}") from error
    else:
        raise ConfigError(
            "--api-key: give file:PATH or env:NAME; a key itself is refused, since other users see the command lines "
            "of processes"
        )
    if not keys:
        raise ConfigError(f"--api-key {source}: holds no key")
    return keys


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())
