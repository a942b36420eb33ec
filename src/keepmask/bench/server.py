"""Tokens per second through the server against `LLM.generate` on the same engine, and many streams at a time.

    scripts/bench server            a table
    scripts/bench server --json     one JSON row a case
    scripts/bench server --quick    fewer and shorter requests: does it run, not how fast

The server and the offline loop take turns in one process, on one engine, in both orders; the client is a process of its
own that only reads bytes while the clock runs, and afterwards checks that every answer is whole and aligned. Under load
the row also tells what the process held before and after: resident memory, open files, tasks of the event loop, blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from keepmask.bench.machine import machine_facts
from keepmask.bench.peak_memory import resident
from keepmask.bench.timing import Row, arguments, quantiles, report

PARAMS = {"top_k": 50, "top_p": 0.95, "ignore_eos": True, "logprobs": 0, "detokenize": False}
PROMPT_LEN = 32


class Sizes(NamedTuple):
    """How much is measured."""

    rounds: int = 4
    concurrent: int = 64
    max_tokens: int = 64
    requests: int = 2000
    streams: int = 256
    short_tokens: int = 8


FULL, QUICK = Sizes(), Sizes(rounds=1, concurrent=8, max_tokens=8, requests=60, streams=30, short_tokens=4)


# The client


async def ask(port: int, body: dict[str, Any]) -> bytes:
    """The raw answer to one request on a connection of its own; what came of it where the connection was lost."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        return await whole_answer(port, body)
    return b""


async def whole_answer(port: int, body: dict[str, Any]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    content = json.dumps(body).encode()
    head = [
        "POST /inference/v1/generate HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
        "",
        "",
    ]
    writer.write("\r\n".join(head).encode() + content)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def ask_all(spec: dict[str, Any]) -> tuple[float, list[bytes]]:
    gate = asyncio.Semaphore(spec["concurrent"])

    async def one(body: dict[str, Any]) -> bytes:
        async with gate:
            return await ask(spec["port"], body)

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(one, spec["bodies"]))
    return time.perf_counter() - begin, answers


