"""Pausing, and updating weights over HTTP."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import safetensors.torch
import torch
from serving import Serving, events, until

import tiny
from keepmask import LLM
from keepmask.engine.weights import checksum

KEY = "trainer-key"
PROMPT = list(range(100, 148))
PARAMS: dict[str, Any] = {"max_tokens": 12, "top_k": 6, "seed": 3, "ignore_eos": True, "logprobs": 0}
LONG: dict[str, Any] = {**PARAMS, "max_tokens": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """Where the server may read weights from: two checkpoints of other weights."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        tiny.save(folder / f"step{seed}", "llama", seed=seed, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint: Path, folder: Path) -> Iterator[Serving]:
    with Serving(checkpoint, api_keys=(KEY,), enable_weight_updates=True, weights_dir=str(folder)) as serving:
        yield serving


@pytest.fixture
def serving(trained: Serving, checkpoint: Path) -> Iterator[Serving]:
    """A server with the weights it started with."""
    yield trained
    trained.client.post("/resume").raise_for_status()
    trained.settle()
    trained.client.post("/start_weight_update", json={"discard": True}).raise_for_status()
    push(trained, (checkpoint / "model.safetensors").read_bytes()).raise_for_status()
    trained.client.post("/finish_weight_update", json={"weight_version": "default"}).raise_for_status()


