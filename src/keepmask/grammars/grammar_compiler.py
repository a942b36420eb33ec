"""`GrammarCompiler`: from what form a text must have to a state that says which tokens may come next."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from time import monotonic
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from keepmask.errors import RequestError
from keepmask.structured_outputs import StructuredOutputsParams

__all__ = ["GrammarCompiler", "GrammarState"]

_START_S = 120.0  # importing xgrammar on a busy machine
_MAX_CACHED = 128


class GrammarState:
    """Where one completion stands in its grammar."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    @property
    def ended(self) -> bool:
        """Whether the text is whole and its end was drawn: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def allowed(self) -> NDArray[np.bool_]:
        """[V]: which ids may come next; none once the text has ended."""
        if self.ended:
            return np.zeros(self._vocab_size, bool)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = self._bits.numpy().view(np.uint8)[0]
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def append(self, token_id: int) -> None:
        """Account for a token that was drawn."""
        accepted = self._matcher.accept_token(token_id)
        assert accepted


class GrammarCompiler:
    """Compiles what requests ask for, in a process of its own, within `timeout_s` and `max_bytes`.

    May be called from any thread. tokenizer: of transformers. stop_token_ids: that may end a text; by default the
    tokenizer's own. Raises RequestError for what has no meaning, is too
    large, or matches no text at all.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float = 10.0,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self.max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids) or None
        self._info: Any = None
        self._worker: _Worker | None = None
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def open(self, wanted: StructuredOutputsParams) -> GrammarState:
        """The state of a completion without tokens so far."""
        return GrammarState(self._compiled(wanted), self.vocab_size)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _compiled(self, wanted: StructuredOutputsParams) -> Any:
        asked = json.dumps(_question(wanted))
        with self._lock:
            if (compiled := self._cache.get(asked)) is None:
                compiled = self._cache[asked] = self._compile(asked)
                if not GrammarState(compiled, self.vocab_size).allowed().any():
                    del self._cache[asked]
                    raise _refusal("no text has this form")
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(asked)
            return compiled

    def _compile(self, asked: str) -> Any:
        if find_spec("xgrammar") is None:
            raise _refusal("needs xgrammar; install keepmask[structured]")
        import xgrammar

        if self._info is None:
            self._info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self.vocab_size, stop_token_ids=self._stop_token_ids
            )
        if self._worker is None:
            self._worker = _Worker(self._info.serialize_json(), self.max_bytes)
        try:
            answer = self._worker.ask(asked, self.timeout_s)
        except (TimeoutError, EOFError) as error:
            self._worker.close()
            self._worker = None
            reason = f"takes more than {self.timeout_s:g} s" if isinstance(error, TimeoutError) else "takes too much"
            raise _refusal(f"{reason} to compile; use a smaller one") from error
        if "error" in answer:
            raise _refusal(answer["error"])
        return xgrammar.CompiledGrammar.deserialize_json(answer["grammar"], self._info)


class _Worker:
    """The process, and how to wait for its lines no longer than for a while."""

    def __init__(self, tokenizer: str, max_bytes: int) -> None:
        command = [sys.executable, "-m", "keepmask.grammars.grammar_worker", str(max_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.close = weakref.finalize(self, _end, self._process)  # also when nobody holds it any more
        self.ask(tokenizer, _START_S)

    def ask(self, line: str, timeout_s: float) -> dict[str, Any]:
        """The answer to a line. Raises TimeoutError, and EOFError where the process has died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise EOFError from error
        answer: dict[str, Any] = json.loads(_line(stdout, monotonic() + timeout_s))
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _line(stream: IO[bytes], until: float) -> bytes:
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not parts or not parts[-1].endswith(b"\n"):
            if not selector.select(max(0.0, until - monotonic())):
                raise TimeoutError
            part = stream.read1(1 << 20)  # type: ignore[attr-defined]
            if not part:
                raise EOFError
            parts.append(part)
    return b"".join(parts)


def _question(wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.json is not None:
        return {"kind": "json", "text": wanted.grammar_schema, "any_whitespace": not wanted.disable_any_whitespace}
    if wanted.json_object:
        return {"kind": "json_object"}
    if wanted.regex is not None:
        return {"kind": "regex", "text": wanted.regex}
    if wanted.choice is not None:
        # Quotes, backslashes and control characters are escaped in grammars as in JSON.
        return {
            "kind": "grammar",
            "text": "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice),
        }
    return {"kind": "grammar", "text": wanted.grammar}


def _refusal(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {reason}", param="structured_outputs")
