"""A few steps of a tiny model through the command: its files, and that resuming changes nothing."""

import json
import math

import pytest
from transformers import AutoModelForCausalLM

from keepmask.cli import main
from keepmask.errors import ConfigError
from keepmask.report.run_page import Run, write_run_report
from keepmask.train.run import describe, train
from keepmask.train.train_config import TrainConfig
from keepmask.wire.rollout_file import read_rollouts

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TINY = {"prompts_per_step": 2, "num_generations": 4, "held_out": 3, "held_out_completions": 2, "eval_every": 2}
EVERY_STEP = {
    "step", "loss", "reward", "ratio_replayed_outside_0.1", "ratio_full_mean", "logprob_diff_max", "kept_mass",
    "support_size", "tokens_per_s", "seconds", "seconds_rollout", "seconds_sync", "seconds_update", "grad_norm",
    "entropy", "clipped", "ratio_replayed_histogram", "ratio_full_histogram",
}  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tiny_with_text, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    code = main(["train", "-o", str(output), "--model", str(tiny_with_text), "--steps=4", "--save-every=2", *arguments])
    assert code == 0
    return output


def test_there_is_a_line_for_each_step_and_each_measurement(run):
    steps = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line.keys() >= EVERY_STEP
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert line["logprob_diff_max"] < 1e-4
        assert line["ratio_replayed_outside_0.1"] == 0
        assert line["seconds"] >= line["seconds_rollout"] + line["seconds_update"]
        assert sum(line["ratio_replayed_histogram"]) == line["tokens"]
    assert [line["step"] for line in lines(run) if "heldout_reward" in line] == [0, 2, 4]
    assert lines(run)[-1]["heldout_completions"] == 6


def test_the_trained_model_and_its_samples_are_there(run):
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.vocab_size == 512
    rollouts, metadata = read_rollouts(run / "samples.parquet")
    assert len(rollouts) == 6
    assert metadata["sampling_params"]["top_p"] == 0.95


def test_a_resumed_run_writes_the_identical_next_lines(run, tiny_with_text, tmp_path):
    stopped = tmp_path / "stopped"
    config = TrainConfig(model=str(tiny_with_text), save_every=2, **TINY)
    train(config.model_copy(update={"steps": 2}), stopped)
    with pytest.raises(ConfigError, match="holds a run already; --resume goes on with it"):
        train(config, stopped)
    with pytest.raises(ConfigError, match=r"was begun with seed=0; resume with the same options"):
        train(config.model_copy(update={"seed": 1}), stopped, resume=True)
    (stopped / "metrics.jsonl").open("a").write('{"step": 3, "loss": 99.0}\n')  # a step that no checkpoint has
    train(config.model_copy(update={"steps": 4}), stopped, resume=True)
    whole, resumed = lines(run), lines(stopped)
    assert [line["step"] for line in resumed if "loss" in line] == [1, 2, 3, 4]
    for name in ("reward", "loss", "entropy", "heldout_reward", "grad_norm", "logprob_diff_mean"):
        values = [{line["step"]: line[name] for line in each if name in line} for each in (whole, resumed)]
        assert values[0] == values[1], name


def test_there_must_be_a_checkpoint_to_resume_from(tiny_with_text, tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from; save_every says how often"):
        train(TrainConfig(model=str(tiny_with_text), **TINY), tmp_path, resume=True)


def test_a_dry_run_prints_what_was_resolved_and_writes_nothing(tiny_with_text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "--model", str(tiny_with_text), "--task", "swap", "--steps", "9"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"]["steps"] == 9
    assert printed["task"]["name"] == "swap"
    assert printed["completions_per_update"] == 64
    assert not list(tmp_path.iterdir())


def test_an_output_must_be_named(tiny_with_text):
    with pytest.raises(SystemExit, match="--output DIR: must be given"):
        main(["train", "--model", str(tiny_with_text)])


def test_adapters_and_stale_updates(tiny_with_text, tmp_path):
    config = TrainConfig(
        model=str(tiny_with_text), steps=4, lora_rank=2, updates_per_generation=2, num_iterations=2, micro_batch_size=2,
        importance_correction="token_truncate", beta=0.01, **TINY,
    )  # fmt: skip
    assert describe(config)["generations"] == 1
    train(config, tmp_path)
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert "logprob_diff_max" in steps[0]
    assert all("ratio_stale_mean" in line for line in steps[1:])
    assert all("importance_ratio_max" in line for line in steps)


def test_the_page_of_a_run_shows_the_numbers_of_its_metrics(run, tmp_path):
    page = write_run_report(tmp_path / "run.html", run, compare=run).read_text()
    read = Run.read(run)
    first, last = read.points("heldout_reward")[0][1], read.points("heldout_reward")[-1][1]
    assert f"{first:.3f}" in page
    assert f"{last:.3f}" in page
    for step, value in read.points("kept_mass"):
        assert f"kept mass, step {step}: {value:.4g}" in page
    shares = [
        count / sum(line["ratio_full_histogram"]) for line in read.steps for count in line["ratio_full_histogram"]
    ]
    assert page.count('class="cell full"') == sum(share > 0 for share in shares)
    assert "://" not in page  # nothing is loaded
    assert main(["report", str(run), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").stat().st_size > 10_000


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no metrics.jsonl; give the folder that keepmask train wrote"):
        write_run_report(tmp_path / "page.html", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2: is no JSON object"):
        Run.read(tmp_path)
