"""Requests, aborts, pauses and weight updates in any order: what comes back is always whole and aligned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from serving import Background, RawStream, Serving, events

KEY = "key"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def house(checkpoint: Path) -> Iterator[Serving]:
    """A small one: few places and few blocks, so that requests wait and give up their place."""
    engine = {"max_num_seqs": 3, "kv_cache_memory_bytes": 12 * 16384, "max_model_len": 64}
    with Serving(checkpoint, engine=engine, api_keys=(KEY,), enable_weight_updates=True) as serving:
        yield serving


def check_choice(chunks: list[dict[str, Any]], versions: list[str]) -> None:
    """The chunks of one completion, or the one choice of a whole answer, keep every rule of alignment."""
    tokens, rows, logprobs = 0, 0, 0
    for chunk in chunks:
        assert len(chunk["token_ids"]) == len(chunk["sampling_mask"]) == len(chunk["logprobs"]["content"])
        for token_id, row, entry in zip(
            chunk["token_ids"], chunk["sampling_mask"], chunk["logprobs"]["content"], strict=True
        ):
            assert token_id in row
            assert row == sorted(set(row))
            assert entry["token_id"] == token_id
            assert entry["logprob"] <= 1e-6
        tokens += len(chunk["token_ids"])
        rows += len(chunk["sampling_mask"])
        logprobs += len(chunk["logprobs"]["content"])
    *before, last = chunks
    assert all(chunk["finish_reason"] is None for chunk in before)
    assert last["finish_reason"] in ("length", "abort")
    end, at = 0, 0
    for span in last["weight_versions"] or []:
        assert span["start"] == end < span["end"]
        end = span["end"]
        at = versions.index(span["version"], at)  # in the order they came, from one on to a later one
    assert end == tokens == rows == logprobs


class AnyOrder(RuleBasedStateMachine):
    """The server is shared between runs: each leaves it empty and going."""

    house: Serving

    @initialize()
    def begin(self) -> None:
        self.client = self.house.client
        self.versions = [self.client.get("/weight_info").json()["weight_version"]]
        self.whole: list[tuple[str, int, Background]] = []
        self.streams: list[tuple[str, int, RawStream]] = []
        self.number = 0
        self.paused = False

    def _body(self, n: int, max_tokens: int, **more: Any) -> dict[str, Any]:
        self.number += 1
        params = {"n": n, "max_tokens": max_tokens, "top_k": 5, "ignore_eos": True, "logprobs": 0}
        prompt = list(range(3, 3 + 7 * (1 + self.number % 4)))  # some share prefixes with others
        return {"token_ids": prompt, "sampling_params": params, "request_id": f"any-{self.number}", **more}

    @rule(n=st.integers(1, 3), max_tokens=st.integers(1, 30))
    def ask(self, n: int, max_tokens: int) -> None:
        body = self._body(n, max_tokens)
        ask = self.house.in_background(lambda: self.client.post("/inference/v1/generate", json=body))
        self.whole.append((body["request_id"], n, ask))

    @rule(n=st.integers(1, 3), max_tokens=st.integers(1, 30), interval=st.integers(1, 4))
    def stream(self, n: int, max_tokens: int, interval: int) -> None:
        body = self._body(n, max_tokens, stream=True, stream_interval=interval)
        self.streams.append((body["request_id"], n, self.house.open_stream(body)))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.streams:
            _, _, stream = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
            stream.close()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = [name for name, *_ in [*self.whole, *self.streams]]
        if names:
            self.client.post("/abort_requests", json={"request_ids": [data.draw(st.sampled_from(names))]})

    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def pause(self, mode: str) -> None:
        self.client.post("/pause", params={"mode": mode}).raise_for_status()
        assert self.client.get("/is_paused").json()["is_paused"]

    @rule()
    def resume(self) -> None:
        self.client.post("/resume").raise_for_status()

    @rule(scale=st.floats(0.5, 2))
    def update(self, scale: float) -> None:
        version = f"{self.versions[-1]}."
        self.client.post("/start_weight_update", json={"partial": True}).raise_for_status()
        part = safetensors.torch.save({NORM: torch.full((64,), scale)})
        headers = {"content-type": "application/octet-stream"}
        self.client.post("/update_weights", content=part, headers=headers).raise_for_status()
        self.versions.append(version)
        self.client.post("/finish_weight_update", json={"weight_version": version}).raise_for_status()

    @rule()
    def fail_to_update(self) -> None:
        self.client.post("/start_weight_update", json={"partial": True, "discard": True}).raise_for_status()
        part = safetensors.torch.save({NORM: torch.ones(63)})
        headers = {"content-type": "application/octet-stream"}
        assert self.client.post("/update_weights", content=part, headers=headers).status_code == 400
        assert self.client.post("/finish_weight_update").status_code == 400
        assert self.client.get("/weight_info").json()["weight_version"] == self.versions[-1]
        full = self.client.post("/start_weight_update", json={"partial": True})
        assert full.status_code == 409
        self._drop_update()

    def _drop_update(self) -> None:
        """Leave no update under way: what is there becomes what is there."""
        self.client.post("/start_weight_update", json={"partial": True, "discard": True}).raise_for_status()
        part = safetensors.torch.save({NORM: torch.ones(64)})
        headers = {"content-type": "application/octet-stream"}
        self.client.post("/update_weights", content=part, headers=headers).raise_for_status()
        self.versions.append(f"{self.versions[-1]}.")
        self.client.post("/finish_weight_update", json={"weight_version": self.versions[-1]}).raise_for_status()

    def teardown(self) -> None:
        self.client.post("/resume").raise_for_status()
        for _, n, ask in self.whole:
            answer = ask.result()
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(n))
            for choice in choices:
                check_choice([choice], self.versions)
        for _, n, stream in self.streams:
            received = [choice for event in events(stream.read_all()) for choice in event["choices"]]
            stream.close()
            for index in range(n):
                check_choice([choice for choice in received if choice["index"] == index], self.versions)
        self.house.settle()
        stats = self.house.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_running == stats.num_waiting == 0
        assert self.house.service.admission.num_completions == self.house.service.admission.num_bytes == 0


def test_any_order_of_calls_keeps_every_answer_whole(house: Serving):
    with house.slowed(0.002):
        AnyOrder.house = house
        run_state_machine_as_test(
            AnyOrder,
            settings=settings(
                max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
