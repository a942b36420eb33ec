"""`RowLogits` against the engine, and against a plain forward with the definitions written out in float64."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keepmask import SamplingParams
from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout
from keepmask.verify.row_logits import PROFILES, row_logits

PARAMS = {
    "temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
    "logit_bias": {5: 2.0, 9: -1.0}, "top_k": 30, "top_p": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def rollout(tiny_llm):
    llm = tiny_llm(return_sampling_mask=True, logprobs_mode="processed_logprobs")
    asked = SamplingParams(**PARAMS, max_tokens=40, logprobs=0, seed=3, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [7, 8, 9, 5, 5]}], asked, use_tqdm=False)
    return output.rollouts()[0]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32).eval()


def test_the_engines_own_parameters_give_the_engines_log_probs(model, rollout):
    found = row_logits(model, rollout)
    np.testing.assert_allclose(found.predict(rollout.sampling_params), rollout.logprobs, atol=2e-5)
    assert found.rules["vllm"].equal.all()
    np.testing.assert_allclose(found.rules["vllm"].logprobs, rollout.logprobs[found.checked], atol=2e-5)
    assert found.checked.size == 32


def test_raw_and_whole_vocabulary_are_as_defined(model, rollout):
    found = row_logits(model, rollout, max_checked=0)
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0, rollout.prompt_token_ids.size - 1 : -1].double().numpy()
    for t, token_id in enumerate(rollout.token_ids.tolist()):
        z = logits[t].copy()
        np.testing.assert_allclose(found.raw_logprobs[t], z[token_id] - np.logaddexp.reduce(z), atol=2e-5)
        before = rollout.token_ids[:t].tolist()
        z[5] += 2.0
        z[9] -= 1.0
        for seen in {*rollout.prompt_token_ids.tolist(), *before}:
            z[seen] = z[seen] / 1.3 if z[seen] > 0 else z[seen] * 1.3
        for seen in set(before):
            z[seen] -= 0.4 * before.count(seen) + 0.2
        z /= 0.7
        np.testing.assert_allclose(found.full_logprobs[t], z[token_id] - np.logaddexp.reduce(z), atol=2e-5)
        row = rollout.sampling_mask.row(t)
        np.testing.assert_allclose(
            found.predict(rollout.sampling_params)[t], z[token_id] - np.logaddexp.reduce(z[row]), atol=2e-5
        )
    assert {name: rules.equal.size for name, rules in found.rules.items()} == dict.fromkeys(PROFILES, 0)


def test_rows_of_the_whole_vocabulary_are_left_out(model):
    made = Rollout(
        prompt_token_ids=np.array([7, 8], np.int32), token_ids=np.array([4, 5, 6], np.int32),
        sampling_mask=SamplingMask.from_lists([[], [5, 9], []]), logprobs=np.zeros(3, np.float32),
    )  # fmt: skip
    found = row_logits(model, made)
    assert found.rows.tolist() == [1]
    assert np.isnan(found.predict({})).tolist() == [True, False, True]
