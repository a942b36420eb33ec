"""The clients of vLLM's and SGLang's servers: what they send, and what becomes of answers recorded of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peer_answers import load
from peer_requests import sglang_requests, vllm_requests

from keepmask import BackendError, ConfigError, RequestError, SamplingParams
from keepmask.backends.base import Rollouts
from keepmask.backends.peer_rollouts_http import PeerRollouts
from keepmask.backends.rollout_pool import PoolMember
from keepmask.backends.sglang_rollouts import SglangRollouts
from keepmask.backends.vllm_rollouts import VllmRollouts

RECORDED = Path(__file__).parents[1] / "peers" / "recorded"
PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=3, top_k=3, logit_bias={72: 90.0}, seed=7, logprobs=0)


class Peer(ThreadingHTTPServer):
    """Answers by path, from `answers`; keeps the bodies of requests in `asked`."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            server: Peer

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "null")
                self.server.asked.append((self.path, body))
                self.answer(body)

            def do_GET(self) -> None:
                self.answer(None)

            def answer(self, body: Any) -> None:
                answer = self.server.answers.get(self.path, {})
                answer = answer(body) if callable(answer) else answer
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    thread = Thread(target=peer.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield peer
    peer.shutdown()
    thread.join()
    peer.server_close()


def recorded(peer: str, name: str, setting: str) -> dict[str, Any]:
    table = vllm_requests() if peer.startswith("vllm") else sglang_requests()
    for asked, answer in load(RECORDED / f"{peer}.jsonl.gz", table).answers:
        if asked.name == name and asked.setting == setting:
            assert answer.status == 200
            return answer.body
    raise LookupError(name)


def vllm_answer(
    token: int = 72, row: list[int] | None = None, *, count: int = 1, logprob: float = 0.0
) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": logprob}]
    choice = {
        "token_ids": [token],
        "sampling_mask": [row or [token]],
        "finish_reason": "length",
        "logprobs": {"content": content},
    }
    return {"request_id": "r", "choices": [{**choice, "index": index} for index in range(count)]}


def sglang_answer(token: int = 72) -> dict[str, Any]:
    meta = {
        "id": "0",
        "finish_reason": {"type": "length", "length": 1},
        "output_token_sampling_mask": [[token]],
        "output_token_sampling_mask_length": 1,
        "output_token_sampling_logprobs": [0.0],
    }
    return {"text": "f", "output_ids": [token], "meta_info": meta}


@pytest.fixture
def vllm(peer: Peer) -> Iterator[VllmRollouts]:
    peer.answers = {"/inference/v1/generate": vllm_answer()}
    with VllmRollouts(f"http://127.0.0.1:{peer.server_port}") as backend:
        yield backend


@pytest.fixture
def sglang(peer: Peer) -> Iterator[SglangRollouts]:
    peer.answers = {"/generate": lambda body: [sglang_answer() for _ in body["input_ids"]]}
    with SglangRollouts(f"http://127.0.0.1:{peer.server_port}") as backend:
        yield backend


def test_both_are_backends_that_a_pool_takes(vllm: VllmRollouts, sglang: SglangRollouts):
    vllm._server.get = sglang._server.get = lambda _: {"weight_version": "default"}  # type: ignore[method-assign]
    for backend in (vllm, sglang):
        assert isinstance(backend, Rollouts)
        assert isinstance(backend, PoolMember)


def test_vllms_recorded_answer_becomes_rollouts(peer: Peer, vllm: VllmRollouts):
    vllm.check_server()
    answer = recorded("vllm-0.32.0", "/inference/v1/generate sampling_params.n=2", "masks")
    peer.answers["/inference/v1/generate"] = answer
    rollouts = vllm.generate(PROMPT, PARAMS.replace(n=2))
    for rollout, choice in zip(rollouts, answer["choices"], strict=True):
        assert rollout.token_ids.tolist() == choice["token_ids"] == [72, 72, 72]
        assert rollout.sampling_mask is not None
        assert rollout.sampling_mask.token_ids == [sorted(row) for row in choice["sampling_mask"]]
        assert rollout.prompt_token_ids.tolist() == PROMPT
        assert (rollout.seed, rollout.completion_index, rollout.finish_reason) == (7, choice["index"], "length")
        assert SamplingParams(**rollout.sampling_params) == PARAMS.replace(n=2)
        assert [tuple(span) for span in rollout.weight_versions] == [(0, 3, "default")]


def test_sglangs_recorded_answer_becomes_rollouts(peer: Peer, sglang: SglangRollouts):
    sglang.check_server()
    answer = recorded("sglang-0.5.23", "/generate mask, support, top_k", "plain")
    peer.answers["/generate"] = lambda body: [answer for _ in body["input_ids"]]
    rollouts = sglang.generate(PROMPT, PARAMS.replace(n=2), request_id="mine")
    assert [rollout.completion_index for rollout in rollouts] == [0, 1]
    for rollout in rollouts:
        rows = answer["meta_info"]["output_token_sampling_mask"]
        assert rollout.sampling_mask is not None
        assert rollout.sampling_mask.token_ids == [sorted(row) for row in rows]
        assert rollout.token_ids.tolist() == [72, 72, 72]
        assert rollout.logprobs is not None
        np.testing.assert_allclose(rollout.logprobs, 0, atol=1e-6)
        assert (rollout.request_id, rollout.seed) == ("mine", 7)


def test_vllm_is_sent_every_parameter(peer: Peer, vllm: VllmRollouts):
    vllm.generate(PROMPT, SamplingParams(top_k=9), request_id="mine")
    path, body = peer.asked[-1]
    assert (path, body["request_id"], body["token_ids"]) == ("/inference/v1/generate", "mine", PROMPT)
    sent = body["sampling_params"]
    filled_in = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 16,
    }
    assert filled_in.items() <= sent.items()
    ours_alone = {"return_sampling_mask", "return_sampling_mask_logprobs", "sampling_semantics"}
    assert set(sent) == set(SamplingParams.model_fields) - ours_alone


