"""The two routes that return sampling masks over HTTP, vLLM's and SGLang's, behind one face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from keepmask.conform.json_client import JsonClient, NotFoundError, RefusedError, SilentError
from keepmask.errors import BackendError, MaskError
from keepmask.outputs import Rollout
from keepmask.params import GREEDY_TEMPERATURE
from keepmask.wire.peers import rollouts_from_sglang, rollouts_from_vllm

__all__ = ["NUM_READ", "Drawn", "Route", "SglangRoute", "VllmRoute", "Word"]

NUM_READ = 20
"""Ids whose log-probabilities are read at once; servers allow as many unless told otherwise."""

_READ: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": NUM_READ, "min_p": 0.0, "max_tokens": 1, "n": 1}

_MASKS_ON = (
    "start the server so that it returns masks: vllm serve MODEL --return-sampling-mask --logprobs-mode "
    "processed_logprobs, or keepmask serve MODEL --logprobs-mode processed_logprobs"
)
_WIDEST = 4096  # SGLang's --sampling-mask-max-tokens unless told otherwise
_SILENT = "500 without a word: vLLM documents masks with temperature 0, or without a top_k, as refused"
_SGLANG = "return_sampling_mask with sampling_logprobs_mode='support' needs SGLang 0.5.20 or later"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion."""

    token_ids: list[int]
    rows: list[list[int] | None]
    """One a token, ids ascending; None where it is marked as the whole vocabulary."""
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Word:
    """A text, and the ids of the same text behind a space, which engines ban along with it."""

    text: str
    spaced: list[int]


