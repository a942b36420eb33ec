"""`keepmask demo`: the mismatch is there without the mask and gone with it."""

import json

import pytest

from keepmask.cli import main
from keepmask.commands.demo import arithmetic_prompts
from keepmask.wire.rollout_file import read_rollouts

pytestmark = pytest.mark.e2e


def test_replay_removes_the_mismatch_on_real_weights(tmp_path, capsys):
    assert main(["demo", "-o", str(tmp_path), "--prompts", "4", "--max-tokens", "24", "--json"]) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert abs(table["ratio_replayed_mean"] - 1) < 1e-4
    assert table["ratio_replayed_outside_0.1"] == 0
    assert table["logprob_diff_max"] < 1e-4
    assert 0.85 < table["ratio_full_mean"] < 0.98
    assert abs(table["ratio_full_mean"] - table["kept_mass_mean"]) < 1e-4
    rollouts, _ = read_rollouts(tmp_path / "rollouts.parquet")
    assert sum(len(each.token_ids) for each in rollouts) == table["num_tokens"]
    assert len(rollouts) == 16
    assert all(each.policy_logprobs is not None and each.policy_full_logprobs is not None for each in rollouts)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "smollm2-135m" in page
    assert main(["report", str(tmp_path / "rollouts.parquet"), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text("utf-8").count("<svg") == page.count("<svg") > 0


def test_prompts_differ():
    prompts = arithmetic_prompts(32)
    assert len({json.dumps(each.value) for each in prompts}) == 32
