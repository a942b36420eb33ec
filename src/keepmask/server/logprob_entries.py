"""Log-probability entries in the shapes of the APIs. An entry's first id is the drawn one; others follow by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def by_text(output: CompletionOutput, *, top: int, as_ids: bool = False) -> dict[str, Any] | None:
    """OpenAI's chat shape: `{"content": [{token, bytes, logprob, top_logprobs}]}`, with the `top` most likely ids.

    as_ids: name tokens "token_id:<id>".
    """
    if output.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        likely = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:top]
        content.append(
            {
                **_named_by_text(token_id, entry[token_id], as_ids=as_ids),
                "top_logprobs": [_named_by_text(other, logprob, as_ids=as_ids) for other, logprob in likely],
            }
        )
    return {"content": content}


def legacy(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    *,
    text_offset: int,
    texts: Mapping[int, str],
    as_ids: bool = False,
) -> dict[str, Any]:
    """OpenAI's completions shape: parallel lists. An entry is None for the first token of a prompt.

    text_offset: characters of the tokens before the first. texts: of tokens without an entry, by their ids.
    """
    names, offsets, values, tops = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        of = Logprob(0.0, None, texts.get(token_id)) if entry is None else entry[token_id]
        name = _name(token_id, of, as_ids=as_ids)
        names.append(name)
        offsets.append(text_offset)
        text_offset += len(name)
        values.append(None if entry is None else of.logprob)
        tops.append(None if entry is None else {_name(*item, as_ids=as_ids): item[1].logprob for item in entry.items()})
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


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


def _named_by_text(token_id: int, logprob: Logprob, *, as_ids: bool) -> dict[str, Any]:
    name = _name(token_id, logprob, as_ids=as_ids)
    return {"token": name, "logprob": logprob.logprob, "bytes": list(name.encode())}


def _name(token_id: int, logprob: Logprob, *, as_ids: bool) -> str:
    if as_ids or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token
