"""`Peer`: another engine, in a process of its own, that does the same work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keepmask.bench.workload import SAMPLING, Workload
from keepmask.errors import BackendError

__all__ = ["PEERS", "Peer"]

_TOP_K_ONLY = {name: value for name, value in SAMPLING.items() if name != "top_p"}

PEERS: dict[str, dict[str, dict[str, float]]] = {
    "vllm": {"vllm, masks off": SAMPLING, "vllm, masks off, top_k alone": _TOP_K_ONLY},
    "transformers": {"transformers generate, masks off": SAMPLING},
}
"""The variants of each peer: how they sample."""

_START_S, _RUN_S = 300.0, 300.0
_HAS_GROUPS = hasattr(os, "killpg")


class Peer:
    """Starts the worker script of a peer under its own Python, which needs no keepmask.

    One JSON line in, one out. Between runs its processes are stopped, as some engines wait busily.
    Raises BackendError, with the end of what the process said, when it cannot do the work.
    name: one of `PEERS`. python: the interpreter that has the peer installed. options: what its worker takes.
    """

    def __init__(self, name: str, python: str, options: dict[str, Any]) -> None:
        self.name = name
        self._python = python
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close
        script = Path(__file__).with_name("workers") / f"{name}_worker.py"
        command = [python, str(script), json.dumps(options)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=os.environ | _environment(),
                cwd=tempfile.gettempdir(),
                process_group=0 if _HAS_GROUPS else None,
            )
        except OSError as error:
            self._said.close()
            raise BackendError(f"--peer-python {python}: {error.strerror or error}") from error
        self.version: str = self._answer(_START_S)["version"]
        self._signal("SIGSTOP")

    def run(self, workload: Workload, prompts: list[list[int]], sampling: dict[str, float]) -> float:
        """Seconds to complete the prompts."""
        request = {"prompts": prompts, "n": workload.n, "output": workload.output, "sampling": sampling}
        assert self._process.stdin is not None
        self._signal("SIGCONT")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        answer = self._answer(_RUN_S)
        self._signal("SIGSTOP")
        if answer["tokens"] != workload.num_tokens:
            raise BackendError(f"{self.name}: gave {answer['tokens']} tokens instead of {workload.num_tokens}")
        return float(answer["seconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; once is enough."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._kill()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def _signal(self, name: str) -> None:
        """To the worker and whatever it started, where the platform has process groups."""
        if _HAS_GROUPS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, getattr(signal, name))

    def _kill(self) -> None:
        self._signal("SIGKILL")
        self._process.kill()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._failure(f"gave no answer within {seconds:.0f} s or ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> BackendError:
        self._kill()
        self._process.wait()
        self._said.seek(0)
        tail = " | ".join(self._said.read().strip().splitlines()[-3:])
        self.close()
        return BackendError(f"{self.name} ({self._python}): {what}: {tail or 'no message'}")


def _environment() -> dict[str, str]:
    """No hub, no warnings; vLLM bound to every core this process may use: by default it leaves one idle."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
