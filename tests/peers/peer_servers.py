"""Servers to be compared: the real peer in a process of its own, and keepmask in this one, on one checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from serving import Serving

import tiny

__all__ = ["keepmask_server", "peer_server", "save_tiny"]

_SCRIPT = Path(__file__).parents[2] / "scripts" / "peers"
_START_S = 300
_CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)

# By peer and setting: the peer's flags, and the engine options under which keepmask is to answer alike.
_FLAGS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("vllm", "plain"): (),
    ("vllm", "masks"): ("--return-sampling-mask", "--logprobs-mode", "processed_logprobs"),
    ("sglang", "plain"): (),
}
_ENGINE: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("vllm", "plain"): {"return_sampling_mask": False, "logprobs_mode": "raw_logprobs"},
    ("vllm", "masks"): {"sampling_mask_contract": "vllm"},
    ("sglang", "plain"): {"return_sampling_mask": False, "sampling_semantics": "sglang-torch"},
}


def save_tiny(folder: Path) -> Path:
    """A random Llama with a context of 512 tokens and a tokenizer of bytes; heads of 32, the least vLLM has on CPUs."""
    tiny.save(folder, "llama", max_position_embeddings=512, head_dim=32)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def keepmask_server(peer: str, setting: str, model: str, **options: Any) -> Serving:
    """keepmask as it is to be compared with this peer, to be entered."""
    engine = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 512, **_ENGINE[peer, setting]}
    return Serving(model, engine=engine, served_model_name=Path(model).name, **options)


@contextlib.contextmanager
def peer_server(peer: str, setting: str, model: str, *flags: str) -> Iterator[str]:
    """The address of the real one, from the start of the block to its end. flags: more of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, name = os.path.split(model)  # the name alone, so that no answer tells the path
    command = [_SCRIPT, "serve", peer, name, str(port), *_FLAGS[peer, setting], *flags]
    log = Path(f"{peer}-{setting}.log").resolve()
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the peer ended with {process.returncode} before it served; see {log}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"the peer does not serve after {_START_S} s; see {log}")
