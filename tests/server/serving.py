"""`Serving`: a real server on a free port, in this process, with everything behind it within reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from keepmask.config import EngineConfig
from keepmask.engine.core import Engine
from keepmask.server.app import create_app
from keepmask.server.lifecycle import build_server
from keepmask.server.service import Service
from keepmask.server.settings import ServerConfig

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
    """Serves `folder` from the start of the block to its end.

    send_buffer: bytes that the kernel holds of one answer while its client reads nothing. Its default grows with the
    connection to as much as the machine allows.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        engine: dict[str, Any] | None = None,
        processors: Sequence[Any] = (),
        send_buffer: int | None = None,
        **server: Any,
    ) -> None:
        config = EngineConfig(**{**ENGINE, "model": str(folder), **(engine or {})})
        self.engine = Engine(config, processors=processors)
        self.service = Service(self.engine, ServerConfig(port=0, log_level="error", **server))
        self.server = build_server(create_app(self.service), self.service)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._send_buffer = send_buffer
        self._thread = threading.Thread(target=self._run, name="test-server")

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        (listening,) = self.server.servers[0].sockets
        if self._send_buffer is not None:  # connections inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self.port = listening.getsockname()[1]
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

    def running(self) -> bool:
        """Whether the server has not stopped."""
        return self._thread.is_alive()

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

    @contextlib.contextmanager
    def slowed(self, step_s: float = 0.02) -> Iterator[None]:
        """Every step takes this much longer, so that a test can meet requests in the state it needs."""
        forward = self.engine.runner.forward

        def slow(*args: Any) -> Any:
            time.sleep(step_s)
            return forward(*args)

        self.engine.runner.forward = slow  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.engine.runner.forward = forward  # type: ignore[method-assign]

    def in_background(self, function: Callable[[], Any]) -> Background:
        """Run a request in a thread."""
        return Background(function)

    def open_stream(
        self, body: dict[str, Any], *, path: str = "/inference/v1/generate", receive_buffer: int | None = None
    ) -> RawStream:
        """Send a streaming request over a socket of its own, which the test reads, or not, and closes as it likes."""
        return RawStream(self, path, body, receive_buffer)

    def holdings(self) -> tuple[int, int, int]:
        """Tasks of the event loop, open files of the process, blocks in use."""
        assert self.loop is not None

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        stats = self.engine.stats()
        num_tasks = asyncio.run_coroutine_threadsafe(tasks(), self.loop).result(10)
        return num_tasks, len(os.listdir("/proc/self/fd")), stats.num_blocks - stats.num_free_blocks

    def settle(self, *, timeout_s: float = 20) -> None:
        """Wait until nothing is under way."""
        until(lambda: not self.service.tickets() and not self.engine.num_unfinished, timeout_s=timeout_s)


class Background:
    """A call in a thread, and its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = function()
            except BaseException as error:  # raised where the result is asked for
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, timeout_s: float = 60) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "no answer in time"
        if self._error is not None:
            raise self._error
        return self._result


class RawStream:
    """A streaming request on a socket."""

    def __init__(self, serving: Serving, path: str, body: dict[str, Any], receive_buffer: int | None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", serving.port))
        content = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"Authorization: Bearer {key}" for key in serving.service.config.api_keys[:1]),
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(head).encode() + content)
        self.received = b""

    def read_events(self, count: int) -> None:
        """Read until this many events, or the end, were seen."""
        while self.received.count(b"data: ") < count:
            piece = self.socket.recv(2**16)
            if not piece:
                return
            self.received += piece

    def read_all(self) -> str:
        """Read to the end of the chunked body; returns the body."""
        while not self.received.endswith(b"0\r\n\r\n"):
            piece = self.socket.recv(2**20)
            assert piece, "cut off"
            self.received += piece
        body, rest = b"", self.received.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        return body.decode()

    def close(self) -> None:
        self.socket.close()


def events(text: str) -> list[dict[str, Any]]:
    """Server-sent events as objects."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def until(condition: Callable[[], object], *, timeout_s: float = 20) -> None:
    """Wait for the condition to hold."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come to hold in time"
        time.sleep(0.005)
