"""Compile grammars in a process that can be ended when one takes too long or too much memory: a line of JSON each.

`python -m keepmask.grammars.grammar_worker MAX_BYTES`: the first line of its input is the tokenizer as xgrammar writes
it; each later one `{"kind": ..., "text": ..., "any_whitespace": ...}`, answered by `{"grammar": ...}` or by
`{"error": ...}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xgrammar

__all__: list[str] = []

_HEADROOM = 2**30  # bytes of address space a compilation may take


def main(max_bytes: int) -> None:
    """Answer lines until there are no more."""
    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _limit_memory()
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - its output is its answer
    for line in sys.stdin:
        print(json.dumps(_answer(compiler, json.loads(line), max_bytes)), flush=True)  # noqa: T201


def _answer(compiler: Any, asked: dict[str, Any], max_bytes: int) -> dict[str, str]:
    try:
        compiled = _compiled(compiler, asked)
    except MemoryError:
        return {"error": "takes too much memory to compile"}
    except Exception as error:  # whatever the library finds wrong with somebody's text
        return {"error": str(error).strip().splitlines()[-1][:300] or type(error).__name__}
    if compiled.memory_size_bytes > max_bytes:
        return {"error": f"takes {compiled.memory_size_bytes} bytes compiled; at most {max_bytes} are allowed"}
    return {"grammar": compiled.serialize_json()}


def _compiled(compiler: Any, asked: dict[str, Any]) -> Any:
    if asked["kind"] == "json":
        return compiler.compile_json_schema(asked["text"], any_whitespace=asked["any_whitespace"])
    if asked["kind"] == "json_object":
        return compiler.compile_builtin_json_grammar()
    return getattr(compiler, f"compile_{asked['kind']}")(asked["text"])


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM, size + _HEADROOM))


if __name__ == "__main__":
    main(int(sys.argv[1]))
