"""What a server answered: sending the table, keeping the answers in a file, and comparing two of them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from peer_requests import Asked

__all__ = ["Answer", "Difference", "Recording", "compare", "load", "send", "store"]

_HEX = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{16,}")
_FOLDER = re.compile(r"/[^\s\"']*/site-packages/")
_SETTINGS = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
"""These tell a server's own settings and environment; only that they tell some is kept."""
_VOLATILE = {
    *("id", "request_id", "created", "system_fingerprint", "root", "message", "seed", "weight_version"),
    *("cached_tokens", "device", "e2e_latency", "queue_time", "prefill_launch_delay", "prefill_launch_latency"),
    *("request_received_ts", "response_sent_to_client_ts", "decode_throughput", "inference_time"),
    *("prefill_finished_ts", "decode_finished_ts", "api_server_dispatch_finish_ts"),
    *("top_logprobs", "prompt_logprobs", "input_token_logprobs", "input_top_logprobs", "output_top_logprobs"),
    *("sampling_mask", "output_token_sampling_mask", "output_token_sampling_logprobs"),
}
"""Keys whose values differ from one answer to the next, or with the last bits of the logits: of these only types and
lengths are compared. Supports are compared on distributions made for it, by `scripts/peers masks`."""
_PER_CHUNK = {"text", "content", "completion_tokens", "total_tokens", "output_token_logprobs_length", "text_offset"}
"""Keys whose values hang on how many tokens a chunk of a stream holds."""
_TOLERANCE = 0.2  # nats: bfloat16 against float32


@dataclass(frozen=True, slots=True)
class Answer:
    """status: 0 where the connection broke. body: parsed JSON, the events of a stream as a list, or a text."""

    status: int
    kind: str
    """json, events or text."""
    body: Any