def test_sglang_is_sent_every_parameter_and_copies(peer: Peer, sglang: SglangRollouts):
    sglang.generate(PROMPT, PARAMS.replace(n=3, temperature=0.5, stop=["x"], min_tokens=2), request_id="mine")
    _, body = peer.asked[-1]
    assert body["input_ids"] == [PROMPT] * 3
    assert body["rid"] == ["mine-0", "mine-1", "mine-2"]
    assert body["return_sampling_mask"] == body["return_logprob"] == [True] * 3
    first, *others = body["sampling_params"]
    assert [first["sampling_seed"], *(each["sampling_seed"] for each in others)] == [7, 8, 9]
    expected = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_new_tokens": 3,
        "min_new_tokens": 2,
        "stop": ["x"],
        "logit_bias": {"72": 90.0},
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": False,
    }
    assert expected.items() <= first.items()
    sglang.generate(PROMPT, PARAMS.replace(temperature=0.0, top_k=0))
    assert peer.asked[-1][1]["sampling_params"][0]["top_k"] == 1


def test_sglang_ends_each_copy_of_a_request(peer: Peer, sglang: SglangRollouts):
    sglang.check_server()
    ended: list[str] = []
    all_ended = Event()

    def generate(body: Any) -> Any:
        if body["input_ids"][0] == PROMPT:  # the one that goes on until it is ended
            assert all_ended.wait(20)
        return [sglang_answer() for _ in body["input_ids"]]

    def abort(body: Any) -> None:
        ended.append(body["rid"])
        if len(ended) == 3:
            all_ended.set()

    peer.answers = {"/generate": generate, "/abort_request": abort}
    stream = sglang.rollouts_as_finished([PROMPT, [1]], PARAMS.replace(n=3))
    assert next(stream)[0] == 1
    stream.close()  # type: ignore[attr-defined]
    (sent,) = [body["rid"] for path, body in peer.asked if path == "/generate" and body["input_ids"][0] == PROMPT]
    assert ended == sent


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"sampling_semantics": "hf"}, "sampling_semantics"),
    ],
)
def test_what_vllm_keeps_no_masks_of_is_refused_unsent(peer: Peer, vllm: VllmRollouts, changes: Any, param: str):
    with pytest.raises(RequestError, match=param) as error:
        vllm.generate(PROMPT, PARAMS.replace(**changes))
    assert error.value.param == param
    assert not peer.asked


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_k": 0, "top_p": 0.9}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"allowed_token_ids": [5, 6]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_sglang_has_not_is_refused_unsent(peer: Peer, sglang: SglangRollouts, changes: Any, param: str):
    with pytest.raises(RequestError, match=param) as error:
        sglang.generate(PROMPT, PARAMS.replace(**changes))
    assert error.value.param == param
    assert not peer.asked
    assert sglang.resolved_params(PROMPT, PARAMS.replace(bad_words=[])) == PARAMS.replace(bad_words=[])