class Route(Protocol):
    """A server's way to complete token ids. Parameters are those of `SamplingParams`."""

    @property
    def unknown(self) -> frozenset[str]:
        """Sampling parameters this route does not have."""
        ...

    def engine(self) -> str:
        """What answers, and which version of it, such as "vllm 0.32.0"; "" where it does not tell."""
        ...

    def draw(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[Drawn]:
        """params["n"] completions with their rows."""
        ...

    def read(self, prompt: Sequence[int], params: Mapping[str, Any]) -> dict[int, float]:
        """Log-probabilities of the likeliest NUM_READ ids behind the prompt, as the draw uses them, likeliest first."""
        ...

    def word(self, token_ids: Sequence[int]) -> Word | None:
        """A text that the server's tokenizer turns into these ids, or None where it has none."""
        ...


class VllmRoute:
    """vLLM's `POST /inference/v1/generate`, which keepmask serves too.

    Raises BackendError where the server returns no masks, saying what to switch on.
    """

    unknown: frozenset[str] = frozenset()
    _PATH = "/inference/v1/generate"

    def __init__(self, client: JsonClient, prompt: Sequence[int]) -> None:
        self._client = client
        self._where = f"{client.url}{self._PATH}"
        self._ask: dict[str, Any] = {}
        self._has_tokenizer = True
        if not self._gives_masks(prompt):
            # keepmask gives masks to the requests that ask for them, vLLM to all or to none
            self._ask = {"return_sampling_mask": True}
            if not self._gives_masks(prompt):
                raise BackendError(f"{self._where}: answers without sampling_mask; {_MASKS_ON}")

    def engine(self) -> str:
        """`/v1/models` tells whose the server is, `/version` which version."""
        return _engine(self._client, "/version")

    def draw(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[Drawn]:
        """The completions."""
        try:
            return [_drawn(self._where, rollout) for rollout in self._rollouts(prompt, params)]
        except SilentError:
            unbounded = params["temperature"] < GREEDY_TEMPERATURE or params["top_k"] <= 0
            if unbounded and self._gives_masks(prompt):  # it has not broken down
                raise RefusedError(_SILENT) from None
            raise

    def read(self, prompt: Sequence[int], params: Mapping[str, Any]) -> dict[int, float]:
        """`logprobs.content[0].top_logprobs`, whose tokens are named by `token_id`."""
        answer = self._post(prompt, {**_READ, "logprobs": NUM_READ, **params})
        try:
            top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return _likeliest({int(entry["token_id"]): float(entry["logprob"]) for entry in top})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BackendError(
                f"{self._where}: logprobs={NUM_READ} did not bring top_logprobs, each with its token_id"
            ) from error

    def word(self, token_ids: Sequence[int]) -> Word | None:
        """Asks `/detokenize`, and `/tokenize` whether the text comes back as these ids."""
        if not self._has_tokenizer:
            return None
        try:
            text = self._client.post("/detokenize", {"tokens": list(token_ids)})["prompt"]
            again, spaced = (
                self._client.post("/tokenize", {"prompt": spelled, "add_special_tokens": False})["tokens"]
                for spelled in (text, f" {text.lstrip()}")
            )
        except NotFoundError:
            self._has_tokenizer = False
            return None
        except (RefusedError, AttributeError, KeyError, TypeError):
            return None
        return Word(text, spaced) if text.strip() and again == list(token_ids) else None

    def _gives_masks(self, prompt: Sequence[int]) -> bool:
        try:
            return self._rollouts(prompt, _READ)[0].sampling_mask is not None
        except NotFoundError as error:
            raise BackendError(
                f"{error}; give the server's address without a path, and --api sglang where it speaks /generate"
            ) from error
        except RefusedError as error:
            remedy = f"; {_MASKS_ON}" if self._ask else ""
            raise BackendError(f"{self._where}: refused a plain request: {error}{remedy}") from error

    def _post(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Any:
        return self._client.post(self._PATH, {"token_ids": list(prompt), "sampling_params": {**params, **self._ask}})

    def _rollouts(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[Rollout]:
        answer = self._post(prompt, params)
        try:
            rollouts = rollouts_from_vllm(answer, prompt_token_ids=np.asarray(prompt, np.int32))
        except (AttributeError, MaskError) as error:
            raise BackendError(f"{self._where}: an answer that cannot be used: {error}") from error
        if not rollouts:
            raise BackendError(f"{self._where}: an answer without choices")
        return rollouts


class SglangRoute:
    """SGLang's `POST /generate`. Raises BackendError where the server returns no masks."""

    unknown = frozenset({"allowed_token_ids", "bad_words"})
    _PATH = "/generate"
    _NAMES: Mapping[str, str] = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}

    def __init__(self, client: JsonClient, prompt: Sequence[int]) -> None:
        self._client = client
        self._where = f"{client.url}{self._PATH}"
        try:
            self.read(prompt, {})
        except NotFoundError as error:
            raise BackendError(
                f"{error}; give the server's address without a path, and --api vllm where it speaks "
                "/inference/v1/generate"
            ) from error
        except RefusedError as error:
            raise BackendError(f"{self._where}: refused a plain request: {error}; {_SGLANG}") from error

    def engine(self) -> str:
        """`/v1/models` tells whose the server is, `/server_info` which version."""
        return _engine(self._client, "/server_info")

    def draw(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[Drawn]:
        """The completions."""
        return [_drawn(self._where, rollout) for rollout in self._rollouts(prompt, params)]

    def read(self, prompt: Sequence[int], params: Mapping[str, Any]) -> dict[int, float]:
        """The support of a draw from the likeliest, with its log-probabilities."""
        mask = self._rollouts(prompt, {**_READ, **params})[0].sampling_mask
        if mask is None or not len(mask) or mask.logprobs is None:
            raise BackendError(f"{self._where}: answers without log-probabilities of the support; {_SGLANG}")
        return _likeliest(dict(zip(mask.ids.tolist(), mask.logprobs.tolist(), strict=True)))

    def word(self, token_ids: Sequence[int]) -> Word | None:
        """None: this route has no bad_words."""
        return None

    def _rollouts(self, prompt: Sequence[int], params: Mapping[str, Any]) -> list[Rollout]:
        renamed = {self._NAMES.get(name, name): value for name, value in params.items() if name != "n"}
        if renamed["top_k"] == 0:
            # SGLang's way to switch it off; masks with top_p or min_p alone it refuses, but for a top_k this wide
            renamed["top_k"] = _WIDEST if renamed["top_p"] < 1 or renamed["min_p"] > 0 else -1
        body = {
            "input_ids": [list(prompt)] * params["n"],  # n completions of one prompt are a 500 with masks
            "sampling_params": renamed,
            "return_sampling_mask": True,
            "sampling_logprobs_mode": "support",
        }
        answers = self._client.post(self._PATH, body)
        try:
            return [rollouts_from_sglang(one, prompt_token_ids=np.asarray(prompt, np.int32))[0] for one in answers]
        except (AttributeError, MaskError, TypeError) as error:
            raise BackendError(f"{self._where}: an answer that cannot be used: {error}") from error


def _engine(client: JsonClient, version_path: str) -> str:
    try:
        (owner, *_) = {model["owned_by"] for model in client.get("/v1/models")["data"]}
        return f"{owner} {client.get(version_path)['version']}"
    except (BackendError, KeyError, TypeError, ValueError):
        return ""


def _likeliest(logprobs: Mapping[int, float]) -> dict[int, float]:
    return dict(sorted(logprobs.items(), key=lambda item: -item[1]))


def _drawn(where: str, rollout: Rollout) -> Drawn:
    mask, num_tokens = rollout.sampling_mask, rollout.token_ids.size
    if mask is None or len(mask) != num_tokens:
        num_rows = 0 if mask is None else len(mask)
        raise BackendError(f"{where}: {num_rows} rows of sampling mask for {num_tokens} tokens; each token has its row")
    rows = [None if (row := mask.row(t)) is None else row.tolist() for t in range(num_tokens)]
    return Drawn(rollout.token_ids.tolist(), rows, rollout.finish_reason)
