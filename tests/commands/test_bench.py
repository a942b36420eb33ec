"""`keepmask bench`: every measurement is there, adds up, and leaves the engine as it was."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from keepmask.bench.engines import Peer
from keepmask.bench.floor import Floor
from keepmask.bench.ours import VARIANTS, Ours
from keepmask.bench.peak_memory import peak_memory
from keepmask.bench.phases import PHASES, PhaseClock
from keepmask.bench.rounds import measure
from keepmask.bench.row_tables import page
from keepmask.bench.workload import FULL, Workload
from keepmask.cli import main
from keepmask.errors import BackendError

SMALL = Workload(requests=3, prompt=20, output=6)
GROUPS = Workload(requests=2, n=3, prompt=20, output=6)
MASKS = VARIANTS["keepmask"]


@pytest.fixture(scope="module")
def ours(tiny_checkpoint):
    return Ours(
        {
            "model": str(tiny_checkpoint("llama")),
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "max_model_len": 64,
            "max_num_seqs": 8,
        }
    )


class FakePeer:
    """Notes what it was asked."""

    name = "vllm"

    def __init__(self):
        self.asked = []

    def run(self, workload, prompts, sampling):
        self.asked.append((workload, prompts, sampling))
        return 2.0


def test_every_number_has_its_row_its_place_in_the_tables_and_the_picture(tiny_with_text, capsys, tmp_path):
    picture = tmp_path / "bench.png"
    arguments = ["bench", "--model", str(tiny_with_text), "--dtype", "float32", "--device", "cpu", "--json"]
    arguments += ["--only", "1", "4", "--prompt", "16", "--output", "6", "--seconds", "0", "--picture", str(picture)]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made = {(row["op"], row["implementation"], row["shape"]["requests"]) for row in rows}
    for requests in (1, 4):
        for op in ("throughput", "step", "first token"):
            assert {(op, variant, requests) for variant in VARIANTS} <= made
        assert {(f"phase {phase}", "keepmask", requests) for phase in PHASES} <= made
    assert {("peak memory", variant, 4) for variant in VARIANTS} <= made
    for row in rows:
        assert {"dtype", "p20", "p50", "p80", "unit", "device", "versions", "commit", "load_average"} <= row.keys()
        assert row["p20"] <= row["p50"] <= row["p80"]
        if row["op"] == "step":
            assert row["over_floor"] == pytest.approx(row["p50"] / row["floor_ms"], rel=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")
    Console(width=120).print(page(rows))
    out = capsys.readouterr().out
    for words in ("Tokens/s", "over the floor", "Where a step's time goes", "KV budget", "4 of 16 + 6", "load average"):
        assert words in out


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("keepmask.commands.bench.find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match="keepmask: --picture: needs matplotlib"):
        main(["bench", "--picture", str(tmp_path / "bench.png")])


@pytest.mark.parametrize("workload", [SMALL, GROUPS])
def test_a_run_times_the_whole_and_every_request(ours, workload):
    timing = ours.run(workload, workload.prompts(ours.vocab_size, seed=0), MASKS)
    assert len(timing.first_tokens) == workload.requests
    assert 0 < min(timing.first_tokens) <= max(timing.first_tokens) <= timing.total
    assert sum(timing.steps) < timing.total
    assert ours.llm.engine.num_unfinished == 0


def test_phases_add_up_to_the_run_and_leave_no_trace(ours):
    engine = ours.llm.engine
    steps, own = engine.stats().num_steps, set(vars(engine)) | set(vars(engine.runner)) | set(vars(engine.sampler))
    prompts = SMALL.prompts(ours.vocab_size, seed=0)
    phases = ours.phases(SMALL, prompts, MASKS)
    assert set(vars(engine)) | set(vars(engine.runner)) | set(vars(engine.sampler)) == own
    assert list(phases) == list(PHASES)
    assert all(ms > 0 for ms in phases.values())
    assert engine.stats().num_steps == steps + SMALL.output
    before = dict(phases)
    ours.run(SMALL, prompts, MASKS)
    assert phases == before


def test_nested_phases_count_for_the_innermost():
    ticks = iter([0.0, 1.0, 4.0, 9.0])
    clock = PhaseClock(now=lambda: next(ticks))
    inner = clock.wrap(lambda: None, "inner")  # from 1 to 4
    clock.wrap(inner, "outer")()  # from 0 to 9
    assert clock.seconds == {"outer": 1.0 + 5.0, "inner": 3.0}


def test_a_phase_that_raises_is_closed():
    clock = PhaseClock()
    with pytest.raises(ZeroDivisionError):
        clock.wrap(lambda: 1 / 0, "broken")()
    clock.wrap(lambda: None, "next")()
    assert list(clock.seconds) == ["broken", "next"]


def test_implementations_take_turns_on_the_same_prompts_new_in_each_round(ours):
    peer = FakePeer()
    found = measure(ours, [peer], [SMALL], seconds=60, rounds=2)[SMALL]
    assert {name: len(timings) for name, timings in found.ours.items()} == dict.fromkeys(VARIANTS, 2)
    assert {len(seconds) for seconds in found.peers.values()} == {2}
    asked = [prompts for workload, prompts, _ in peer.asked if workload == SMALL]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
    assert {"top_p" in sampling for _, _, sampling in peer.asked} == {True, False}


def test_later_rounds_stop_when_the_time_is_up(ours):
    found = measure(ours, [], [SMALL], seconds=0, rounds=9)[SMALL]
    assert {len(timings) for timings in found.ours.values()} == {1}


def test_the_floor_grows_with_context_by_the_bytes_of_keys_and_values(ours):
    floor = Floor(ours.llm.engine.runner, wait=ours.wait)
    settings = ours.llm.engine.runner.model.config
    per_token = 2 * settings.num_key_value_heads * settings.head_dim * settings.num_hidden_layers * 4
    assert floor.kv_bytes_per_token == per_token
    far = 10**9  # so many tokens that the matrices do not count
    assert floor.step_s(2, far) == pytest.approx(2 * far * per_token / floor.bytes_per_s, rel=0.01)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_floor_holds_every_matrix_of_the_model(tiny_checkpoint, architecture):
    llm = Ours(
        {"model": str(tiny_checkpoint(architecture)), "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
        | {"max_model_len": 64, "max_num_seqs": 2}
    )
    runner = llm.llm.engine.runner
    floor = Floor(runner, wait=llm.wait)
    matrices = {id(p): p.numel() for name, p in runner.model.named_parameters() if p.ndim == 2 and "embed" not in name}
    assert len({id(linear) for linear in floor._linears}) == len(floor._linears)
    assert sum(linear.in_features * linear.out_features for linear in floor._linears) >= sum(matrices.values())


def test_peak_memory_is_of_a_process_of_its_own(tiny_checkpoint):
    options = {
        "model": str(tiny_checkpoint("llama")),
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**20,
    }
    memory = peak_memory(SMALL, options=options, params=MASKS)
    assert memory.kv_cache == 2**20
    assert memory.weights < memory.peak < 2**31
    assert memory.over == memory.peak - memory.weights - memory.kv_cache


def test_transformers_does_the_same_work(tiny_checkpoint):
    options = {"model": str(tiny_checkpoint("llama")), "dtype": "float32"}
    with Peer("transformers", sys.executable, options) as peer:
        assert peer.run(GROUPS, GROUPS.prompts(512, seed=0), {"temperature": 1.0, "top_k": 5}) > 0
        assert peer.version


def test_a_peer_that_cannot_start_says_why(tiny_checkpoint):
    with pytest.raises(BackendError, match=r"transformers .*no-such-model"):
        Peer("transformers", sys.executable, {"model": "/no-such-model", "dtype": "float32"})
    with pytest.raises(BackendError, match="--peer-python /no/python: No such file"):
        Peer("vllm", "/no/python", {})


def test_prompts_are_the_same_for_one_seed_and_share_no_prefix():
    workload = Workload(requests=64, prompt=32, output=1)
    prompts = workload.prompts(512, seed=3)
    assert prompts == workload.prompts(512, seed=3)
    assert len({tuple(ids[:16]) for ids in prompts}) == 64
    assert all(0 <= token_id < 512 for ids in prompts for token_id in ids)


def test_the_full_run_covers_both_prompt_lengths_and_groups():
    labels = [workload.label for workload in FULL.workloads()]
    assert labels[0] == "1 of 32 + 128"
    assert labels[-1] == "8 x 8 of 256 + 128"
    assert len(labels) == 11


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_peer_is_stopped_between_runs_and_gone_afterwards(tiny_checkpoint):
    def stops():
        """Whether it is stopped, as soon as the signal has reached it."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if Path(f"/proc/{peer._process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
            time.sleep(0.01)
        return False

    with Peer("transformers", sys.executable, {"model": str(tiny_checkpoint("llama")), "dtype": "float32"}) as peer:
        assert stops()
        peer.run(SMALL, SMALL.prompts(512, seed=0), {"temperature": 1.0})
        assert stops()
    assert peer._process.poll() is not None
