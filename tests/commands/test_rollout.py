"""`keepmask rollout`: what is written, what a second run adds, and what it refuses to add to."""

import json
import shutil

import numpy as np
import pytest

from keepmask.cli import main
from keepmask.wire.rollout_file import read_rollouts

FLAGS = ["--max-tokens", "5", "--top-k", "20", "--n", "2", "--dtype", "float32", "--max-model-len", "64"]


def write_prompts(path, count):
    lines = [{"prompt": f"{i} + {i} =", "id": f"q{i}"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.e2e
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


@pytest.fixture
def tiny(tiny_with_text, tmp_path):
    """tiny(rows, *flags): `keepmask rollout` of these rows on a copy of a tiny model, always into one file."""
    shutil.copytree(tiny_with_text, tmp_path / "model")

    def run(rows, *flags):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return main(["rollout", str(prompts), "-o", str(tmp_path / "out.parquet"), "--model", str(tmp_path / "model"),
                     "--max-tokens", "3", "--dtype", "float32", "--device", "cpu", "--max-model-len", "64",
                     "--kv-cache-memory-bytes", "1000000", *flags])  # fmt: skip

    return run


def rolled_out(tmp_path):
    return {rollout.request_id: rollout for rollout in read_rollouts(tmp_path / "out.parquet")[0]}


TWO = [{"prompt": "a b", "id": "x"}, {"prompt": "c d", "id": "y"}]


def test_a_second_run_of_the_same_has_nothing_to_do_and_says_so(tiny, tmp_path, capsys):
    assert tiny(TWO) == 0
    assert "2 prompts x 1 completions in" in capsys.readouterr().err
    before = (tmp_path / "out.parquet").read_bytes()
    assert tiny(TWO) == 0
    assert f"nothing to do: all 2 prompts are in {tmp_path / 'out.parquet'}" in capsys.readouterr().err
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert tiny([*TWO, {"prompt": "e", "id": "z"}]) == 0
    assert set(rolled_out(tmp_path)) == {"x", "y", "z"}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [{"prompt": "a B", "id": "x"}],
            r"request 'x' is of another prompt or parameters: 'a b' .*there, 'a B' .*row 1",
        ),
        ([{"prompt_token_ids": [5, 6], "id": "y"}], r"request 'y' is of another prompt .*'c d' .*there, \[5, 6\]"),
        (
            [{"custom_id": "x", "body": {"prompt": "a b", "temperature": 0.5}}],
            "request 'x' is of another prompt or param",
        ),
    ],
)
def test_another_prompt_under_a_known_id_is_refused_with_both(tiny, tmp_path, rows, says):
    tiny(TWO)
    before = (tmp_path / "out.parquet").read_bytes()
    with pytest.raises(SystemExit, match=says):
        tiny(rows)
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert tiny(rows, "--overwrite") == 0


def test_another_model_tokenizer_or_parameters_are_refused_with_both_values(tiny, tmp_path):
    tiny(TWO)
    with pytest.raises(SystemExit, match="holds another run: seed is 0 there, 7 here"):
        tiny(TWO, "--seed", "7")
    model = tmp_path / "model"
    for name, part in (("checkpoint", model / "config.json"), ("tokenizer", model / "tokenizer_config.json")):
        content = part.read_text()
        part.write_text(content + "\n")
        with pytest.raises(SystemExit, match=f"another run: {name} is '[0-9a-f]{{32}}' there, '[0-9a-f]{{32}}' here"):
            tiny([*TWO, {"prompt": "new"}])
        part.write_text(content)
    (weights,) = model.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # overwritten in place, of the same size
    weights.write_bytes(data)
    with pytest.raises(SystemExit, match="another run: checkpoint is"):
        tiny([*TWO, {"prompt": "new"}])


def test_all_bad_rows_are_named_before_anything_is_written_or_left_out_when_asked(tiny, tmp_path, capsys):
    rows = [
        "{",
        *TWO,
        {"prompt": "a" * 100, "id": "long"},
        {"prompt_token_ids": [10**6]},
        {"prompt_token_ids": [2**70]},
    ]
    with pytest.raises(SystemExit, match=r"1 row cannot be rolled out; .*--skip-invalid:\n.*row 1: is not JSON"):
        tiny(rows)
    with pytest.raises(SystemExit, match=r"3 rows cannot be.*\n.*row 3: .*64.*\n.*row 4: .*1000000.*\n.*row 5: "):
        tiny(rows[1:])
    assert not (tmp_path / "out.parquet").exists()
    assert tiny(rows, "--skip-invalid") == 0
    assert "4 rows left out, with reasons in" in capsys.readouterr().err
    left_out = (tmp_path / "out.parquet.invalid.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in left_out] == [1, 4, 5, 6]
    assert json.loads(left_out[0])["row"] == "{"
    assert json.loads(left_out[1])["row"] == {"prompt": "a" * 100}
    assert set(rolled_out(tmp_path)) == {"x", "y"}


def test_columns_and_own_parameters_reach_the_rollouts(tiny, tmp_path):
    tiny(
        [
            {"prompt": "a b", "id": "x", "answer": {"value": 4}},
            {"custom_id": "y", "body": {"model": "other", "prompt": "a b", "temperature": 0, "max_tokens": 2, "n": 2}},
        ],
        "--top-k", "5",
    )  # fmt: skip
    rollouts = rolled_out(tmp_path)
    assert rollouts["x"].extra == {"answer": {"value": 4}}
    assert rollouts["x"].sampling_params["top_k"] == 5
    assert rollouts["y"].extra == {"model": "other"}
    assert rollouts["y"].completion_index == 1
    assert rollouts["y"].sampling_params["temperature"] == 0
    assert len(rollouts["y"].token_ids) == 2
