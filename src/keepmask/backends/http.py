"""`Client` and `AsyncClient`: rollouts from a keepmask server, whole or as they are drawn, and new weights to it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepmask.backends.base import weight_parts
from keepmask.errors import BackendError, MaskError, RequestError
from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout, WeightVersionSpan
from keepmask.params import SamplingParams
from keepmask.wire.fields import JsonForm, mask_from_fields

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AsyncClient", "Client", "as_finished", "joined"]

_GENERATE = "/inference/v1/generate"
_ABORT = "/inference/v1/abort_requests"
_BINARY = {"content-type": "application/octet-stream"}
_BUSY = (429, 503)
_CONNECT_S = 10.0
_MAX_CONNECTIONS = 256  # of a client that waits for each answer on a thread


class Client:
    """A server over HTTP.

    url: of the server's root, as http://127.0.0.1:8000. timeout_s: for each wait for bytes. retries: how often a
    request is sent again that the server is too busy for, each time after as long as it asks. mask_format: how
    masks travel.

    Raises RequestError for a request that the server refuses, and BackendError when it cannot be reached, fails, or
    answers something unusable.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 60,
        mask_format: JsonForm = "base64",
    ) -> None:
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS)
        self._http = httpx.Client(**_options(url, api_key, timeout_s), limits=limits)
        self._retries, self._form = retries, mask_format

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def generate(
        self, prompt_token_ids: ArrayLike, params: SamplingParams, *, request_id: str | None = None
    ) -> list[Rollout]:
        """Complete a prompt; one rollout a completion."""
        body = _body(prompt_token_ids, params, request_id, self._form)
        return _rollouts(self.post(_GENERATE, body), body, params)

    def stream(
        self, prompt_token_ids: ArrayLike, params: SamplingParams, *, request_id: str | None = None
    ) -> Iterator[Rollout]:
        """Pieces of the rollouts as they are drawn, to be put together by `joined`. Closing the iterator aborts."""
        body = {**_body(prompt_token_ids, params, request_id, self._form), "stream": True}
        try:
            for attempt in range(self._retries + 1):
                with self._http.stream("POST", _GENERATE, json=body) as response:
                    if response.status_code == 200:
                        pieces = _Pieces(body, params)
                        yield from pieces.of(response.iter_lines())
                        pieces.check_end()
                        return
                    wait_s = _retry_after_s(response)
                    if wait_s is None or attempt == self._retries:
                        response.read()
                        raise _refusal(response)
                time.sleep(wait_s)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error

    def rollouts(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See `backends.base.Rollouts`, which this class satisfies."""
        found = dict(self.rollouts_as_finished(prompts, params))
        return [found[at] for at in range(len(prompts))]

    def rollouts_as_finished(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """See `backends.base.Rollouts`. The requests travel on a thread each."""
        return as_finished(self.generate, self.abort, prompts, params)

    def resolved_params(self, prompt: ArrayLike, params: SamplingParams) -> SamplingParams:
        """See `backends.base.Rollouts`. The server fills in max_tokens; what else is unset follows its settings."""
        room = int(self.get("/v1/models")["data"][0]["max_model_len"]) - np.asarray(prompt).size
        return params.replace(max_tokens=room) if params.max_tokens is None else params

    @property
    def weight_version(self) -> str:
        """Of the weights that draw the next token."""
        return str(self.get("/weight_info")["weight_version"])

    def weight_checksums(self) -> dict[str, str]:
        """The SHA-256 of every weight, by its name in the model's state dict."""
        told = self.post("/weight_checker", {"action": "checksum"})
        return dict(told["checksums"])

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each is answered with what it has."""
        self.post(_ABORT, {"request_ids": list(request_ids)})

    def update_weights(
        self, weights: Mapping[str, Tensor] | Iterable[bytes], version: str | None = None, **options: bool
    ) -> str:
        """Replace the server's weights; returns their version.

        weights: all tensors by their names, which also drops an update that was never finished; or safetensors files,
        each with some of them. options: partial, cast, discard, as in the body of /start_weight_update.
        """
        self.post("/start_weight_update", _started(weights, options))
        for part in _parts(weights):
            self._send("/update_weights", content=part, headers=_BINARY)
        return str(self.post("/finish_weight_update", _finish(version))["weight_version"])

    def get(self, path: str) -> Any:
        """The parsed answer to a GET."""
        return self._send(path, method="GET")

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The parsed answer to a POST of `body`."""
        return self._send(path, json=body)

    def _send(self, path: str, *, method: str = "POST", **content: Any) -> Any:
        for attempt in range(self._retries + 1):
            try:
                response = self._http.request(method, path, **content)
            except httpx.HTTPError as error:
                raise _unreachable(self._http.base_url, error) from error
            wait_s = _retry_after_s(response)
            if wait_s is None or attempt == self._retries:
                break
            time.sleep(wait_s)
        return _answer(response)


class AsyncClient:
    """`Client` for asyncio: the same, awaited."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 60,
        mask_format: JsonForm = "base64",
        max_connections: int = 1024,
    ) -> None:
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(**_options(url, api_key, timeout_s), limits=limits)
        self._retries, self._form = retries, mask_format

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def generate(
        self, prompt_token_ids: ArrayLike, params: SamplingParams, *, request_id: str | None = None
    ) -> list[Rollout]:
        """Complete a prompt; one rollout a completion."""
        body = _body(prompt_token_ids, params, request_id, self._form)
        return _rollouts(await self.post(_GENERATE, body), body, params)

    async def stream(
        self, prompt_token_ids: ArrayLike, params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[Rollout]:
        """Pieces of the rollouts as they are drawn, to be put together by `joined`. Closing the generator aborts."""
        body = {**_body(prompt_token_ids, params, request_id, self._form), "stream": True}
        try:
            for attempt in range(self._retries + 1):
                async with self._http.stream("POST", _GENERATE, json=body) as response:
                    if response.status_code == 200:
                        pieces = _Pieces(body, params)
                        async for line in response.aiter_lines():
                            for piece in pieces.of([line]):
                                yield piece
                        pieces.check_end()
                        return
                    wait_s = _retry_after_s(response)
                    if wait_s is None or attempt == self._retries:
                        await response.aread()
                        raise _refusal(response)
                await asyncio.sleep(wait_s)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each is answered with what it has."""
        await self.post(_ABORT, {"request_ids": list(request_ids)})

    async def update_weights(
        self, weights: Mapping[str, Tensor] | Iterable[bytes], version: str | None = None, **options: bool
    ) -> str:
        """As `Client.update_weights`."""
        await self.post("/start_weight_update", _started(weights, options))
        for part in _parts(weights):
            await self._send("/update_weights", content=part, headers=_BINARY)
        return str((await self.post("/finish_weight_update", _finish(version)))["weight_version"])

    async def get(self, path: str) -> Any:
        """The parsed answer to a GET."""
        return await self._send(path, method="GET")

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The parsed answer to a POST of `body`."""
        return await self._send(path, json=body)

    async def _send(self, path: str, *, method: str = "POST", **content: Any) -> Any:
        for attempt in range(self._retries + 1):
            try:
                response = await self._http.request(method, path, **content)
            except httpx.HTTPError as error:
                raise _unreachable(self._http.base_url, error) from error
            wait_s = _retry_after_s(response)
            if wait_s is None or attempt == self._retries:
                break
            await asyncio.sleep(wait_s)
        return _answer(response)


def as_finished(
    generate: Callable[..., list[Rollout]],
    abort: Callable[[Sequence[str]], None],
    prompts: Sequence[ArrayLike],
    params: SamplingParams | Sequence[SamplingParams],
) -> Iterator[tuple[int, list[Rollout]]]:
    """`rollouts_as_finished` of a server: generate(prompt, params, request_id=...) for each prompt, on threads.

    abort: ends the requests of these ids, when the iterator is closed before its end.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    names = [f"rollout-{secrets.token_hex(16)}" for _ in each]
    left = dict(enumerate(names))
    with ThreadPoolExecutor(max(1, min(len(names), _MAX_CONNECTIONS))) as pool:
        jobs = {
            pool.submit(generate, prompt, own, request_id=name): at
            for at, (prompt, own, name) in enumerate(zip(prompts, each, names, strict=True))
        }
        try:
            for job in as_completed(jobs):
                del left[jobs[job]]
                yield jobs[job], job.result()
        finally:
            if left:
                pool.shutdown(wait=False, cancel_futures=True)
                abort(list(left.values()))


def joined(pieces: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts that these pieces of a stream make up, in the order of their completions."""
    found: dict[int, list[Rollout]] = {}
    for piece in pieces:
        found.setdefault(piece.completion_index, []).append(piece)
    return [_joined(found[index]) for index in sorted(found)]


def _joined(parts: list[Rollout]) -> Rollout:
    last = parts[-1]
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return replace(
        last,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        sampling_mask=SamplingMask.concat(masks) if masks else None,
        logprobs=np.concatenate(logprobs) if logprobs else None,
        text="".join(part.text for part in parts),
        weight_versions=tuple(chain.from_iterable(part.weight_versions for part in parts)),
    )


class _Pieces:
    """Reads the events of one stream."""

    def __init__(self, body: Mapping[str, Any], params: SamplingParams) -> None:
        self._shared = _shared(body, params)
        self._ended = False

    def of(self, lines: Iterable[str]) -> Iterator[Rollout]:
        """The pieces in these lines of server-sent events."""
        for line in lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self._ended = True
                return
            event = _parsed(line.removeprefix("data: "))
            if "error" in event:
                raise BackendError(f"the server failed while answering: {_message(event)}")
            self._shared["seed"] = event.get("seed", self._shared["seed"])
            for choice in event.get("choices", ()):
                yield _rollout(choice, self._shared)

    def check_end(self) -> None:
        """Raise BackendError for a stream that ended early."""
        if not self._ended:
            raise BackendError("the server's stream ended before its end; it may have been stopped")


def _options(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    if httpx.URL(url).scheme not in ("http", "https"):
        raise BackendError(f"{url}: is no address of a server; give one like http://127.0.0.1:8000")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"base_url": url, "headers": headers, "timeout": httpx.Timeout(timeout_s, connect=_CONNECT_S)}


def _body(
    prompt_token_ids: ArrayLike, params: SamplingParams, request_id: str | None, form: JsonForm
) -> dict[str, Any]:
    sampling = params.model_dump(exclude_defaults=True) | {"max_tokens": params.max_tokens}
    body = {
        "token_ids": np.asarray(prompt_token_ids).tolist(),
        "sampling_params": sampling,
        "sampling_mask_format": form,
    }
    return body if request_id is None else {**body, "request_id": request_id}


def _shared(body: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    """Fields that all rollouts of a request have."""
    return {
        "prompt_token_ids": np.asarray(body["token_ids"], np.int32),
        "sampling_params": params.model_dump(exclude_defaults=True),
        "request_id": body.get("request_id", ""),
        "seed": params.seed,
    }


def _rollouts(answer: Any, body: Mapping[str, Any], params: SamplingParams) -> list[Rollout]:
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise BackendError("the server's answer has no choices; is it a keepmask server?")
    shared = {**_shared(body, params), "seed": answer.get("seed", params.seed)}
    shared["request_id"] = str(answer.get("request_id", shared["request_id"]))
    return [_rollout(choice, shared) for choice in answer["choices"]]


def _rollout(choice: Mapping[str, Any], shared: Mapping[str, Any]) -> Rollout:
    """One choice, whole or a piece. Raises BackendError when its parts do not fit together."""
    try:
        token_ids = np.asarray(choice["token_ids"], np.int32)
        rollout = Rollout(
            token_ids=token_ids,
            sampling_mask=mask_from_fields(choice) if choice.get("sampling_mask") is not None else None,
            logprobs=_logprobs(choice.get("logprobs"), token_ids),
            completion_index=int(choice["index"]),
            text=str(choice.get("text", "")),
            finish_reason=choice.get("finish_reason"),
            stop_reason=choice.get("stop_reason"),
            weight_versions=tuple(WeightVersionSpan(**span) for span in choice.get("weight_versions") or ()),
            **shared,
        )
    except (KeyError, TypeError, ValueError, OverflowError, MaskError) as error:
        raise BackendError(f"the server's answer cannot be read: {type(error).__name__}: {error}") from error
    for name in ("sampling_mask", "logprobs"):
        value = getattr(rollout, name)
        if value is not None and len(value) != token_ids.size:
            raise BackendError(f"the server's answer has {len(value)} rows of {name} for {token_ids.size} tokens")
    return rollout


def _logprobs(logprobs: Any, token_ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
    if logprobs is None:
        return None
    content = logprobs["content"]
    if [entry["token_id"] for entry in content] != token_ids.tolist():
        raise ValueError("logprobs are of other tokens than token_ids")
    return np.asarray([entry["logprob"] for entry in content], np.float32)


def _started(weights: Mapping[str, Tensor] | Iterable[bytes], options: dict[str, bool]) -> dict[str, bool]:
    return {"discard": True, **options} if isinstance(weights, Mapping) else options


def _parts(weights: Mapping[str, Tensor] | Iterable[bytes]) -> Iterable[bytes]:
    return weight_parts(weights.items()) if isinstance(weights, Mapping) else weights


def _finish(version: str | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": version}


def _answer(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise _refusal(response)
    return _parsed(response.text) if response.content else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the server answered something that is not JSON: {text[:80]!r}") from error


def _refusal(response: httpx.Response) -> Exception:
    """The exception for an answer other than 200."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.status_code == 400 and isinstance(body, dict) and isinstance(body.get("error"), dict):
        return RequestError(_message(body), param=body["error"].get("param"))
    said = _message(body) if isinstance(body, dict) else response.text[:300]
    return BackendError(f"{response.url}: {response.status_code}: {said}")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message") if isinstance(error, Mapping) else error)[:1000]


def _unreachable(url: httpx.URL, error: httpx.HTTPError) -> BackendError:
    return BackendError(
        f"{url}: {type(error).__name__}: {error}; check that the server runs and that this is its address"
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    """How long to wait before asking again; None when that is of no use."""
    asked = response.headers.get("retry-after", "")
    return float(min(60, int(asked))) if response.status_code in _BUSY and asked.isdecimal() else None