@pytest.fixture(scope="module")
def expected(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """What an engine loaded from each checkpoint draws."""
    found = {}
    for name, path in (("0", checkpoint), ("1", folder / "step1"), ("2", folder / "step2")):
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
        masks = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
        with Serving(path, engine={**options, **masks}) as serving:
            found[name] = draws(serving)
    return found


def push(serving: Serving, data: bytes) -> httpx.Response:
    headers = {"content-type": "application/octet-stream"}
    return serving.client.post("/update_weights", content=data, headers=headers)


def draws(serving: Serving, params: dict[str, Any] = PARAMS) -> Any:
    (choice,) = serving.generate(PROMPT, params=params).json()["choices"]
    return choice["token_ids"], choice["sampling_mask"]


def version(serving: Serving) -> str:
    found: str = serving.client.get("/weight_info").json()["weight_version"]
    return found


def checksums(serving: Serving) -> dict[str, str]:
    found: dict[str, str] = serving.client.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    return found


def aligned(choice: dict[str, Any]) -> None:
    assert len(choice["token_ids"]) == len(choice["sampling_mask"]) == len(choice["logprobs"]["content"])
    end = 0
    for span in choice["weight_versions"] or []:
        assert span["start"] == end < span["end"]
        end = span["end"]
    assert end == len(choice["token_ids"])


# The protocol


class WeightSyncClient:
    """The four calls of vLLM's weight-sync clients, as they make them: requests, and no header of ours."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        requests.post(f"{self.base_url}/{path}", json=body, timeout=60).raise_for_status()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})


def test_four_method_client_of_vllm_drives_an_update(serving: Serving, expected: dict[str, Any], folder: Path):
    client = WeightSyncClient(serving.url.replace("http://", f"http://trainer:{KEY}@"))
    assert draws(serving) == expected["0"]
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"path": "step1"})
    assert draws(serving) == expected["0"]
    client.finish_weight_update("step-1")
    assert draws(serving) == expected["1"]
    assert version(serving) == "step-1"
    client.start_weight_update()
    client.update_weights([{"path": str(folder / "step2" / "model.safetensors")}])
    client.finish_weight_update()
    assert draws(serving) == expected["2"]
    assert version(serving) == "step-1+1"
    without_key = WeightSyncClient(serving.url)
    with pytest.raises(requests.HTTPError, match="401"):
        without_key.start_weight_update()


def test_weights_come_in_the_body_in_parts(serving: Serving, expected: dict[str, Any], folder: Path):
    tensors = safetensors.torch.load_file(folder / "step1" / "model.safetensors")
    names = sorted(tensors)
    assert serving.client.post("/start_weight_update").json() == {"message": "Weight update started"}
    for start in range(0, len(names), 5):
        part = {name: tensors[name] for name in names[start : start + 5]}
        answer = push(serving, safetensors.torch.save(part)).json()
        assert answer["missing"] == max(0, len(names) - start - 5)
    answer = serving.client.post("/finish_weight_update", json={"weight_version": "7"}).json()
    assert answer == {"message": "Weight update finished", "weight_version": "7"}
    assert draws(serving) == expected["1"]


def test_calls_out_of_order_are_409(serving: Serving):
    assert push(serving, b"").status_code == 409
    assert serving.client.post("/finish_weight_update").status_code == 409
    assert serving.client.post("/start_weight_update").status_code == 200
    again = serving.client.post("/start_weight_update")
    assert again.status_code == 409
    assert "discard" in again.json()["error"]["message"]
    assert serving.client.post("/start_weight_update", json={"discard": True}).status_code == 200


def test_failed_update_leaves_weights_version_and_draws(serving: Serving, expected: dict[str, Any], folder: Path):
    tensors = safetensors.torch.load_file(folder / "step1" / "model.safetensors")
    before = checksums(serving)
    serving.client.post("/start_weight_update").raise_for_status()
    wrong = {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1], "surplus": torch.ones(2)}
    refused = push(serving, safetensors.torch.save(wrong))
    assert refused.status_code == 400
    for part in ("model.norm.weight: shape [63] instead of [64]", "surplus: the model has no such weight"):
        assert part in refused.json()["error"]["message"]
    assert push(serving, b"\x80\x04K\x01.").status_code == 400  # a pickle
    halves = {name: tensors[name] for name in sorted(tensors)[:10]}
    push(serving, safetensors.torch.save(halves)).raise_for_status()
    unfinished = serving.client.post("/finish_weight_update", json={"weight_version": "new"})
    assert unfinished.status_code == 400
    assert "tensors are missing" in unfinished.json()["error"]["message"]
    assert checksums(serving) == before
    assert version(serving) == "default"
    assert draws(serving) == expected["0"]
    rest = {name: tensors[name] for name in sorted(tensors)[10:]}
    push(serving, safetensors.torch.save(rest)).raise_for_status()
    serving.client.post("/finish_weight_update").raise_for_status()
    assert draws(serving) == expected["1"]


def test_swap_that_breaks_is_undone_and_answered_500(
    serving: Serving, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    copy, calls = torch.Tensor.copy_, 0

    def breaking(target: torch.Tensor, source: torch.Tensor, *options: bool) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError("none left")
        return copy(target, source, *options)

    before = checksums(serving)
    serving.client.post("/start_weight_update").raise_for_status()
    serving.client.post("/update_weights", json={"update_info": {"path": "step1"}}).raise_for_status()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", breaking)
        failed = serving.client.post("/finish_weight_update", json={"weight_version": "1"})
    assert failed.status_code == 500
    assert "none left" not in failed.text
    assert checksums(serving) == before
    assert version(serving) == "default"
    assert draws(serving) == expected["0"]
    serving.client.post("/finish_weight_update", json={"weight_version": "1"}).raise_for_status()
    assert draws(serving) == expected["1"]


def test_checksums_of_the_sender_are_held_against_what_arrived(serving: Serving, folder: Path, checkpoint: Path):
    start = checksums(serving)
    serving.client.post("/start_weight_update").raise_for_status()
    serving.client.post("/update_weights", json={"update_info": {"path": "step1"}}).raise_for_status()
    refused = serving.client.post("/finish_weight_update", json={"checksums": start})
    assert refused.status_code == 400
    assert "another checksum" in refused.json()["error"]["message"]
    assert checksums(serving) == start
    other = LLM(str(folder / "step1"), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=2**22)
    right = other.engine.weight_checksums()
    serving.client.post("/finish_weight_update", json={"checksums": right}).raise_for_status()
    assert checksums(serving) == right


def test_partial_and_cast_updates_must_be_asked_for(serving: Serving, folder: Path):
    tensors = safetensors.torch.load_file(folder / "step1" / "model.safetensors")
    one = safetensors.torch.save({"model.norm.weight": tensors["model.norm.weight"].bfloat16()})
    serving.client.post("/start_weight_update").raise_for_status()
    assert "bfloat16 instead of float32" in push(serving, one).json()["error"]["message"]
    serving.client.post("/start_weight_update", json={"discard": True, "partial": True, "cast": True})
    assert push(serving, one).json()["missing"] == 0
    serving.client.post("/finish_weight_update").raise_for_status()


def test_checker_compares_and_overwrites(serving: Serving):
    baseline = checksums(serving)

    def compare(**body: Any) -> Any:
        return serving.client.post("/weight_checker", json={"action": "compare", "baseline": baseline, **body}).json()

    assert compare() == {"match": True, "mismatches": []}
    changed = {**baseline, "model.norm.weight": "0", "other": "0"}
    assert compare(baseline=changed) == {"match": False, "mismatches": ["model.norm.weight", "other"]}
    assert serving.client.post("/weight_checker", json={"action": "compare"}).status_code == 400
    assert serving.client.post("/weight_checker", json={"action": "reset"}).json() == {"status": "reset"}
    noise = compare()
    assert not noise["match"]
    assert noise["mismatches"] == sorted(baseline)
    assert version(serving) == "default+random"


def test_weights_can_be_renamed(serving: Serving):
    answer = serving.client.post("/update_weight_version", json={"new_version": "v2"}).json()
    assert answer == {"success": True, "new_version": "v2"}
    (choice,) = serving.generate(PROMPT, params=PARAMS).json()["choices"]
    assert choice["weight_versions"] == [{"start": 0, "end": 12, "version": "v2"}]
    assert serving.client.get("/get_world_size").json() == {"world_size": 1}
    assert serving.client.get("/get_world_size", params={"include_dp": "false"}).json() == {"world_size": 1}


# Files


def test_nothing_outside_the_folder_is_read(serving: Serving, folder: Path, checkpoint: Path):
    secret = checkpoint / "model.safetensors"
    (folder / "link.safetensors").symlink_to(secret)
    (folder / "linked").symlink_to(checkpoint)
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    (folder / "empty").mkdir()
    serving.client.post("/start_weight_update").raise_for_status()
    paths = [
        str(secret),
        str(checkpoint),
        "../" + secret.parent.name,
        f"step1/../../{checkpoint.name}",
        "link.safetensors",
        "linked",
        "linked/model.safetensors",
        "pipe.safetensors",
        "folder.safetensors",
        "empty",
        "nothing",
        "step1/config.json",
        "/",
        "/etc/passwd",
        str(folder) + "x",
        "a\0b",
        "~",
        "%2e%2e/x",
    ]
    for path in paths:
        answer = serving.client.post("/update_weights", json={"update_info": {"path": path}})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == "path", path
    for name in ("link.safetensors", "linked", "pipe.safetensors"):
        (folder / name).unlink()
    for name in ("folder.safetensors", "empty"):
        (folder / name).rmdir()


def test_folder_may_be_given_relative_to_where_the_server_started(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent)
    options: dict[str, Any] = {"api_keys": (KEY,), "enable_weight_updates": True, "weights_dir": folder.name}
    with Serving(checkpoint, **options) as serving:
        for path in ("step1", str(folder / "step1"), str(folder / "step1" / "model.safetensors")):
            serving.client.post("/start_weight_update", json={"discard": True}).raise_for_status()
            taken = serving.client.post("/update_weights", json={"update_info": {"path": path}})
            assert taken.json() == {"message": "Weights updated", "missing": 0}
        outside = serving.client.post("/update_weights", json={"update_info": {"path": str(checkpoint)}})
        assert outside.status_code == 400


def test_bodies_of_weights_have_a_limit_of_their_own(checkpoint: Path):
    options: dict[str, Any] = {"api_keys": (KEY,), "enable_weight_updates": True}
    with Serving(checkpoint, max_weight_chunk_bytes=1000, max_body_bytes=100, **options) as serving:
        serving.client.post("/start_weight_update").raise_for_status()
        part = safetensors.torch.save({"model.norm.weight": torch.ones(64)})
        assert push(serving, part).json() == {"message": "Weights updated", "missing": 20}
        assert push(serving, part + bytes(1000)).status_code == 413
        files = serving.client.post("/update_weights", json={"update_info": {"path": "x"}})
        assert files.status_code == 403
        assert "--weights-dir" in files.json()["error"]["message"]


def test_control_is_off_unless_enabled(checkpoint: Path):
    with Serving(checkpoint, api_keys=(KEY,)) as serving:
        document = serving.client.get("/openapi.json").json()
        control = [path for path, item in document["paths"].items() if "control" in next(iter(item.values()))["tags"]]
        assert {"/pause", "/update_weights", "/weight_checker", "/abort_requests"} <= set(control)
        for path in control:
            for method in document["paths"][path]:
                answer = serving.client.request(method, path)
                assert answer.status_code == 403, path
                assert "--enable-weight-updates" in answer.json()["error"]["message"]


def test_tensors_of_several_places_are_applied_once_each_or_not_at_all(serving: Serving, folder: Path):
    tensors = safetensors.torch.load_file(folder / "step1" / "model.safetensors")
    names = sorted(tensors)
    half, rest = ({name: tensors[name] for name in part} for part in (names[::2], names[1::2]))
    for place, part in (("a", half), ("b", rest), ("c", tensors)):
        (folder / "parts" / place).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(part, folder / "parts" / place / "model.safetensors")

    def send(*places: str) -> httpx.Response:
        info = [{"path": f"parts/{place}"} for place in places]
        return serving.client.post("/update_weights", json={"update_info": info})

    before = checksums(serving)
    serving.client.post("/start_weight_update").raise_for_status()
    refused = send("a", "c")
    assert refused.status_code == 400
    assert "is in parts/a/model.safetensors and in parts/c/model.safetensors; give it once" in refused.text
    assert send("a", "b").json()["missing"] == 0
    assert checksums(serving) == before
    serving.client.post("/finish_weight_update").raise_for_status()
    after = checksums(serving)
    assert all(after[name] == checksum(tensor) for name, tensor in tensors.items())


def test_index_of_a_folder_says_what_is_read(serving: Serving, folder: Path):
    tensors = safetensors.torch.load_file(folder / "step2" / "model.safetensors")
    place = folder / "indexed"
    place.mkdir()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in files.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, place / file)
    left_over = {name: tensor + 7 for name, tensor in tensors.items()}
    safetensors.torch.save_file(left_over, place / "model-0.safetensors")
    index = {name: file for file, part in files.items() for name in part}

    def update(**changes: str) -> httpx.Response:
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index, **changes}}))
        return serving.client.post("/update_weights", json={"weight_dir": "indexed"})

    for changes, says in (
        ({names[0]: "model-2.safetensors"}, names[0]),
        ({"no.such": "model-2.safetensors"}, "no.such"),
        ({names[0]: "../model-1.safetensors"}, "is no file beside it"),
        ({names[0]: "model-9.safetensors"}, "No such file"),
    ):
        refused = update(**changes)
        assert refused.status_code == 400
        assert says in refused.text
    answer = update()
    assert answer.status_code == 200, answer.text
    assert answer.json()["weight_version"] == version(serving)
    after = checksums(serving)
    assert all(after[name] == checksum(tensor) for name, tensor in tensors.items())


def test_names_of_sglang_for_pausing_and_updating(serving: Serving):
    client = serving.client
    assert client.post("/pause_generation", json={"mode": "in_place"}).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/health_generate").status_code == 200
    body = {"model_path": "step1", "weight_version": "w1", "flush_cache": True}
    assert client.post("/update_weights_from_disk", json=body).json()["success"] is True
    assert client.get("/get_weight_version").json()["weight_version"] == "w1"
    assert client.post("/continue_generation").status_code == 200
    assert client.get("/flush_cache").status_code == 200
    assert client.get("/health_generate").status_code == 200
    info = client.get("/server_info", params={"config_format": "json"}).json()
    assert info["weight_version"] == "w1"
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"


def test_older_name_of_the_waiting_pause(serving: Serving):
    client = serving.client
    assert client.post("/pause?wait_for_inflight_requests=true").json() == {"status": "paused"}
    client.post("/resume").raise_for_status()
    assert client.post("/pause?wait_for_inflight_requests=true&mode=keep").status_code == 400


def test_restarted_worker_serves_nothing_before_its_weights_are_back(checkpoint: Path, folder: Path):
    options: dict[str, Any] = {"api_keys": (KEY,), "enable_weight_updates": True, "weights_dir": str(folder)}
    with Serving(checkpoint, await_weights=True, **options) as serving:
        assert serving.client.get("/health").status_code == 200
        refused = serving.generate(PROMPT, params=PARAMS)
        assert refused.status_code == 503
        assert "waits for its weights" in refused.json()["error"]["message"]
        assert serving.client.get("/weight_info").json() == {"weight_version": "default", "awaited": True}
        serving.client.post("/start_weight_update").raise_for_status()
        serving.client.post("/update_weights", json={"update_info": {"path": "step1"}}).raise_for_status()
        assert serving.generate(PROMPT, params=PARAMS).status_code == 503
        serving.client.post("/finish_weight_update", json={"weight_version": "41"}).raise_for_status()
        assert serving.client.get("/weight_info").json() == {"weight_version": "41", "awaited": False}
        assert serving.generate(PROMPT, params=PARAMS).status_code == 200


def test_trainer_killed_in_the_middle_of_an_update_changes_nothing(
    serving: Serving, expected: dict[str, Any], folder: Path
):
    before = checksums(serving)
    data = (folder / "step1" / "model.safetensors").read_bytes()
    serving.client.post("/start_weight_update").raise_for_status()
    head = [
        "POST /update_weights HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/octet-stream",
        f"Content-Length: {len(data)}",
    ]
    with socket.create_connection(("127.0.0.1", serving.port), timeout=20) as trainer:
        trainer.sendall("\r\n".join([*head, "", ""]).encode() + data[: len(data) // 2])
        assert draws(serving) == expected["0"]  # nobody waits for the rest
        # The end of a process: what it had not read or sent is gone, and its connections are reset.
        trainer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert checksums(serving) == before
    assert version(serving) == "default"
    assert draws(serving) == expected["0"]
    assert serving.client.post("/finish_weight_update").status_code == 400
    # The trainer that takes its place begins anew.
    serving.client.post("/start_weight_update", json={"discard": True}).raise_for_status()
    push(serving, data).raise_for_status()
    serving.client.post("/finish_weight_update").raise_for_status()
    assert draws(serving) == expected["1"]


# Pausing


def test_weights_changed_in_mid_generation_split_the_span_at_the_exact_token(
    serving: Serving, expected: dict[str, Any], folder: Path
):
    with serving.slowed():
        running = serving.in_background(lambda: serving.generate(PROMPT, params=LONG).json())
        until(lambda: serving.engine.stats().num_generated_tokens and serving.engine.num_unfinished)
        assert serving.client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert serving.client.get("/is_paused").json() == {"is_paused": True}
        before = serving.engine.stats().num_steps
        serving.client.post("/start_weight_update").raise_for_status()
        serving.client.post("/update_weights", json={"update_info": {"path": "step1"}}).raise_for_status()
        serving.client.post("/finish_weight_update", json={"weight_version": "1"}).raise_for_status()
        assert serving.engine.stats().num_steps == before
        assert serving.client.post("/resume").json() == {"status": "resumed"}
    (choice,) = running.result()["choices"]
    aligned(choice)
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "1")
    long = {**LONG, "max_tokens": first["end"]}
    assert draws(serving, PARAMS) == expected["1"]
    with Serving(serving.engine.config.model, engine={"skip_tokenizer_init": True}) as untouched:
        tokens, rows = draws(untouched, long)
    assert choice["token_ids"][: first["end"]] == tokens
    assert choice["sampling_mask"][: first["end"]] == rows


def test_waiting_pause_lets_requests_end_and_holds_new_ones(serving: Serving):
    with serving.slowed(0.01):
        running = serving.in_background(lambda: serving.generate(PROMPT, params={**LONG, "max_tokens": 60}).json())
        until(lambda: serving.engine.num_unfinished)
        pausing = serving.in_background(lambda: serving.client.post("/pause", params={"mode": "wait"}).json())
        until(lambda: serving.client.get("/is_paused").json()["is_paused"])
        held = serving.in_background(lambda: serving.generate(PROMPT, params=PARAMS).json())
        assert pausing.result() == {"status": "paused"}
        (choice,) = running.result()["choices"]
        assert choice["finish_reason"] == "length"
    until(lambda: len(serving.service.tickets()) == 1)
    assert serving.engine.stats().num_running == 0
    serving.client.post("/resume").raise_for_status()
    (choice,) = held.result()["choices"]
    assert len(choice["token_ids"]) == 12


def test_aborting_pause_answers_with_what_there_is(serving: Serving):
    with serving.slowed():
        stream = serving.open_stream({"token_ids": PROMPT, "sampling_params": LONG, "stream": True})
        stream.read_events(2)
        running = serving.in_background(lambda: serving.generate(PROMPT, params=LONG).json())
        until(lambda: len(serving.service.tickets()) == 2)
        assert serving.client.post("/pause").json() == {"status": "paused"}
        (choice,) = running.result()["choices"]
        assert choice["finish_reason"] == "abort"
        aligned(choice)
        received = events(stream.read_all())
        assert received[-1]["choices"][0]["finish_reason"] == "abort"
        stream.close()
    later = serving.in_background(lambda: serving.generate(PROMPT, params=PARAMS))
    until(lambda: serving.service.tickets())
    serving.client.post("/resume").raise_for_status()
    assert later.result().status_code == 200


def test_request_may_be_aborted_or_left_while_paused(serving: Serving):
    serving.client.post("/pause", params={"mode": "keep"}).raise_for_status()
    asked = serving.in_background(lambda: serving.generate(PROMPT, params=PARAMS, request_id="frozen").json())
    until(lambda: serving.service.tickets(["frozen"]))
    stream = serving.open_stream({"token_ids": PROMPT, "sampling_params": LONG, "request_id": "left"})
    until(lambda: serving.service.tickets(["left"]))
    stream.close()
    until(lambda: not serving.service.tickets(["left"]))
    serving.client.post("/abort_requests", json={"request_ids": ["frozen"]}).raise_for_status()
    (choice,) = asked.result()["choices"]
    assert (choice["finish_reason"], choice["token_ids"], choice["sampling_mask"]) == ("abort", [], [])
    assert serving.engine.num_unfinished == 0


def test_request_held_by_a_waiting_pause_can_be_aborted(serving: Serving):
    with serving.slowed():
        running = serving.in_background(lambda: serving.generate(PROMPT, params={**LONG, "max_tokens": 50}))
        until(lambda: serving.engine.num_unfinished)
        pausing = serving.in_background(lambda: serving.client.post("/pause", params={"mode": "wait"}))
        until(lambda: serving.service.engine.holding)
        held = serving.in_background(lambda: serving.generate(PROMPT, params=PARAMS, request_id="held").json())
        until(lambda: serving.service.tickets(["held"]))
        serving.client.post("/abort_requests", json={"request_ids": ["held"]}).raise_for_status()
        assert held.result()["choices"][0]["finish_reason"] == "abort"
        assert running.result().status_code == pausing.result().status_code == 200


def test_resumption_ends_a_pause_that_still_waits(serving: Serving):
    with serving.slowed():
        running = serving.in_background(lambda: serving.generate(PROMPT, params={**LONG, "max_tokens": 50}))
        until(lambda: serving.engine.num_unfinished)
        pausing = serving.in_background(lambda: serving.client.post("/pause", params={"mode": "wait"}))
        until(lambda: serving.service.engine.holding)
        serving.client.post("/resume").raise_for_status()
        assert pausing.result().status_code == 409
        assert running.result().status_code == 200


def test_all_requests_can_be_aborted_at_once(serving: Serving):
    with serving.slowed():
        asked = [serving.in_background(lambda: serving.generate(PROMPT, params=LONG).json()) for _ in range(3)]
        until(lambda: len(serving.service.tickets()) == 3)
        assert serving.client.post("/abort_requests").json() == {"status": "aborted", "aborted": 3}
        for each in asked:
            (choice,) = each.result()["choices"]
            assert choice["finish_reason"] == "abort"
            aligned(choice)


def test_prefix_cache_is_forgotten_when_asked_and_when_pausing(serving: Serving):
    def cached() -> int:
        answer = serving.generate(PROMPT, params=PARAMS).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    serving.client.post("/reset_prefix_cache").raise_for_status()
    assert (cached(), cached()) == (0, 32)
    serving.client.post("/reset_prefix_cache").raise_for_status()
    assert (cached(), cached()) == (0, 32)
    for params, found in (
        ({"mode": "abort"}, 0),
        ({"mode": "wait"}, 0),
        ({"mode": "keep"}, 32),
        ({"mode": "abort", "clear_cache": "false"}, 32),
    ):
        serving.client.post("/pause", params=params).raise_for_status()
        serving.client.post("/resume").raise_for_status()
        assert cached() == found


@pytest.mark.parametrize(
    ("path", "query"), [("/pause", "mode=stop"), ("/pause", "clear_cache=1"), ("/pause", "x=1"), ("/resume", "x=1")]
)
def test_unknown_queries_are_refused(serving: Serving, path: str, query: str):
    answer = serving.client.post(f"{path}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert not serving.service.engine.paused


def test_drain_while_paused_ends_what_cannot_go_on(checkpoint: Path):
    with Serving(checkpoint, api_keys=(KEY,), enable_weight_updates=True) as serving:
        serving.client.post("/pause", params={"mode": "keep"}).raise_for_status()
        asked = serving.in_background(lambda: serving.generate(PROMPT, params=PARAMS).json())
        until(lambda: serving.service.tickets())
        serving.server.should_exit = True
        assert asked.result()["choices"][0]["finish_reason"] == "abort"
