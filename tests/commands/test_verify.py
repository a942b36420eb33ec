"""`keepmask verify` on rollouts with one fault each: the fault is named."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from keepmask import LLM, SamplingParams
from keepmask.cli import main
from keepmask.mask import SamplingMask
from keepmask.outputs import WeightVersionSpan
from keepmask.wire.rollout_file import write_rollouts

PARAMS = {"top_k": 40, "top_p": 0.95, "max_tokens": 24, "logprobs": 0, "ignore_eos": True}
PROMPTS = [[7, 8, 9, 300 + i] for i in range(12)]


def with_tokenizer(folder, **changes):
    tiny.save(folder, "llama", **changes)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return with_tokenizer(tmp_path_factory.mktemp("other"), seed=1)


def roll_out(folder, prompts=PROMPTS, *, mode="processed_logprobs", **params):
    llm = LLM(
        str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**22, logprobs_mode=mode,
        return_sampling_mask=mode == "processed_logprobs", max_model_len=128,
    )  # fmt: skip
    asked = [SamplingParams(**PARAMS | params | {"seed": seed}) for seed in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    return [rollout for output in outputs for rollout in output.rollouts()]


def recorded_as(rollouts, **changes):
    return [dataclasses.replace(r, sampling_params={**r.sampling_params, **changes}) for r in rollouts]


@pytest.fixture
def verify(model, tmp_path, capsys):
    """verify(rollouts, *flags): the exit code and what was said."""

    def run(rollouts, *flags):
        file = write_rollouts(tmp_path / "r.parquet", rollouts, {"dtype": "float32"}, overwrite=True)
        code = main(["verify", str(file), "--model", str(model), *flags])
        return code, re.sub(r"\s+", " ", capsys.readouterr().out)

    return run


def test_the_same_weights_leave_nothing(verify, model, tmp_path):
    page = tmp_path / "page.html"
    code, said = verify(roll_out(model, temperature=0.8, repetition_penalty=1.2), "--report", str(page))
    assert code == 0
    assert "Replay gives the engine's log-probabilities: 0.00% <= 5.00%" in said
    assert re.search(r"Truncation causes [1-9][\d.]*% of ratios", said)
    assert "vllm 100.0%" in said
    assert b"report" in page.read_bytes()


def test_raw_logprobs(verify, model):
    rollouts = roll_out(model, temperature=0.7)
    raw = roll_out(model, temperature=0.7, mode="raw_logprobs")
    assert [r.token_ids.tolist() for r in raw] == [r.token_ids.tolist() for r in rollouts]
    code, said = verify([dataclasses.replace(r, logprobs=q.logprobs) for r, q in zip(rollouts, raw, strict=True)])
    assert code == 1
    assert "Likely cause: raw log-probs, which leaves 0.00%" in said
    assert "--logprobs-mode processed_logprobs" in said


def test_processed_logprobs_over_the_whole_vocabulary(verify, model):
    drawn = roll_out(model, temperature=0.7)
    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rollouts = []
    for r in drawn:
        logits = logits_of(scorer, r) / 0.7
        values = logits.log_softmax(-1)[np.arange(r.token_ids.size), r.token_ids.astype(np.int64)]
        rollouts.append(dataclasses.replace(r, logprobs=values.numpy()))
    code, said = verify(rollouts)
    assert (code, "Likely cause: log-probs over the whole vocabulary, which leaves 0.00%" in said) == (1, True)


@pytest.mark.parametrize(
    ("asked", "recorded", "cause"),
    [
        ({"temperature": 0.6}, {"temperature": 1.0}, r"temperature 0\.6, which leaves 0\.00%"),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.0}, r"repetition_penalty 1\.5, which leaves 0\.00%"),
        ({"frequency_penalty": 1.0}, {"frequency_penalty": 0.0}, r"frequency_penalty (1|0\.99\d|1\.0\d), which leaves"),
        ({}, {"temperature": 0.5}, r"without temperature, which leaves 0\.00%"),
        ({}, {"logit_bias": dict.fromkeys(range(100, 300), 4.0)}, r"without logit_bias, which leaves 0\.00%"),
    ],
)  # fmt: skip
def test_parameters_that_were_not_recorded_or_not_applied(verify, model, asked, recorded, cause):
    code, said = verify(recorded_as(roll_out(model, **asked), **recorded), "--threshold", "0.01")
    assert code == 1, said
    assert re.search(f"Likely cause: {cause}", said), said


def logits_of(scorer, rollout):
    """[T, V], by a plain forward."""
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.inference_mode():
        return scorer(ids).logits[0, rollout.prompt_token_ids.size - 1 : -1]


def test_masks_of_other_rules_than_the_draw(verify, model):
    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rollouts = []
    for r in roll_out(model, top_k=10, top_p=0.6):  # the masks of top_k alone
        top = logits_of(scorer, r).topk(10).indices.sort(-1).values
        rollouts.append(dataclasses.replace(r, sampling_mask=SamplingMask.from_lists(top.tolist())))
    code, said = verify(rollouts)
    assert code == 1
    assert "Likely cause: rows of vllm, which leaves 0.00%" in said
    assert "record the mask of the very draw" in said


def test_rows_that_follow_another_profile_are_noted(verify, model):
    rollouts = roll_out(model, top_k=12, top_p=0.5, sampling_semantics="sglang", temperature=1.5)
    code, said = verify(recorded_as(rollouts, sampling_semantics="vllm"))
    assert code == 0
    assert "Note: masks of other rules: they follow sglang, not vllm" in said


def test_ties_cut_differently_are_noted(tmp_path, capsys):
    folder = with_tokenizer(tmp_path / "twins")
    scorer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scorer.lm_head.weight[256:] = scorer.lm_head.weight[:256]  # every id has a twin of the same logit
    scorer.save_pretrained(folder)
    rollouts = []
    for r in roll_out(folder, top_k=5, top_p=1.0):
        rows = []
        for t, row in enumerate(r.sampling_mask.token_ids):
            alone = [i for i in row if (i + 256) % 512 not in row and i != r.token_ids[t]]
            rows.append([(i + 256) % 512 if i in alone[:1] else i for i in row])
        rollouts.append(dataclasses.replace(r, sampling_mask=SamplingMask.from_lists(rows)))
    file = write_rollouts(tmp_path / "r.parquet", rollouts, {"dtype": "float32"})
    assert main(["verify", str(file), "--model", str(folder)]) == 0
    assert "Note: ties cut differently" in capsys.readouterr().out


def test_weights_of_another_version(verify, model, other):
    ours, theirs = roll_out(model), roll_out(other)
    code, said = verify(theirs, "--also", str(other))
    assert code == 1
    assert f"Likely cause: weights of {other}, which leaves 0.00%" in said, said
    _, said = verify(theirs)
    assert "none of these explains it" in said
    assert "name them with --also" in said
    spans = ("1", ours), ("2", [dataclasses.replace(r, request_id=f"o{r.request_id}") for r in theirs])
    mixed = [
        dataclasses.replace(r, weight_versions=(WeightVersionSpan(0, r.token_ids.size, version),))
        for version, rollouts in spans
        for r in rollouts
    ]
    code, said = verify(mixed)
    assert (code, "Likely cause: version 1 alone, which leaves 0.00%" in said) == (1, True)


def test_tokenisation_that_differs(verify, model):
    with_bos = roll_out(model, [[tiny.BOS, *prompt] for prompt in PROMPTS])
    code, said = verify([dataclasses.replace(r, prompt_token_ids=r.prompt_token_ids[1:]) for r in with_bos])
    assert code == 1
    assert "tokenisation differs: the engine's prompt begins with one more special token" in said


def test_what_bfloat16_leaves_is_told_from_the_rest(verify, model, tmp_path, capsys):
    code, said = verify(roll_out(model), "--dtype", "bfloat16", "--threshold", "0.9", "--json")
    assert code == 0
    document = json.loads(said)
    assert document["tables"]["float32"]["ratio_replayed_outside_0.1"] == 0
    assert document["tables"]["bfloat16"]["logprob_diff_max"] > 1e-3
    assert document["cause"] is None


def test_what_cannot_be_verified_is_refused(model, tmp_path):
    (rollout,) = roll_out(model, PROMPTS[:1])
    for changes, says in (
        ({"logprobs": None}, "1 of 1 completions are without masks or log-probs"),
        ({"sampling_mask": None}, "1 of 1 completions are without masks"),
    ):
        file = write_rollouts(tmp_path / "r.parquet", [dataclasses.replace(rollout, **changes)], {}, overwrite=True)
        with pytest.raises(SystemExit, match=says):
            main(["verify", str(file), "--model", str(model)])