def test_settings_are_checked_once_before_the_first_request(peer: Peer, vllm: VllmRollouts):
    found = dict(vllm.rollouts_as_finished([PROMPT, [1]], PARAMS))
    assert sorted(found) == [0, 1]
    probes = [body for _, body in peer.asked if body["sampling_params"]["top_k"] == 1]
    assert len(probes) == 1
    assert peer.asked[0][1] == probes[0]


def test_a_server_of_raw_log_probs_or_without_masks_is_refused(peer: Peer, vllm: VllmRollouts):
    peer.answers["/inference/v1/generate"] = vllm_answer(logprob=-1.5)
    with pytest.raises(ConfigError, match=r"-1.5, not 0.*processed_logprobs"):
        vllm.generate(PROMPT, PARAMS)
    masked = vllm_answer()
    masked["choices"][0]["sampling_mask"] = None
    peer.answers["/inference/v1/generate"] = masked
    with pytest.raises(ConfigError, match="--return-sampling-mask"):
        vllm.generate(PROMPT, PARAMS)
    assert all(body["sampling_params"]["top_k"] == 1 for _, body in peer.asked)  # no request was sent


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (vllm_answer(72, [5, 71]), "token 72 at position 0 is outside its row"),
        (vllm_answer() | {"choices": []}, "0 completions for n=1"),
        (vllm_answer(count=2), "2 completions for n=1"),
        ({"choices": [vllm_answer()["choices"][0] | {"sampling_mask": [[72], [72]]}]}, "2 rows for 1 tokens"),
        ({"choices": [vllm_answer()["choices"][0] | {"sampling_mask": [[3, 3]]}]}, "cannot be read"),
        ({}, "cannot be read"),
    ],
)
def test_masks_that_do_not_fit_are_refused(peer: Peer, vllm: VllmRollouts, answer: Any, message: str):
    vllm.check_server()
    peer.answers["/inference/v1/generate"] = answer
    with pytest.raises(BackendError, match=message):
        vllm.generate(PROMPT, PARAMS)


