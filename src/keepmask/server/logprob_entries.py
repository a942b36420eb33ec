"""Log-probability entries in the shapes of the APIs. An entry's first id is the drawn one; others follow by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepmask.outputs import CompletionOutput, Logprob

__all__ = ["Entry", "by_id", "by_text", "legacy", "prompt_entries"]

Entry = dict[int, Logprob]


def by_id(output: CompletionOutput) -> dict[str, Any] | None:
    """vLLM's shape for token ids: `{"content": [{token_id, logprob, rank, top_logprobs}]}`. Each has a "token" too, as
    "token_id:<id>".
    """
    if output.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        top = [_named_by_id(other, logprob) for other, logprob in entry.items()]
        content.append({**_named_by_id(token_id, entry[token_id]), "top_logprobs": top})
    return {"content": content}


def by_text(
    output: CompletionOutput, *, top: int, token_bytes: Callable[[int], bytes] | None, as_ids: bool = False
) -> dict[str, Any] | None:
    """OpenAI's chat shape: `{"content": [{token, bytes, logprob, top_logprobs}]}`, with the `top` most likely ids.

    token_bytes: see `TokenBytes`; without it, bytes are null. as_ids: name tokens "token_id:<id>".
    """

    def named(token_id: int, logprob: Logprob) -> dict[str, Any]:
        name = _name(token_id, logprob, as_ids=as_ids)
        own = None if token_bytes is None else list(token_bytes(token_id))
        return {"token": name, "logprob": logprob.logprob, "bytes": own}

    if output.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        likely = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:top]
        content.append(
            {
                **named(token_id, entry[token_id]),
                "top_logprobs": [named(other, logprob) for other, logprob in likely],
            }
        )
    return {"content": content}


def legacy(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    *,
    offsets: Sequence[int],
    texts: Mapping[int, str],
    as_ids: bool = False,
) -> dict[str, Any]:
    """OpenAI's completions shape: parallel lists. An entry is None for the first token of a prompt.

    offsets: where the text of each token begins. texts: of tokens without an entry, by their ids. A key of top_logprobs
    is the token's text, or "token_id:<id>" where several have the same.
    """
    names, values, tops = [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        of = Logprob(0.0, None, texts.get(token_id)) if entry is None else entry[token_id]
        name = _name(token_id, of, as_ids=as_ids)
        names.append(name)
        values.append(None if entry is None else of.logprob)
        tops.append(None if entry is None else _by_name(entry, as_ids=as_ids))
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def _by_name(entry: Entry, *, as_ids: bool) -> dict[str, float]:
    names = {token_id: _name(token_id, logprob, as_ids=as_ids) for token_id, logprob in entry.items()}
    count = Counter(names.values())
    return {
        name if count[name] == 1 else f"token_id:{token_id}": entry[token_id].logprob
        for token_id, name in names.items()
    }


def prompt_entries(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape of prompt_logprobs: one object a token, from id to {logprob, rank, decoded_token}."""
    return None if entries is None else list(map(_prompt_entry, entries))


def _prompt_entry(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {str(token_id): logprob._asdict() for token_id, logprob in entry.items()}


def _named_by_id(token_id: int, logprob: Logprob) -> dict[str, Any]:
    named = {"token": f"token_id:{token_id}", "token_id": token_id}
    return {**named, "logprob": logprob.logprob, "rank": logprob.rank}


def _name(token_id: int, logprob: Logprob, *, as_ids: bool) -> str:
    if as_ids or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token
