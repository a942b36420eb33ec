"""`keepmask rollout` on the packaged model: what is written, and what a second run adds."""

import json

import numpy as np
import pytest

from keepmask.cli import main
from keepmask.wire.rollout_file import read_rollouts

pytestmark = pytest.mark.e2e

FLAGS = ["--max-tokens", "5", "--top-k", "20", "--n", "2", "--dtype", "float32", "--max-model-len", "64"]


def write_prompts(path, count):
    lines = [{"prompt": f"{i} + {i} =", "id": f"q{i}"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_an_interrupted_run_ends_with_the_rollouts_of_one_that_was_not(tmp_path):
    whole, resumed = tmp_path / "whole.parquet", tmp_path / "resumed.parquet"
    three = write_prompts(tmp_path / "three.jsonl", 3)
    one = write_prompts(tmp_path / "one.jsonl", 1)
    assert main(["rollout", str(three), "-o", str(whole), *FLAGS]) == 0
    assert main(["rollout", str(one), "-o", str(resumed), *FLAGS]) == 0
    assert main(["rollout", str(three), "-o", str(resumed), *FLAGS]) == 0

    rollouts, metadata = read_rollouts(whole)
    assert [(each.request_id, each.completion_index) for each in rollouts] == [
        (f"q{i}", index) for i in range(3) for index in range(2)
    ]
    for each in rollouts:
        assert each.sampling_mask is not None
        assert len(each.sampling_mask) == len(each.token_ids) == len(each.logprobs)
        assert each.sampling_mask.contains(each.token_ids).all()
        assert each.sampling_params["top_k"] == 20
    assert metadata["model"] == "smollm2-135m"
    again, _ = read_rollouts(resumed)
    assert len(again) == len(rollouts)
    for ours, theirs in zip(rollouts, again, strict=True):
        assert ours.request_id == theirs.request_id
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        assert ours.sampling_mask == theirs.sampling_mask


def test_a_file_of_another_run_is_not_overwritten_unasked(tmp_path, capsys):
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", 1), tmp_path / "out.parquet"
    assert main(["rollout", str(prompts), "-o", str(output), *FLAGS]) == 0
    with pytest.raises(SystemExit, match="overwrite"):
        main(["rollout", str(prompts), "-o", str(output), *FLAGS, "--seed", "7"])


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"fits"\n' + json.dumps("word " * 100))
    with pytest.raises(SystemExit, match=r"line 2: .*context of 64"):
        main(["rollout", str(prompts), "-o", str(tmp_path / "out.parquet"), *FLAGS])
