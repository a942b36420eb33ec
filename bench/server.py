"""Tokens per second through the server against `LLM.generate` on the same engine, and many streams at a time.

    python bench/server.py            a table
    python bench/server.py --json     one JSON row a case

The server and the offline loop take turns in one process, on one engine; the client is a process of its own that only
reads bytes while the clock runs, and afterwards checks that every answer is whole and aligned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ROUNDS = 3
CONCURRENT = 64
PARAMS = {"max_tokens": 64, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "logprobs": 0}
PROMPT_LEN = 32


# The client


async def ask(port: int, body: dict[str, Any]) -> bytes:
    """The raw answer to one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    content = json.dumps(body).encode()
    head = [
        "POST /inference/v1/generate HTTP/1.1",
        "Host: bench",
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
        print(json.dumps(result), flush=True)


# The server


@contextmanager
def serving(llm: Any) -> Iterator[int]:
    """The port of a server on the engine of `llm`."""
    from keepmask.server.app import create_app
    from keepmask.server.config import ServerConfig
    from keepmask.server.lifecycle import build_server
    from keepmask.server.service import Service

    service = Service(llm.engine, ServerConfig(port=0, log_level="error", max_waiting=4096))
    server = build_server(create_app(service), service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


class Bench:
    def __init__(self, llm: Any, port: int, process: subprocess.Popen[str], prompts: list[list[int]]) -> None:
        self.llm, self.port, self.process, self.prompts = llm, port, process, prompts

    def offline(self, **params: Any) -> float:
        """Tokens per second of LLM.generate."""
        from keepmask import SamplingParams

        asked = [
            SamplingParams(**PARAMS | params | {"seed": seed, "return_sampling_mask": True})
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
        concurrent: int = CONCURRENT,
        **params: Any,
    ) -> dict[str, Any]:
        """What the client saw."""
        asked = PARAMS | params | {"return_sampling_mask": masked}
        bodies = [
            {"token_ids": prompt, "sampling_params": asked | {"seed": seed}, "stream": stream}
            for seed, prompt in enumerate(self.prompts if prompts is None else prompts)
        ]
        spec = {
            "port": self.port,
            "bodies": bodies,
            "concurrent": concurrent,
            "masked": masked,
            "max_tokens": asked["max_tokens"],
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        return result


def quantiles(values: list[float]) -> dict[str, float]:
    import numpy as np

    return dict(zip(("p20", "p50", "p80"), np.quantile(values, [0.2, 0.5, 0.8]).tolist(), strict=True))


def compare(bench: Bench, dtype: str) -> Iterator[dict[str, Any]]:
    """The four ways in turn, round by round; ratios are of the same round."""
    speeds: dict[str, list[float]] = {"LLM.generate": [], "server": [], "server, streaming": [], "server, no masks": []}
    problems = 0
    bench.offline(max_tokens=4)
    bench.online(stream=True, max_tokens=4)
    for _ in range(ROUNDS):
        speeds["LLM.generate"].append(bench.offline())
        for name, options in (
            ("server", {"stream": False}),
            ("server, streaming", {"stream": True}),
            ("server, no masks", {"stream": False, "masked": False}),
        ):
            seen = bench.online(**options)
            problems += seen["num_problems"]
            speeds[name].append(seen["tokens"] / seen["seconds"])
    base = speeds["LLM.generate"]
    for name, values in speeds.items():
        ratios = sorted(value / other for value, other in zip(values, base, strict=True))
        row = {"op": "64 concurrent requests", "implementation": name, "dtype": dtype, "unit": "tokens/s"}
        row |= {"shape": [CONCURRENT, PROMPT_LEN, PARAMS["max_tokens"]], **quantiles(values)}
        yield row | {"over_generate": ratios[len(ratios) // 2], "problems": problems}
    masks = sorted(a / b for a, b in zip(speeds["server"], speeds["server, no masks"], strict=True))
    yield {
        "op": "64 concurrent requests",
        "implementation": "masks on / off",
        "dtype": dtype,
        "unit": "ratio",
        "shape": [CONCURRENT, PROMPT_LEN, PARAMS["max_tokens"]],
        **quantiles(masks),
        "problems": problems,
    }


def load(bench: Bench, dtype: str, *, requests: int, concurrent: int, max_tokens: int) -> dict[str, Any]:
    """Many short streams: none may be lost or misaligned."""
    prompts = [bench.prompts[number % len(bench.prompts)][: 8 + number % 17] for number in range(requests)]
    seen = bench.online(stream=True, prompts=prompts, concurrent=concurrent, max_tokens=max_tokens)
    speed = seen["tokens"] / seen["seconds"]
    return {
        "op": f"{requests} streams, {concurrent} at a time",
        "implementation": "server, streaming",
        "dtype": dtype,
        "unit": "tokens/s",
        "shape": [requests, concurrent, max_tokens],
        "p20": speed,
        "p50": speed,
        "p80": speed,
        "seconds": seen["seconds"],
        "bytes": seen["bytes"],
        "problems": seen["num_problems"],
        "first": seen["problems"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON row a case")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", choices=("compare", "load"), help="one of the two parts")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client()
        return
    import numpy as np
    import torch

    import keepmask

    llm = keepmask.LLM(
        args.model,
        dtype=args.dtype,
        max_num_seqs=256,
        max_model_len=256,
        kv_cache_memory_bytes=2**30,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )
    prompts = np.random.default_rng(0).integers(100, 40_000, (CONCURRENT, PROMPT_LEN))
    prompts %= llm.engine.runner.vocab_size
    machine = {"device": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"keepmask": keepmask.__version__, "torch": torch.__version__, "model": args.model}
    dtype = str(llm.engine.runner.dtype).removeprefix("torch.")
    command = [sys.executable, __file__, "--client"]
    with (
        serving(llm) as port,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        bench = Bench(llm, port, process, prompts.tolist())
        if args.only != "load":
            for row in compare(bench, dtype):
                report(row | machine | versions, as_json=args.json)
        if args.only != "compare":
            row = load(bench, dtype, requests=args.requests, concurrent=256, max_tokens=8)
            report(row | machine | versions, as_json=args.json)
        process.stdin.close()  # type: ignore[union-attr]


def report(row: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(rounded), flush=True)
        return
    ratio = f"{row['over_generate']:6.2f} x LLM.generate" if "over_generate" in row else ""
    print(
        "{op:32s} {implementation:20s} p20 {p20:9.2f}  p50 {p50:9.2f}  p80 {p80:9.2f} {unit:9s} ".format(**row)
        + f"{ratio}  {row['problems']} lost or misaligned",
        flush=True,
    )


if __name__ == "__main__":
    main()
