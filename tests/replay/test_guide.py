"""The snippets of docs/replay.md run, in order, on a tiny model and the JSON vLLM would send for it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import oracle
from keepmask import SamplingParams

GUIDE = Path(__file__).parents[2] / "docs" / "replay.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
PARAMS = SamplingParams(temperature=0.7, top_p=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and an answer drawn from it by the oracle."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, eos_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(std=0.5)
    path = tmp_path_factory.mktemp("guide")
    model.save_pretrained(path / "checkpoint")
    prompt = [3, 14, 15]
    answer = {"request_id": "a", "prompt_token_ids": prompt, "choices": [drawn(model, prompt, i) for i in range(2)]}
    (path / "answer.json").write_text(json.dumps(answer))
    return path


def drawn(model, prompt, index):
    output, rows, content = [], [], []
    while len(output) < 5 + 4 * index:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].numpy()
        step = oracle.step(logits, PARAMS, prompt, output, seed=1, completion_index=index)
        output.append(step.token_id)
        rows.append(step.ids.tolist())
        logprob = step.logprobs[np.flatnonzero(step.ids == step.token_id)[0]]
        content.append({"token_id": step.token_id, "logprob": float(logprob), "rank": 1, "top_logprobs": []})
    choice = {"index": index, "token_ids": output, "sampling_mask": rows, "finish_reason": "length"}
    return choice | {"logprobs": {"content": content}}


def test_the_first_snippet_gives_the_right_ratio_and_the_others_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    names = {}
    for snippet in SNIPPETS:
        exec(snippet, names)
    torch.testing.assert_close(names["ratio"], torch.ones(14), atol=1e-5, rtol=0)
    # What a trainer without the mask computes is the kept mass, far from 1.
    model, batch = names["model"], names["batch"]
    logits = model(**batch.packed()).logits[0, batch.logit_positions]
    full = logits.div(0.7).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    assert (full - names["batch"].rollout_logprobs).exp().mean() < 0.97
    assert names["model"].lm_head.weight.grad.isfinite().all()
    assert names["table"]["num_tokens"] == 14
    assert float(capsys.readouterr().out.split()[0]) == pytest.approx(1, abs=1e-5)