def body_of(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def examine(answer: bytes, *, masked: bool, max_tokens: int) -> tuple[int, str | None]:
    """Tokens of an answer, and what is wrong with it."""
    if not answer.startswith(b"HTTP/1.1 200 "):
        return 0, answer[:40].decode(errors="replace") or "no answer"
    text = body_of(answer).decode()
    if text.startswith("data: "):
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        if lines.pop() != "[DONE]":
            return 0, "cut off"
        chunks = [choice for line in lines for choice in json.loads(line).get("choices", ())]
    else:
        chunks = json.loads(text).get("choices", [])
    tokens = 0
    for chunk in chunks:
        lengths = {len(chunk["token_ids"]), len(chunk["logprobs"]["content"])}
        lengths |= {len(chunk["sampling_mask"])} if masked else set()
        if len(lengths) > 1 or (
            masked and any(t not in row for t, row in zip(chunk["token_ids"], chunk["sampling_mask"], strict=True))
        ):
            return 0, "misaligned"
        tokens += len(chunk["token_ids"])
    if tokens != max_tokens or chunks[-1]["finish_reason"] != "length":
        return tokens, f"{tokens} tokens"
    return tokens, None


def client() -> None:
    """Read what to do from standard input, a line a run; answer each with a line."""
    for line in sys.stdin:
        spec = json.loads(line)
        seconds, answers = asyncio.run(ask_all(spec))
        found = [examine(answer, masked=spec["masked"], max_tokens=spec["max_tokens"]) for answer in answers]
        problems = [problem for _, problem in found if problem]
        result = {
            "seconds": seconds,
            "tokens": sum(tokens for tokens, _ in found),
            "bytes": sum(map(len, answers)),
            "problems": problems[:5],
            "num_problems": len(problems),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


# The server


@contextmanager
def serving(llm: Any) -> Iterator[Served]:
    """A server on the engine of `llm`."""
    from keepmask.server.app import create_app
    from keepmask.server.lifecycle import build_server
    from keepmask.server.service import Service
    from keepmask.server.settings import ServerConfig

    service = Service(llm.engine, ServerConfig(port=0, log_level="error", max_waiting=4096))
    server = build_server(create_app(service), service)
    loop: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loop.append(asyncio.get_running_loop())
        await server.serve()

    def run() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(server.servers[0].sockets[0].getsockname()[1], loop[0], llm.engine)
    finally:
        server.should_exit = True
        thread.join()


class Served(NamedTuple):
    """A server in a thread of this process."""

    port: int
    loop: asyncio.AbstractEventLoop
    engine: Any

    def holds(self) -> dict[str, int]:
        """What the process has, once nothing is under way."""

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        end = time.monotonic() + 5
        while self.engine.num_unfinished and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # for the last connections to be closed
        stats = self.engine.stats()
        return {
            "resident_bytes": resident("VmRSS"),
            "files": len(os.listdir("/proc/self/fd")),
            "tasks": asyncio.run_coroutine_threadsafe(tasks(), self.loop).result(10),
            "blocks": stats.num_blocks - stats.num_free_blocks,
        }


class Bench:
    def __init__(
        self, llm: Any, port: int, process: subprocess.Popen[str], prompts: list[list[int]], sizes: Sizes
    ) -> None:
        self.llm, self.port, self.process, self.prompts, self.sizes = llm, port, process, prompts, sizes
        self.params = PARAMS | {"max_tokens": sizes.max_tokens}

    def offline(self, **params: Any) -> float:
        """Tokens per second of LLM.generate."""
        from keepmask import SamplingParams

        asked = [
            SamplingParams(**self.params | params | {"seed": seed, "return_sampling_mask": True})
            for seed in range(len(self.prompts))
        ]
        begin = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in self.prompts], asked, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds

    def online(
        self,
        *,
        stream: bool,
        masked: bool = True,
        prompts: list[list[int]] | None = None,
        concurrent: int | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        """What the client saw."""
        asked = self.params | params | {"return_sampling_mask": masked}
        bodies = [
            {"token_ids": prompt, "sampling_params": asked | {"seed": seed}, "stream": stream}
            for seed, prompt in enumerate(self.prompts if prompts is None else prompts)
        ]
        spec = {
            "port": self.port,
            "bodies": bodies,
            "concurrent": concurrent or self.sizes.concurrent,
            "masked": masked,
            "max_tokens": asked["max_tokens"],
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        return result


def compare(bench: Bench, dtype: str) -> Iterator[Row]:
    """The four ways in turn, there and back, round by round; ratios are of the same round."""
    sizes = bench.sizes
    shape = [sizes.concurrent, PROMPT_LEN, sizes.max_tokens]
    op = f"{sizes.concurrent} concurrent requests"
    ways: dict[str, dict[str, Any] | None] = {
        "LLM.generate": None,
        "server, streaming": {"stream": True},
        "server": {"stream": False},
        "server, no masks": {"stream": False, "masked": False},
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    problems = 0
    bench.offline(max_tokens=4)
    bench.online(stream=True, max_tokens=4)
    for number in range(sizes.rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            options = ways[name]
            if options is None:
                speeds[name].append(bench.offline())
                continue
            seen = bench.online(**options)
            problems += seen["num_problems"]
            speeds[name].append(seen["tokens"] / seen["seconds"])
    base = speeds["LLM.generate"]
    for name, values in speeds.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        row = {"op": op, "implementation": name, "dtype": dtype, "unit": "tokens/s", "shape": shape}
        yield row | quantiles(values) | {"over_generate": statistics.median(ratios), "problems": problems}
    masks = [a / b for a, b in zip(speeds["server"], speeds["server, no masks"], strict=True)]
    yield {
        "op": op,
        "implementation": "masks on / off",
        "dtype": dtype,
        "unit": "ratio",
        "shape": shape,
        **quantiles(masks),
        "problems": problems,
    }


def load(bench: Bench, served: Served, dtype: str) -> dict[str, Any]:
    """Many short streams: none may be lost or misaligned, and nothing of them may stay."""
    sizes = bench.sizes
    requests, concurrent, max_tokens = sizes.requests, sizes.streams, sizes.short_tokens
    prompts = [bench.prompts[number % len(bench.prompts)][: 8 + number % 17] for number in range(requests)]
    # Buffers and allocators grow with the first requests of a shape.
    bench.online(stream=True, prompts=prompts[: 2 * concurrent], concurrent=concurrent, max_tokens=max_tokens)
    before = served.holds()
    seen = bench.online(stream=True, prompts=prompts, concurrent=concurrent, max_tokens=max_tokens)
    after = served.holds()
    speed = seen["tokens"] / seen["seconds"]
    return {
        "op": f"{requests} streams, {concurrent} at a time",
        "implementation": "server, streaming",
        "dtype": dtype,
        "unit": "tokens/s",
        "shape": [requests, concurrent, max_tokens],
        **quantiles([speed]),
        "seconds": seen["seconds"],
        "bytes": seen["bytes"],
        "problems": seen["num_problems"],
        "first": seen["problems"],
        "held_before": before,
        "held_after": after,
    }


def line(row: Row) -> str:
    """A row for people."""
    ratio = f"{row['over_generate']:6.2f} x LLM.generate" if "over_generate" in row else ""
    text = "{op:32s} {implementation:20s} p20 {p20:9.2f}  p50 {p50:9.2f}  p80 {p80:9.2f} {unit:9s} ".format(**row)
    text += f"{ratio}  {row['problems']} lost or misaligned"
    for when in ("held_before", "held_after"):
        if when in row:
            held = ", ".join(f"{n:,} {name}" for name, n in row[when].items())
            text += f"\n    {when.replace('_', ' '):12s} {held}"
    return text


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", choices=("compare", "load"), help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--requests", type=int, help=f"short streams under load (default: {FULL.requests})")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client()
        return
    from keepmask.llm import LLM

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_num_seqs=256,
        max_model_len=256,
        kv_cache_memory_bytes=2**30,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )
    sizes = QUICK if args.quick else FULL
    sizes = sizes._replace(requests=args.requests or sizes.requests)
    prompts = np.random.default_rng(0).integers(100, 40_000, (sizes.concurrent, PROMPT_LEN))
    prompts %= llm.engine.runner.vocab_size
    facts, show = machine_facts() | {"model": args.model}, None if args.json else line
    dtype = str(llm.engine.runner.dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "keepmask.bench.server", "--client"]
    with (
        serving(llm) as served,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        bench = Bench(llm, served.port, process, prompts.tolist(), sizes)
        if args.only != "load":
            report(compare(bench, dtype), facts, show)
        if args.only != "compare":
            report([load(bench, served, dtype)], facts, show)
        process.stdin.close()  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
