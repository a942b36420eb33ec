"""What a run is made of: files, flags over them, and options that contradict each other."""

import pytest

from keepmask.errors import ConfigError
from keepmask.train.train_config import TrainConfig


def test_flags_go_over_the_file(tmp_path):
    toml, plain = tmp_path / "run.toml", tmp_path / "run.json"
    toml.write_text('task = "add-2"\nsteps = 7\n')
    plain.write_text('{"task": "add-2", "steps": 7}')
    for file in (toml, plain):
        config = TrainConfig.read(file, {"steps": 9})
        assert (config.task, config.steps, config.top_p) == ("add-2", 9, 0.95)
    assert TrainConfig.read(None, {}) == TrainConfig()


@pytest.mark.parametrize(("text", "words"), [
    ("{", "not a config file"),
    ("[1]", "must hold an object of options, got list"),
    ('{"stepz": 3}', "stepz: unknown training option; known are beta"),
    ('{"steps": 0}', "steps=0: should be greater than or equal to 1"),
])  # fmt: skip
def test_a_file_that_says_nothing_clear_is_refused(tmp_path, text, words):
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        TrainConfig.read(file, {})


@pytest.mark.parametrize(("options", "words"), [
    ({"updates_per_generation": 3}, "updates_per_generation=3: must divide the 64 completions"),
    ({"micro_batch_size": 5}, "micro_batch_size=5: must divide the 64 completions of an update"),
    ({"num_iterations": 2, "save_every": 3}, "save_every=3: must be a multiple of 2"),
    ({"report_to": 3}, "report_to=3: should be a valid list"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**options)


def test_a_generation_is_split_into_updates_and_forwards():
    config = TrainConfig(prompts_per_step=4, num_generations=6, updates_per_generation=3, micro_batch_size=2)
    assert (config.completions, config.per_update, config.micro_batch) == (24, 8, 2)
