"""The chain from sampler to trainer on real weights: the packaged SmolLM2, 2,048 tokens in float32."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keepmask import LLM, SamplingParams
from keepmask.models import bundled
from oracle import log_softmax

pytestmark = pytest.mark.e2e

PARAMS = SamplingParams(
    n=4,
    max_tokens=32,
    seed=7,
    temperature=0.9,
    top_k=50,
    top_p=0.9,
    logprobs=0,
    ignore_eos=True,
    return_sampling_mask_logprobs=True,
)
SUBJECTS = ["rivers", "bread", "planets", "music", "ants", "glass", "winter", "numbers"]
PROMPTS = [f"{start} {subject} is that" for subject in SUBJECTS for start in ("The truth about", "One thing about")]


@pytest.fixture(scope="module")
def outputs(smollm2):
    return smollm2.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def plain():
    folder = bundled.path("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def logits_of(network, output):
    """[n, T, V] float32: the logits each completion's tokens were drawn from, by a plain forward."""
    texts = torch.tensor([output.prompt_token_ids + each.token_ids for each in output.outputs])
    size = len(output.outputs[0].token_ids)
    return network(input_ids=texts, use_cache=False, logits_to_keep=size + 1).logits[:, :-1]


@pytest.fixture(scope="module")
def scored(outputs, plain):
    """Of each token: the rollout's log-prob, the replayed one, the full-vocabulary one, and the kept mass."""
    columns = []
    for output in outputs:
        for completion, logits in zip(output.outputs, logits_of(plain, output), strict=True):
            for t, drawn in enumerate(completion.token_ids):
                support = completion.sampling_mask.row(t)
                full = log_softmax(logits[t].numpy() / PARAMS.temperature)
                replayed = log_softmax(full[support])
                assert np.abs(completion.sampling_mask.row_logprobs(t) - replayed).max() < 1e-4
                rollout = completion.logprobs[t][drawn].logprob
                kept = np.exp(full[support]).sum()
                columns.append((rollout, replayed[support == drawn][0], full[drawn], kept))
    return np.array(columns).T


def test_rollout_logprobs_are_the_log_softmax_of_a_plain_forward_over_the_support(scored):
    rollout, replayed, _, _ = scored
    assert rollout.size == 2048
    assert np.abs(rollout - replayed).max() <= 1e-4


def test_the_full_vocabulary_ratio_is_the_kept_mass(scored):
    rollout, _, full, kept = scored
    assert np.abs(np.exp(full - rollout) - kept).max() < 1e-4
    assert kept.min() < 0.8
    assert kept.mean() < 0.97


def test_one_streamed_completion_without_masks_is_that_of_the_batch(smollm2, outputs):
    params = PARAMS.replace(n=1, return_sampling_mask=False, return_sampling_mask_logprobs=False)
    for step in smollm2.stream(PROMPTS[3], params):
        last = step.outputs[0]
    assert last.token_ids == outputs[3].outputs[0].token_ids
    assert last.text == outputs[3].outputs[0].text
    assert last.sampling_mask is None


def test_text_is_what_the_tokenizer_makes_of_the_tokens(smollm2, outputs):
    tokenizer = smollm2.get_tokenizer()
    for output in outputs:
        for completion in output.outputs:
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_it_knows_the_capital_of_france(smollm2):
    (output,) = smollm2.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=30),
        use_tqdm=False,
    )
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_bfloat16_differs_by_its_rounding(plain, record_testsuite_property):
    """What is left in half precision is a property of the arithmetic: recorded, and bounded only roughly."""
    llm = LLM(
        "smollm2-135m",
        dtype="bfloat16",
        device="cpu",
        max_model_len=128,
        kv_cache_memory_bytes=64 * 2**20,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )
    differences = []
    for output in llm.generate(PROMPTS[:2], PARAMS.replace(n=2), use_tqdm=False):
        for completion, logits in zip(output.outputs, logits_of(plain, output), strict=True):
            for t, drawn in enumerate(completion.token_ids):
                support = completion.sampling_mask.row(t)
                replayed = log_softmax(logits[t].numpy()[support] / PARAMS.temperature)
                differences.append(completion.logprobs[t][drawn].logprob - replayed[support == drawn][0])
    record_testsuite_property("bfloat16_logprob_diff_mean", float(np.abs(differences).mean()))
    record_testsuite_property("bfloat16_logprob_diff_max", float(np.abs(differences).max()))
    assert np.abs(differences).mean() < 0.1
