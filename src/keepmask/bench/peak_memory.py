"""Peak resident memory of one workload, in a process of its own: `python -m keepmask.bench.peak_memory REQUEST`.

REQUEST is JSON: {"options": {...} of `LLM`, "workload": {...}, "params": {...} of `SamplingParams`}.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

from keepmask.bench.workload import Workload
from keepmask.errors import EngineError

__all__ = ["Memory", "peak_memory", "resident"]


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    """Most that the process had resident."""
    weights: int
    kv_cache: int
    """The budget, whether filled or not."""
    after: int
    """Resident once the workload is done: without what only loading needed."""

    @property
    def over(self) -> int:
        """What is neither weights nor cache."""
        return self.peak - self.weights - self.kv_cache


def peak_memory(workload: Workload, *, options: dict[str, Any], params: dict[str, Any]) -> Memory:
    """Load the model and run the workload in a fresh process. Raises EngineError when that fails."""
    request = json.dumps({"options": options, "workload": asdict(workload), "params": params})
    done = subprocess.run([sys.executable, "-m", __name__, request], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"measuring memory: the process ended with {done.returncode}: {last}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def _measure(request: dict[str, Any]) -> Memory:
    # torch loads in this process only, not where the result is read.
    from keepmask.bench.ours import Ours
    from keepmask.engine.weights import weight_bytes

    ours = Ours(request["options"])
    workload = Workload(**request["workload"])
    ours.run(workload, workload.prompts(ours.vocab_size, seed=0), request["params"])
    runner = ours.llm.engine.runner
    return Memory(resident("VmHWM"), weight_bytes(runner.model), runner.kv_cache_bytes, resident("VmRSS"))


def resident(field: str) -> int:
    """Bytes of this process now (VmRSS) or at most (VmHWM); `getrusage` would count the parent it was forked from."""
    with open("/proc/self/status") as lines:
        (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) * 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(json.loads(sys.argv[1]))._asdict()) + "\n")
