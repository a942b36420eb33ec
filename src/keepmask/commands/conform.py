"""`keepmask conform`: which sampling rules an engine follows."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from keepmask.conform.findings import WIDTH, page
from keepmask.conform.outcome import Report, Target, run_probes
from keepmask.conform.probes import PROBES, PROFILES, Probe
from keepmask.errors import ConfigError
from keepmask.progress import Progress

__all__ = ["add_arguments", "run"]

_KEY_VARIABLE = "KEEPMASK_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = (
        "Asks an engine a table of small questions whose answers are known for the profiles of vLLM, SGLang and "
        "transformers, and prints which one it follows where. With a URL the engine is a server that returns sampling "
        "masks, made to have each question's distribution by logit_bias; without one it is the sampler of this package."
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="a server, such as http://127.0.0.1:8000")
    parser.add_argument("--only", nargs="+", metavar="PROBE", help="ask these probes, and none of the others")
    parser.add_argument("--expect", choices=PROFILES, help="exit with 1 where the engine does not follow this profile")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the page")
    parser.add_argument(
        "--semantics", choices=PROFILES, help="without a URL: the profile of the sampler asked (default: vllm)"
    )
    server = parser.add_argument_group("with a URL")
    server.add_argument(
        "--api",
        choices=("vllm", "sglang"),
        help="the route it speaks: /inference/v1/generate (vllm, the default) or /generate (sglang)",
    )
    server.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: ${_KEY_VARIABLE})")
    server.add_argument(
        "--prompt-token-ids", type=int, nargs="+", metavar="ID", help="what the contexts begin with (default: 4 ids)"
    )
    server.add_argument("--eos-token-id", type=int, metavar="ID", help="the model's end token, for the probe about it")
    server.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each answer (default: 60)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    probes = _chosen(args.only)
    report = _in_process(args, probes) if args.url is None else _over_http(args, probes)
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict(args.expect)) + "\n")
    else:
        console = Console()
        Console(width=max(WIDTH, console.width if console.is_terminal else 0)).print(page(report, args.expect))
    return 0 if args.expect is None or report.passed(args.expect) else 1


def _chosen(names: Sequence[str] | None) -> Sequence[Probe]:
    """The probes of these names, in their own order; all without names."""
    known = [probe.name for probe in PROBES]
    if unknown := sorted(set(names or ()) - set(known)):
        raise ConfigError(f"--only {' '.join(unknown)}: no such probe; there are {', '.join(known)}")
    return [probe for probe in PROBES if names is None or probe.name in names]


def _in_process(args: argparse.Namespace, probes: Sequence[Probe]) -> Report:
    for name in ("api", "api_key", "prompt_token_ids", "eos_token_id"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: belongs to a server; give its URL, or leave it out")
    from keepmask.conform.in_process import InProcessTarget

    return _ask(InProcessTarget(args.semantics or "vllm"), probes)


def _over_http(args: argparse.Namespace, probes: Sequence[Probe]) -> Report:
    if args.semantics is not None:
        raise ConfigError("--semantics: chooses the profile of the sampler in this process; leave it or the URL out")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout={args.timeout}: must be more than 0 seconds")
    from keepmask.conform.json_client import JsonClient
    from keepmask.conform.mask_routes import Route, SglangRoute, VllmRoute
    from keepmask.conform.over_http import PROMPT, HttpTarget

    prompt = args.prompt_token_ids or PROMPT
    key = args.api_key or os.environ.get(_KEY_VARIABLE) or None
    with JsonClient(args.url, api_key=key, timeout_s=args.timeout) as client:
        route: Route = (SglangRoute if args.api == "sglang" else VllmRoute)(client, prompt)
        name = f"{client.url}, {engine}" if (engine := route.engine()) else client.url
        return _ask(HttpTarget(name, route, prompt=prompt, eos_token_id=args.eos_token_id), probes)


def _ask(target: Target, probes: Sequence[Probe]) -> Report:
    """The report, with a bar on the terminal that says how far it is and what is being asked."""
    with Progress(len(probes), label="Asking") as progress:

        def on_progress(probe: Probe) -> None:
            progress.update(probes.index(probe), label=f"Asking {probe.name}")

        return run_probes(target, probes, on_progress=on_progress)
