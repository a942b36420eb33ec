"""Thousands of requests of every kind: nothing grows."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Serving, until

pytestmark = pytest.mark.slow

ROUNDS = 6
REQUESTS = 500  # a round


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def one(client: httpx.AsyncClient, chance: random.Random, number: int) -> None:
    """A request of some kind: whole, streamed, left, refused, aborted, over another route."""
    params = {"max_tokens": chance.randint(1, 24), "top_k": 8, "n": chance.randint(1, 3), "logprobs": 1}
    prompt = [chance.randrange(3, 512) for _ in range(chance.randint(1, 60))]
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": params, "request_id": f"soak-{number}"}
    kind = number % 8
    if kind == 0:
        body["sampling_params"] = {"top_p": 3}
    elif kind == 1:
        body = {"prompt": "x" * chance.randint(1, 50), "max_tokens": 5, "stream": True}
    if kind in (2, 3):
        async with client.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                if kind == 3:
                    return
        return
    if kind == 4:
        abort = {"request_ids": [f"soak-{number}"]}
        asked = asyncio.create_task(client.post("/inference/v1/generate", json=body))
        await asyncio.sleep(chance.random() / 50)
        await client.post("/inference/v1/abort_requests", json=abort)
        assert (await asked).status_code == 200
        return
    path = "/v1/completions" if kind == 1 else "/inference/v1/generate"
    response = await client.post(path, json=body)
    assert response.status_code == (400 if kind == 0 else 200), response.text


async def many(serving: Serving, chance: random.Random, start: int) -> None:
    gate = asyncio.Semaphore(32)
    # verify: certificates that nobody asks for take 4 MB of every client.
    async with httpx.AsyncClient(base_url=serving.url, timeout=60, verify=False) as client:

        async def gated(number: int) -> None:
            async with gate:
                await one(client, chance, number)

        await asyncio.gather(*(gated(start + number) for number in range(REQUESTS)))


def test_nothing_grows_over_thousands_of_requests(checkpoint: Path):
    chance = random.Random(0)
    # Few tokens a step, so that all shapes a step can have, for each of which kernels are prepared, come at once.
    with Serving(checkpoint, engine={"kv_cache_memory_bytes": 2**21, "max_num_batched_tokens": 16}) as serving:
        serving.client.get("/health")  # opens the connection that it keeps
        sizes, labels = [], []
        for number in range(ROUNDS):
            asyncio.run(many(serving, chance, number * REQUESTS))
            serving.settle()
            until(lambda: len(serving.server.server_state.connections) <= 1)  # that of serving.client
            tasks, files, blocks = serving.holdings()
            assert blocks == 0
            sizes.append((tasks, files, resident_bytes()))
            labels.append(len(serving.client.get("/metrics").text.splitlines()))
            assert not serving.service._names
            assert not serving.service.engine._tickets
            assert serving.service.admission.num_completions == serving.service.admission.num_bytes == 0
    assert len({tasks for tasks, _, _ in sizes}) == 1
    assert len({files for _, files, _ in sizes}) == 1
    assert len(set(labels)) == 1
    settled = [size for _, _, size in sizes[2:]]  # allocators and caches of the first rounds
    assert settled[-1] - settled[0] < 12 * 2**20


def test_rules_hold_without_assertions():
    """`python -O` drops every assert; pytest rewrites those of the tests, so they stay."""
    names = ["test_auth.py", "test_body.py", "test_connection.py", "test_control.py", "test_server_config.py"]
    names += ["test_admission.py", "test_openai.py", "test_tokens.py"]
    files = [str(Path(__file__).parent / name) for name in names]
    command = [
        sys.executable,
        "-O",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestConfigWarning",
    ]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
