"""`Serving`: a real server on a free port, in this process, with everything behind it within reach."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine
from keepmask.server.app import create_app
from keepmask.server.config import ServerConfig
from keepmask.server.lifecycle import build_server
from keepmask.server.service import Service

ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_memory_bytes": 8 * 2**20,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "return_sampling_mask": True,
    "logprobs_mode": "processed_logprobs",
}


class Serving:
    """Serves `folder` from the start of the block to its end."""

    def __init__(
        self,
        folder: Path | str,
        *,
        engine: dict[str, Any] | None = None,
        processors: Sequence[Any] = (),
        **server: Any,
    ) -> None:
        config = EngineConfig(**{**ENGINE, "model": str(folder), **(engine or {})})
        self.engine = Engine(config, processors=processors)
        self.service = Service(self.engine, ServerConfig(port=0, log_level="error", **server))
        self.server = build_server(create_app(self.service), self.service)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="test-server")

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        keys = self.service.config.api_keys
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60)
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(main())

    # Shorthands

    def generate(self, token_ids: list[int], *, params: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
        """POST /inference/v1/generate."""
        return self.client.post(
            "/inference/v1/generate", json={"token_ids": token_ids, "sampling_params": params or {}, **body}
        )

    def stream(
        self, token_ids: list[int], *, params: dict[str, Any] | None = None, **body: Any
    ) -> list[dict[str, Any]]:
        """The events of a stream, parsed, without the final [DONE], whose presence is asserted."""
        body = {"token_ids": token_ids, "sampling_params": params or {}, "stream": True, **body}
        with self.client.stream("POST", "/inference/v1/generate", json=body) as response:
            response.read()
            return events(response.text)

    def settle(self, *, timeout_s: float = 20) -> None:
        """Wait until nothing is under way."""
        until(lambda: not self.service.tickets() and not self.engine.num_unfinished, timeout_s=timeout_s)


def events(text: str) -> list[dict[str, Any]]:
    """Server-sent events as objects."""
    import json

    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def until(condition: Any, *, timeout_s: float = 20) -> None:
    """Wait for the condition to hold."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come to hold in time"
        time.sleep(0.005)