def test_temperatures_are_resolved_as_vllm_does(peer: Peer, vllm: VllmRollouts):
    peer.answers["/v1/models"] = {"data": [{"max_model_len": 512}]}
    assert vllm.resolved_params(PROMPT, PARAMS.replace(temperature=0.001)).temperature == 0.01
    assert vllm.resolved_params(PROMPT, PARAMS.replace(max_tokens=None)).max_tokens == 508
    assert vllm.resolved_params(PROMPT, PARAMS) == PARAMS


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_cross_as_a_file_that_the_server_loads(kind: str, peer: Peer, tmp_path: Path):
    loaded: dict[str, Any] = {"version": "default"}

    def load_from(folder: str) -> None:
        loaded.update(safetensors.torch.load_file(Path(folder) / "model.safetensors"))

    def name(version: str) -> dict[str, Any]:
        loaded["version"] = version
        return {"success": True}

    peer.answers = {
        "/collective_rpc": lambda body: load_from(body["kwargs"]["weights_path"]),
        "/update_weight_version": lambda body: name(body["new_version"]),
        "/update_weights_from_disk": lambda body: load_from(body["model_path"]) or name(body["weight_version"]),
    }
    for told in ("/weight_info", "/model_info"):
        peer.answers[told] = lambda _: {"weight_version": loaded["version"]}
    cls: type[PeerRollouts] = {"vllm": VllmRollouts, "sglang": SglangRollouts}[kind]  # type: ignore[assignment]
    url, shared = f"http://127.0.0.1:{peer.server_port}", torch.ones(2)
    with cls(url, weights_folder=tmp_path) as backend:
        assert backend.update_weights({"a": shared}) == "1"
        assert backend.update_weights({"a": shared, "b": shared, "c": torch.zeros(3).bfloat16()}, version="5") == "5"
        assert backend.update_weights({"a": shared, "c": loaded["c"]}) == "6" == backend.weight_version
        assert sorted(loaded) == ["a", "c", "version"]
        assert loaded["c"].dtype == torch.bfloat16
        assert not list(tmp_path.iterdir())
        peer.answers["/weight_info"] = peer.answers["/model_info"] = {"weight_version": "6"}
        with pytest.raises(BackendError, match="'6' after an update to '7'"):
            backend.update_weights({"a": shared})
    with cls(url) as backend, pytest.raises(ConfigError, match="weights_folder"):
        backend.update_weights({"a": shared})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_against_the_real_server(kind: str, tmp_path: Path):
    """At KEEPMASK_VLLM_URL or KEEPMASK_SGLANG_URL (scripts/peers serve), with the model in KEEPMASK_PEER_MODEL."""
    url = os.environ.get(f"KEEPMASK_{kind.upper()}_URL")
    if url is None:
        pytest.skip(f"KEEPMASK_{kind.upper()}_URL: not set, so there is no server to ask")
    cls: type[PeerRollouts] = {"vllm": VllmRollouts, "sglang": SglangRollouts}[kind]  # type: ignore[assignment]
    old = safetensors.torch.load_file(Path(os.environ["KEEPMASK_PEER_MODEL"]) / "model.safetensors")
    params = SamplingParams(n=2, max_tokens=6, top_k=6, ignore_eos=True, logprobs=0, seed=7)
    with cls(url, weights_folder=tmp_path) as backend:

        def rows() -> list[list[int]]:  # of first tokens, which no draw changes
            found = backend.rollouts([PROMPT, [9, 10]], params)
            for rollout in [each for rollouts in found for each in rollouts]:
                assert rollout.sampling_mask is not None
                assert rollout.sampling_mask.counts.tolist() == [6] * 6
                assert rollout.logprobs is not None
                assert (rollout.logprobs < 0).all()
            assert [len(rollouts) for rollouts in found] == [2, 2]
            return [rollouts[0].sampling_mask.row(0).tolist() for rollouts in found]  # type: ignore[union-attr]

        backend.update_weights(old, version="old")
        before, sums = rows(), backend.weight_checksums()
        assert backend.update_weights({name: -value for name, value in old.items()}, version="negated") == "negated"
        assert rows() != before
        assert backend.weight_checksums() != sums
        backend.update_weights(old, version="again")
        assert rows() == before
        assert backend.weight_checksums() == sums
        order = [
            at for at, _ in backend.rollouts_as_finished([PROMPT] * 2, [params.replace(max_tokens=m) for m in (200, 1)])
        ]
        assert order == [1, 0]
        stream = backend.rollouts_as_finished([PROMPT] * 2, [params.replace(max_tokens=m) for m in (400, 1)])
        assert next(stream)[0] == 1
        stream.close()  # type: ignore[attr-defined]
