"""Prompt files: one JSON value a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepmask.errors import RequestError

__all__ = ["PromptLine", "read_prompts"]

_KINDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a file, and the request id of its rollouts."""

    request_id: str
    line: int
    kind: str
    """prompt, messages or prompt_token_ids"""
    value: Any


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a JSONL file, in order; blank lines are passed over.

    A line is a string, or an object with exactly one of `prompt` (text), `messages` (a conversation) and
    `prompt_token_ids`. `id` names the request, by default the line's number; other keys are the user's own.

    Raises RequestError naming the line and what it must be. OSError passes through.
    """
    prompts: list[PromptLine] = []
    seen: dict[str, int] = {}
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not text.strip():
            continue
        prompt = _parse(f"{path}, line {number}", number, text)
        if (other := seen.setdefault(prompt.request_id, number)) != number:
            raise RequestError(f"{path}, line {number}: id {prompt.request_id!r} is also that of line {other}")
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"{path}: holds no prompts")
    return prompts


def _parse(where: str, number: int, text: str) -> PromptLine:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where}: is not JSON: {error}") from None
    if isinstance(value, str):
        return PromptLine(str(number), number, "prompt", value)
    kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
    if len(kinds) != 1:
        raise RequestError(f"{where}: must be a string, or an object with one of {', '.join(_KINDS)}")
    (kind,) = kinds
    if not isinstance(value[kind], str if kind == "prompt" else list):
        raise RequestError(f"{where}: {kind} must be {'text' if kind == 'prompt' else 'a list'}")
    return PromptLine(str(value.get("id", number)), number, kind, value[kind])
