"""Our server's answers against those of the real vLLM and SGLang, recorded by `scripts/peers compare --record`."""

from __future__ import annotations

from pathlib import Path

import pytest
from peer_answers import load
from peer_requests import sglang_requests, vllm_requests

RECORDED = Path(__file__).parent / "recorded"
TABLES = {"vllm-0.32.0": vllm_requests(), "sglang-0.5.23": sglang_requests()}


@pytest.mark.parametrize("peer", TABLES)
def test_every_request_of_the_table_has_the_answer_of_the_peer(peer):
    recording = load(RECORDED / f"{peer}.jsonl.gz", TABLES[peer])
    assert recording.peer == peer.replace("-", " ")
    assert len({asked.name for asked, _ in recording.answers}) >= 230
    assert all(answer.status for _, answer in recording.answers)
