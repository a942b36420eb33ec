"""The Python of docs/train.md runs, on a tiny model."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl_cases import COMMON, dataset, even_ids

from keepmask import SamplingParams
from keepmask.cli import main

GUIDE = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_the_trainer(tiny_with_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").symlink_to(tiny_with_text)
    own = {name: value for name, value in COMMON.items() if name not in ("top_p", "top_k", "num_generations")}
    own |= {"max_steps": 1, "rollout_options": {"kv_cache_memory_bytes": 2**22}}
    names = {"reward_func": even_ids, "dataset": dataset(), "own": own}
    exec(SNIPPETS[0].replace('rollouts="embedded")', 'rollouts="embedded", **own)'), names)
    (entry,) = [each for each in names["trainer"].state.log_history if "loss" in each]
    assert entry["replay/logprob_diff_max"] < 1e-4


def test_any_other_loop(tiny_checkpoint, tiny_llm):
    llm = tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    params = SamplingParams(top_p=0.8, max_tokens=6, seed=1, logprobs=0, ignore_eos=True)
    rollouts = [each for (each,) in llm.rollouts([[3, 4, 5], [6, 7, 8]], params)]
    ids = torch.tensor([[*each.prompt_token_ids, *each.token_ids] for each in rollouts])
    labels = ids.clone()
    labels[:, :3] = -100
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32)
    names = {"model": model, "rollouts": rollouts, "ids": ids, "mask": torch.ones_like(ids), "labels": labels}
    exec(SNIPPETS[1], names)
    drawn = torch.stack([torch.from_numpy(each.logprobs) for each in rollouts])
    torch.testing.assert_close(names["output"].log_probs[:, 2:], drawn, atol=1e-5, rtol=0)


def test_its_commands_and_fields_exist(tiny_with_text, capsys):
    commands = re.findall(r"^keepmask train (.*?)(?:\s+#.*)?$", GUIDE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = [word for word in command.split() if word not in ("--config", "run.toml")]
        assert main(["train", *words, "--dry-run", "--model", str(tiny_with_text)]) == 0
    capsys.readouterr()
