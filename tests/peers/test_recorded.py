"""Our server's answers against those of the real vLLM and SGLang, recorded by `scripts/peers compare PEER --record`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from explained import EXPLAINED, explanations
from peer_answers import Difference, Recording, compare, load, send
from peer_requests import Asked, sglang_requests, vllm_requests
from peer_servers import keepmask_server, save_tiny

RECORDED = Path(__file__).parent / "recorded"
GUIDE = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()
TABLES = {"vllm-0.32.0": vllm_requests(), "sglang-0.5.23": sglang_requests()}
SETTINGS = [("vllm-0.32.0", "plain"), ("vllm-0.32.0", "masks"), ("sglang-0.5.23", "plain")]


def recorded(peer: str) -> Recording:
    return load(RECORDED / f"{peer}.jsonl.gz", TABLES[peer])


@pytest.fixture(scope="session")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[tuple[Asked, Difference]]]:
    """differences(peer, setting): where our answers differ from the recorded ones, asked for once."""
    folder = save_tiny(tmp_path_factory.mktemp("peers") / "tiny")
    found: dict[tuple[str, str], list[tuple[Asked, Difference]]] = {}

    def differences(peer: str, setting: str) -> list[tuple[Asked, Difference]]:
        if (peer, setting) not in found:
            with keepmask_server(peer.split("-")[0], setting, str(folder)) as ours:
                found[peer, setting] = [
                    (asked, difference)
                    for asked, answer in recorded(peer).answers
                    if asked.setting == setting
                    for difference in compare(answer, send(ours.client, asked))
                ]
        return found[peer, setting]

    return differences


@pytest.mark.parametrize("peer", TABLES)
def test_every_request_of_the_table_has_the_answer_of_the_peer(peer):
    recording = recorded(peer)
    assert recording.peer == peer.replace("-", " ")
    assert len(recording.answers) >= 300
    assert all(answer.status for _, answer in recording.answers)


@pytest.mark.parametrize(("peer", "setting"), SETTINGS)
def test_no_answer_differs_from_the_peers_without_a_reason(differences, peer, setting):
    name = peer.split("-")[0]
    without = [
        f"{asked.name}: {difference.where}: {name} {difference.peer!r}, keepmask {difference.ours!r}"
        for asked, difference in differences(peer, setting)
        if explanations(name, asked, difference) is None
    ]
    assert not without, "\n".join(without[:40])


def test_every_reason_is_in_the_guide_and_still_needed(differences):
    needed = {
        explanations(peer.split("-")[0], asked, difference)
        for peer, setting in SETTINGS
        for asked, difference in differences(peer, setting)
    }
    assert [one.reason for one in EXPLAINED if one not in needed] == []
    listed = re.findall(r"^- (.*)\.$", GUIDE.split("## Where answers differ")[1].split("\n## ")[0], re.M)
    assert listed == [one.reason for one in EXPLAINED]
