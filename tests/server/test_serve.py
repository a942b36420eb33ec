"""`keepmask serve` as a process: its arguments, its summary, and how it stops."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import until

from keepmask.commands import serve
from keepmask.config import EngineConfig
from keepmask.errors import ConfigError
from keepmask.flags import given
from keepmask.server.settings import ServerConfig

PROMPT = [5, 6, 7]
LONG = {"max_tokens": 500, "top_k": 4, "ignore_eos": True, "seed": 1}
# Steps of a random model take milliseconds: many of them, so that the test meets them half-way.
SLOW = {**LONG, "n": 8}


class Process:
    """A server in a process of its own."""

    def __init__(self, checkpoint: Path, log: Path, *arguments: str, **environment: str) -> None:
        launch = (
            "import argparse, sys; from keepmask.commands import serve; parser = argparse.ArgumentParser(); "
            "serve.add_arguments(parser); args = parser.parse_args(); sys.exit(args.run(args))"
        )
        self.log = log
        options = ["--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", str(16 * 2**20)]
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", launch, str(checkpoint), *options, *arguments],
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, **environment},
                text=True,
            )

    def start(self) -> httpx.Client:
        until(lambda: "Uvicorn running on" in self.text() or self.process.poll() is not None, timeout_s=60)
        found = re.search(r"Uvicorn running on (http://\S+)", self.text())
        assert found, self.text()
        return httpx.Client(base_url=found[1], timeout=60)

    def text(self) -> str:
        return self.log.read_text()

    def stop(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def served(
    checkpoint: Path, folder: Path, *arguments: str, **environment: str
) -> Iterator[tuple[Process, httpx.Client]]:
    process = Process(checkpoint, folder / "log", *arguments, **environment)
    try:
        with process.start() as client:
            yield process, client
    finally:
        process.process.kill()
        process.process.wait()
        assert process.process.stdout is not None
        process.process.stdout.close()


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def test_every_field_of_both_configurations_is_a_flag():
    args = parse("m")
    assert args.run is serve.run
    for model, hidden in ((EngineConfig, {"model"}), (ServerConfig, {"api_keys"})):
        for name, field in model.model_fields.items():
            if name in hidden:
                continue
            flag = f"--{name.replace('_', '-')}"
            if field.annotation is bool:
                assert given(parse("m", flag), model)[name] is True
                assert given(parse("m", f"--no-{flag[2:]}"), model)[name] is False
            assert name not in given(args, model)


def test_the_documented_command_line():
    args = parse(
        "smollm2-135m",
        "--return-sampling-mask",
        *("--logprobs-mode", "processed_logprobs"),
        *("--max-model-len", "1024"),
        *("--host", "0.0.0.0"),
        *("--port", "9000"),
        *("--max-waiting", "7"),
        *("--sampling-mask-contract", "vllm"),
        *("--mask-format", "base64"),
        *("--log-level", "debug"),
        *("--api-key", "env:MY_KEY"),
    )
    engine = EngineConfig(**given(args, EngineConfig))
    assert engine.model == "smollm2-135m"
    assert engine.return_sampling_mask
    assert engine.logprobs_mode == "processed_logprobs"
    assert engine.max_model_len == 1024
    assert engine.sampling_mask_contract == "vllm"
    server = ServerConfig(**given(args, ServerConfig), api_keys=("k",))
    assert (server.host, server.port, server.max_waiting) == ("0.0.0.0", 9000, 7)
    assert (server.mask_format, server.log_level) == ("base64", "debug")


def test_help_is_the_docstrings(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for model in (EngineConfig, ServerConfig):
        for name, field in model.model_fields.items():
            if name != "api_keys":
                assert " ".join((field.description or "").split()) in text


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert serve.read_keys(None) == ()
    monkeypatch.setenv(serve.KEY_VARIABLE, " one \n")
    assert serve.read_keys(None) == ("one",)
    monkeypatch.setenv("OTHER", "two")
    assert serve.read_keys("env:OTHER") == ("two",)
    keys = tmp_path / "keys"
    keys.write_text("a\n\n b \n")
    assert serve.read_keys(f"file:{keys}") == ("a", "b")


@pytest.mark.parametrize("source", ["token-abc", "env:", "file:", "env:NOT_SET_ANYWHERE", "file:/not/there", ""])
def test_key_on_the_command_line_is_refused_and_not_repeated(source: str):
    with pytest.raises(ConfigError) as raised:
        serve.read_keys(source)
    assert "token-abc" not in str(raised.value)


def test_server_says_what_it_serves_and_drains_on_sigterm(checkpoint: Path, tmp_path: Path):
    flags = ("--return-sampling-mask", "--logprobs-mode", "processed_logprobs")
    with served(checkpoint, tmp_path, *flags) as (process, client):
        text = process.text()
        for part in ("serves", "0.1 M parameters, float32 on cpu", "512 tokens", "16 MiB", "contract exact"):
            assert part in text
        body = {"token_ids": PROMPT, "sampling_params": SLOW, "stream": True}
        received = b""
        with client.stream("POST", "/inference/v1/generate", json=body) as response:
            pieces = response.iter_bytes()
            received += next(pieces)
            process.process.send_signal(signal.SIGTERM)
            until(lambda: "stopping; 1 requests under way" in process.text(), timeout_s=60)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{client.base_url}/health")
            for piece in pieces:
                received += piece
        assert process.stop() == 0
    lines = [json.loads(line[6:]) for line in received.decode().split("\n\n") if line and "[DONE]" not in line]
    tokens: dict[int, int] = {}
    for line in lines:
        for choice in line["choices"]:
            assert len(choice["token_ids"]) == len(choice["sampling_mask"])
            tokens[choice["index"]] = tokens.get(choice["index"], 0) + len(choice["token_ids"])
    assert tokens == dict.fromkeys(range(8), 500)
    assert "data: [DONE]" in received.decode()


def test_second_sigterm_stops_at_once(checkpoint: Path, tmp_path: Path):
    with served(checkpoint, tmp_path) as (process, client):
        body = {"token_ids": PROMPT, "sampling_params": SLOW, "stream": True}
        started = time.monotonic()
        with client.stream("POST", "/inference/v1/generate", json=body) as response:
            pieces = response.iter_bytes()
            next(pieces)
            process.process.send_signal(signal.SIGTERM)
            until(lambda: "stopping; 1 requests" in process.text(), timeout_s=60)
            process.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        assert process.stop() == 1
        assert time.monotonic() - started < 60
        assert "were not finished" in process.text()
        assert "Traceback" not in process.text()
        assert "leaked" not in process.text()


def test_limit_of_open_files_is_raised_as_far_as_it_goes():
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024));"
        "from keepmask.server.connection import connection_limit; print(connection_limit());"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    most, soft = map(int, done.stdout.split())
    assert soft == 1024
    assert 800 < most < 1024


def test_killed_server_gives_clients_an_error_not_a_hang(checkpoint: Path, tmp_path: Path):
    with served(checkpoint, tmp_path, KEEPMASK_API_KEY="secret-key") as (process, client):
        assert client.get("/version").status_code == 401
        client.headers["authorization"] = "Bearer secret-key"
        assert client.get("/version").status_code == 200
        assert "1 API key" in process.text()
        assert "secret-key" not in process.text()
        body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": SLOW, "stream": True}
        with client.stream("POST", "/inference/v1/generate", json=body) as response:
            pieces = response.iter_bytes()
            next(pieces)
            process.process.kill()
            with pytest.raises(httpx.TransportError):
                list(pieces)
        with pytest.raises(httpx.TransportError):
            client.get("/health")


def test_wrong_configuration_is_told_before_the_model_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "Engine", lambda _: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match="give --api-key"):
        serve.run(parse(str(checkpoint), "--host", "0.0.0.0"))
    with pytest.raises(ConfigError, match="processed_logprobs"):
        serve.run(parse(str(checkpoint), "--return-sampling-mask"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: cannot listen at 127.0.0.1: Address already in use; stop"):
            serve.run(parse(str(checkpoint), "--port", str(port)))
    monkeypatch.setenv("KEY_OF_TEST", "key")
    updates = ("--enable-weight-updates", "--api-key", "env:KEY_OF_TEST")
    with pytest.raises(ConfigError, match=r"weights_dir='/not/there': is no folder"):
        serve.run(parse(str(checkpoint), *updates, "--weights-dir", "/not/there"))
    for host, says in (("203.0.113.7", "cannot listen at 203.0.113.7"), ("no.such.host.invalid", "is no address")):
        with pytest.raises(ConfigError, match=says):
            serve.run(parse(str(checkpoint), "--host", host, "--api-key", "env:KEY_OF_TEST"))
