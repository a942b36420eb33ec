"""Rollouts made up for the tests of files and reports: plausible supports, scores that agree with them."""

import numpy as np

from keepmask.mask import SamplingMask
from keepmask.outputs import Rollout, WeightVersionSpan

WORDS = [" the", " lamp", " burned", "\n", " and", " <b>", " &", " 42", " é", "!"]
METADATA = {"model": "tiny", "tokenizer": "tiny", "dtype": "float32"}


def token_text(token_ids):
    return [f"{WORDS[token_id % len(WORDS)]}{token_id}" for token_id in token_ids]


def made_rollout(request_id="0", completion_index=0, *, num_tokens=12, seed=0, scored=True, **changes):
    """One rollout of a softmax over 400 ids cut to random supports; the policy is the engine's own, plus rounding."""
    rng = np.random.default_rng([seed, completion_index, *request_id.encode()])
    rows, row_logprobs, drawn, logprobs, full = [], [], [], [], []
    for _ in range(num_tokens):
        size = int(rng.choice([1, 1, 2, 5, 17, 60]))
        ids = np.sort(rng.choice(400, size, replace=False))
        probabilities = rng.dirichlet(np.ones(size))
        probabilities = np.maximum(probabilities, 1e-6) / np.maximum(probabilities, 1e-6).sum()
        at = int(rng.choice(size, p=probabilities))
        rows.append(ids.tolist())
        row_logprobs.append(np.log(probabilities).tolist())
        drawn.append(int(ids[at]))
        logprobs.append(np.log(probabilities[at]))
        full.append(np.log(probabilities[at]) + np.log(rng.uniform(0.8, 1.0)))
    values = np.asarray(logprobs, np.float32)
    fields = {
        "request_id": request_id,
        "completion_index": completion_index,
        "prompt": f"Prompt {request_id}:",
        "prompt_token_ids": np.arange(3, dtype=np.int32),
        "text": "".join(token_text(drawn)),
        "token_ids": np.asarray(drawn, np.int32),
        "logprobs": values,
        "sampling_mask": SamplingMask.from_lists(rows, row_logprobs),
        "sampling_params": {"top_k": 60, "logit_bias": {7: 1.5}, "stop": ["\n"]},
        "seed": 2**64 - 1 - seed,
        "finish_reason": "length",
        "weight_versions": (WeightVersionSpan(0, num_tokens, "step-1"),),
    }
    if scored:
        fields["policy_logprobs"] = values + rng.normal(0, 1e-6, num_tokens).astype(np.float32)
        fields["policy_full_logprobs"] = np.asarray(full, np.float32)
    return Rollout(**(fields | changes))


def made_rollouts(num_requests=3, n=2, **fields):
    return [made_rollout(str(r), i, **fields) for r in range(num_requests) for i in range(n)]
