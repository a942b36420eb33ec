"""`scripts/peers compare|masks|conform|clients`: the real vLLM and SGLang, asked live; other projects' clients."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
from explained import Explained, explanations
from forced_supports import PROFILE, forced, seen_on
from peer_answers import Answer, Difference, Recording, compare, send, store
from peer_requests import Asked, sglang_requests, vllm_requests
from peer_servers import keepmask_server, peer_server, save_tiny
from serving import Serving

from keepmask.cli import main as keepmask
from keepmask.models import bundled

RECORDED = Path(__file__).parent / "recorded"
CLIENTS = Path(__file__).parent / "clients"
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
TABLES = {"vllm": vllm_requests, "sglang": sglang_requests}
SETTINGS = {"vllm": ("plain", "masks"), "sglang": ("plain",)}
EVERY = 9
"""SmolLM2 is slow on a peer: it is sent one request of so many."""
_ASKED = 0.8  # share of the forced distributions that must have been reached; ties are not always


def main() -> int:
    """Run one of them; exits with 1 where something differs without a reason."""
    parser = argparse.ArgumentParser(prog="scripts/peers")
    parser.add_argument("what", choices=("compare", "masks", "conform", "clients"))
    parser.add_argument("peer", choices=tuple(TABLES), nargs="?")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--record", action="store_true", help="compare: keep the peer's answers for the tests")
    parser.add_argument("--number", type=int, default=60, help="masks: how many distributions")
    args = parser.parse_args()
    if args.what == "clients":
        return run_clients()
    if args.peer is None:
        parser.error("name a peer: vllm or sglang")
    if args.record and args.model != "tiny":
        parser.error("--record: the tests replay answers of the tiny model; leave --model out")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the peer is stopped as well
    with tempfile.TemporaryDirectory() as folder:
        model = bundled.path("smollm2-135m") if args.model == "smollm2" else save_tiny(Path(folder) / "tiny")
        run = {"compare": run_compare, "masks": run_masks, "conform": run_conform}[args.what]
        return run(args, str(model))


def run_compare(args: argparse.Namespace, model: str) -> int:
    """Send the table to both, and print what differs."""
    asked = TABLES[args.peer]()
    if args.model == "smollm2":
        asked = asked[::EVERY]
    theirs: list[tuple[Asked, Answer]] = []
    found: list[tuple[Asked, Difference]] = []
    for setting in SETTINGS[args.peer]:
        with peer_server(args.peer, setting, model) as url, httpx.Client(base_url=url, timeout=300) as client:
            answers = [(one, _alive(client, one)) for one in asked if one.setting == setting]
        theirs += answers
        with keepmask_server(args.peer, setting, model) as ours:
            for one, answer in answers:
                found += [(one, difference) for difference in compare(answer, send(ours.client, one))]
    if args.record:
        name = f"{args.peer}-{VERSIONS[args.peer]}"
        store(RECORDED / f"{name}.jsonl.gz", Recording(name.replace("-", " "), theirs))
    return _print_differences(args.peer, len(theirs), found)


def _alive(client: httpx.Client, asked: Asked) -> Answer:
    answer = send(client, asked)
    if not answer.status:
        raise SystemExit(f"{asked.name}: ended the peer; take it out of the table, and name it in docs/server.md")
    return answer


def _print_differences(peer: str, num_requests: int, found: Sequence[tuple[Asked, Difference]]) -> int:
    """One line for each reason, and one for each place where answers differ without one."""
    reasons: Counter[Explained] = Counter()
    unexplained: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], tuple[Asked, Difference]] = {}
    for asked, difference in found:
        if (reason := explanations(peer, asked, difference)) is not None:
            reasons[reason] += 1
        else:
            key = (asked.path, difference.where)
            unexplained[key] += 1
            examples.setdefault(key, (asked, difference))
    _print(f"{num_requests} requests, {len(found)} differences in {len({asked.name for asked, _ in found})} of them")
    for reason, count in reasons.most_common():
        _print(f"  {count:5d}  {reason.reason}")
    _print(f"without a reason: {sum(unexplained.values())}")
    for (path, where), count in unexplained.most_common():
        asked, difference = examples[path, where]
        _print(f"  {count:5d}  {path} {where}: {_brief(difference.peer)} / {_brief(difference.ours)} ({asked.name})")
    return 1 if unexplained else 0


def run_masks(args: argparse.Namespace, model: str) -> int:
    """Force the same distributions on both, and print those whose supports are not as the peer's profile says."""
    setting, profile = SETTINGS[args.peer][-1], PROFILE[args.peer]
    probes = list(forced(args.peer, args.number))
    with peer_server(args.peer, setting, model) as url:
        theirs = seen_on(args.peer, url, probes)
    with keepmask_server(args.peer, setting, model) as server:
        ours = seen_on(args.peer, server.url, probes)
    num_asked, differing = 0, 0
    for probe, seen, our in zip(probes, theirs, ours, strict=True):
        if not seen.status == our.status == "tested":
            _print(f"  not asked: {probe.params}: {seen.note or our.note}")
            continue
        num_asked += 1
        if not (probe.allows(profile, seen.support) and probe.allows(profile, our.support)):
            differing += 1
            answers = f"expected {probe.vllm}, {args.peer} {seen.support}, keepmask {our.support}"
            _print(f"  {' '.join(f'{p:.3f}' for p in probe.wanted)} {dict(probe.params)}: {answers}")
    _print(f"{num_asked} of {len(probes)} distributions asked, {differing} with other supports")
    return 1 if differing or num_asked < _ASKED * len(probes) else 0


def run_conform(args: argparse.Namespace, model: str) -> int:
    """The page of `keepmask conform`."""
    eos = {"tiny": "2", "smollm2": "2"}[args.model]
    expect = PROFILE[args.peer]
    with peer_server(args.peer, SETTINGS[args.peer][-1], model) as url:
        return keepmask(
            ["conform", url, "--api", args.peer, "--expect", expect, "--eos-token-id", eos, "--timeout", "300"]
        )


def run_clients() -> int:
    """Each client in its environment, on the packaged SmolLM2."""
    engine = {"max_model_len": 512, "kv_cache_memory_bytes": 128 * 2**20}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    failed = 0
    with Serving("smollm2-135m", engine=engine, served_model_name="served") as serving:
        for script in sorted(CLIENTS.glob("*_client.py")):
            name = script.stem.removesuffix("_client")
            python = Path(os.environ["KEEPMASK_PEERS"]) / f"client-{name}" / "bin" / "python"
            command = [python, script, serving.url, bundled.path("smollm2-135m")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
            failed += done.returncode != 0
            _print(f"{name}: {'held' if done.returncode == 0 else done.stderr[-2000:]}")
    return 1 if failed else 0


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 90 else f"{text[:90]}…"


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