@dataclass(frozen=True, slots=True)
class Recording:
    """What a peer answered to the table."""

    peer: str
    """Its name and version."""
    answers: Sequence[tuple[Asked, Answer]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two answers differ. where: a path like choices[].logprobs, with list positions left out."""

    where: str
    peer: Any
    ours: Any


ABSENT = "absent"


def send(client: httpx.Client, asked: Asked) -> Answer:
    """Send one request and read the whole answer."""
    try:
        response = client.request(asked.method, asked.path, **({} if asked.body is None else {"json": asked.body}))
    except httpx.TransportError as error:
        return Answer(0, "text", type(error).__name__)
    text = _FOLDER.sub("", _HEX.sub("0", response.text))
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(response.status_code, "events", list(_events(text)))
    try:
        body = json.loads(text)
    except ValueError:
        return Answer(response.status_code, "text", text[:400])
    if asked.path in _SETTINGS and isinstance(body, dict):
        body = {}
    return Answer(response.status_code, "json", body)


def _events(text: str) -> Iterator[Any]:
    for block in text.replace("\r\n", "\n").split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            yield data if data.strip() == "[DONE]" else json.loads(data)
        elif block.strip():
            yield block


def store(path: Path, recording: Recording) -> None:
    """One line of JSON a request, after one that names the peer."""
    lines = [json.dumps({"peer": recording.peer})]
    for asked, answer in recording.answers:
        line = {
            "name": asked.name,
            "setting": asked.setting,
            "method": asked.method,
            "path": asked.path,
            "request": asked.body,
            "status": answer.status,
            "kind": answer.kind,
            "answer": answer.body,
        }
        lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", mtime=0))


def load(path: Path, table: Iterable[Asked]) -> Recording:
    """What was stored. Raises AssertionError where it is not of this table, so that the peer must be asked again."""
    head, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    stored = {(line["setting"], line["name"]): line for line in map(json.loads, lines)}
    answers = []
    for asked in table:
        line = stored.pop((asked.setting, asked.name), None)
        assert line is not None, f"{asked.name}: not recorded"
        assert line["request"] == json.loads(json.dumps(asked.body)), f"{asked.name}: recorded with another body"
        answers.append((asked, Answer(line["status"], line["kind"], line["answer"])))
    assert not stored, f"recorded, but not in the table: {list(stored)}"
    return Recording(json.loads(head)["peer"], answers)


def compare(peer: Answer, ours: Answer) -> Iterator[Difference]:
    """Where the two differ, `ours` missing a field, having one more, or another type or value."""
    if peer.status != ours.status:
        yield Difference("status", (peer.status, _said(peer)), (ours.status, _said(ours)))
    elif peer.kind != ours.kind:
        yield Difference("kind", peer.kind, ours.kind)
    elif peer.kind == "events":
        theirs, our = _folded(peer.body), _folded(ours.body)
        if list(theirs) != list(our):
            yield Difference("kinds of events", list(theirs), list(our))
        for key in theirs.keys() & our.keys():
            yield from _walk("event", theirs[key], our[key], lengths=False)
    elif peer.kind == "json":
        yield from _walk("", peer.body, ours.body)


def _said(answer: Answer) -> Any:
    """What an error says, and nothing of other answers."""
    if answer.status == 200:
        return ""
    body = answer.body
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, dict) else error
    return body if len(str(body)) <= 200 else f"{str(body)[:200]}…"


def _folded(events: Sequence[Any]) -> dict[str, Any]:
    """A stream by kinds of events: each completion's chunks, together, then usage and the end.

    Which completion comes first, and how many tokens a chunk holds, are left open by both.
    """
    chunks: dict[int, list[Any]] = {}
    folded: dict[str, Any] = {}
    for event in events:
        if isinstance(event, dict) and (event.get("choices") or "output_ids" in event):
            index = event["choices"][0]["index"] if event.get("choices") else event.get("index", 0)
            chunks.setdefault(index, []).append(event)
        else:
            folded["usage" if isinstance(event, dict) and event.get("choices") == [] else str(event)] = event
    for index, own in sorted(chunks.items()):
        folded[f"completion {index}"] = (
            {**own[0], "choices": [_merged([event["choices"][0] for event in own])]} if "choices" in own[0] else own[-1]
        )
        folded[f"text of {index}"] = {"text": "".join(_text(event) for event in own)}
    return folded


def _merged(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the chunks of one completion tell together: of each field the last that is not null."""
    merged: dict[str, Any] = {}
    for choice in choices:
        merged |= {key: value for key, value in choice.items() if value is not None or key not in merged}
        if isinstance(choice.get("delta"), dict):
            merged["delta"] = {**choices[0]["delta"], **choice["delta"]}
    return merged


def _text(event: dict[str, Any]) -> str:
    choice = event["choices"][0] if "choices" in event else {}
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def _walk(where: str, peer: Any, ours: Any, *, values: bool = True, lengths: bool = True) -> Iterator[Difference]:
    """values: whether to compare more than types and lengths. lengths: whether to compare those of lists."""
    if isinstance(peer, dict) and isinstance(ours, dict):
        yield from _walk_fields(where, peer, ours, values=values, lengths=lengths)
    elif isinstance(peer, list) and isinstance(ours, list):
        if lengths and len(peer) != len(ours):
            yield Difference(f"{where}[]", peer, ours)
        else:
            for theirs, our in zip(peer, ours, strict=False):
                yield from _walk(f"{where}[]", theirs, our, values=values, lengths=lengths)
    elif _type(peer) != _type(ours) or (values and not _alike(peer, ours)):
        yield Difference(where, peer, ours)


def _walk_fields(
    where: str, peer: dict[str, Any], ours: dict[str, Any], *, values: bool, lengths: bool
) -> Iterator[Difference]:
    ids = not values and all(key.isdigit() for key in (*peer, *ours))
    if ids or where.endswith("top_logprobs[]"):  # keys are ids or texts, of which near ties may be others
        if len(peer) != len(ours):
            yield Difference(f"{where}[id]", peer, ours)
        peer, ours = ({"[id]": next(iter(side.values()))} if side else {} for side in (peer, ours))
    for key in peer:
        at = f"{where}.{key}" if where else key
        if key in ours:
            own = values and key not in _VOLATILE and (lengths or key not in _PER_CHUNK)
            yield from _walk(at, peer[key], ours[key], values=own, lengths=lengths)
        else:
            yield Difference(at, peer[key], ABSENT)
    for key in ours.keys() - peer.keys():
        yield Difference(f"{where}.{key}" if where else key, ABSENT, ours[key])


def _alike(peer: Any, ours: Any) -> bool:
    return abs(peer - ours) <= _TOLERANCE if isinstance(peer, float) or isinstance(ours, float) else peer == ours


def _type(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
