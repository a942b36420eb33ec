"""Rollouts out of every layout, against the arrays they were made from."""

import base64
import json

import numpy as np
import pytest

from keepmask.errors import MaskError
from keepmask.mask import SamplingMask
from keepmask.verify.rollout_sources import read_any, rollouts_of
from keepmask.wire.rollout_file import write_rollouts
from made_rollouts import made_rollouts

PROMPT, TOKENS, ROWS, LOGPROBS = [1, 2, 3], [5, 9, 4], [[5, 6], [9], [4, 7, 8]], [-0.5, 0.0, -1.25]
PARAMS = {"top_k": 3}
MASK = SamplingMask.from_lists(ROWS)
B64 = {"data": base64.b64encode(np.array([[5, 6, -1], [9, -1, -1], [4, 7, 8]], np.int32).tobytes()).decode(),
       "shape": [3, 3], "dtype": "int32"}  # fmt: skip

VLLM = {
    "prompt_token_ids": PROMPT,
    "choices": [
        {"token_ids": TOKENS, "sampling_mask": ROWS, "finish_reason": "length",
         "logprobs": {"content": [{"token_id": t, "logprob": v} for t, v in zip(TOKENS, LOGPROBS, strict=True)]}}
    ],
}  # fmt: skip
SGLANG = {
    "text": "", "output_ids": TOKENS,
    "meta_info": {"output_token_sampling_mask": ROWS, "output_token_sampling_logprobs": LOGPROBS},
}  # fmt: skip
OFFSETS = {"rollout_top_p_token_ids": [5, 6, 9, 4, 7, 8], "rollout_top_p_token_offsets": [0, 2, 3, 6]}

DOCUMENTS = {
    "vllm": VLLM,
    "vllm, with its request": {
        "request": {"token_ids": PROMPT, "sampling_params": {"top_k": 3}},
        "response": {"choices": VLLM["choices"]},
    },
    "sglang": SGLANG | {"prompt_token_ids": PROMPT},
    "sglang, with its request": {
        "request": {"input_ids": PROMPT, "sampling_params": {"top_k": 3}}, "response": [SGLANG],
    },
    "slime": {"tokens": PROMPT + TOKENS, "response_length": 3, "rollout_log_probs": LOGPROBS, **OFFSETS},
    "miles": {
        "tokens": PROMPT + TOKENS, "response_length": 3, "rollout_log_probs": LOGPROBS,
        "ids": [6, 5, 9, 4, 8, 7], "offsets": [0, 2, 3, 6],
    },
    "verifiers": {
        "token_ids": PROMPT + TOKENS,
        "sampled": [0, 0, 0, 1, 1, 1],
        "sampling_mask": {"ids": [5, 6, 9, 4, 7, 8], "counts": [2, 1, 3]},
        "logprobs": [0, 0, 0, *LOGPROBS],
    },
    "verifiers, a row a token": {
        "token_ids": PROMPT + TOKENS,
        "sampled": [0, 0, 0, 1, 1, 1],
        "sampling_mask": {"ids": [5, 6, 9, 4, 7, 8], "counts": [0, 0, 0, 2, 1, 3]},
        "logprobs": LOGPROBS,
    },
    "skyrl": {
        "prompt_token_ids": [PROMPT],
        "response_ids": [TOKENS],
        "rollout_logprobs": [LOGPROBS],
        "rollout_sample_support": [B64],
    },
}  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_layout_gives_the_same_rollout(document, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(document, indent=1))
    (tmp_path / "lines.jsonl").write_text(f"{json.dumps(document)}\n\n{json.dumps(document)}\n")
    for name, count in (("one.json", 1), ("lines.jsonl", 2)):
        rollouts, _ = read_any(tmp_path / name, PARAMS)
        assert len(rollouts) == count
        for rollout in rollouts:
            assert rollout.prompt_token_ids.tolist() == PROMPT
            assert rollout.token_ids.tolist() == TOKENS
            assert rollout.sampling_mask == MASK
            np.testing.assert_array_equal(rollout.logprobs, np.float32(LOGPROBS))
            assert rollout.sampling_params == PARAMS


def test_tool_turns_fall_out():
    tokens, loss_mask = [*PROMPT, 5, 50, 51, 9], [1, 0, 0, 1]
    rows = {"rollout_top_p_token_ids": [5, 6, 9], "rollout_top_p_token_offsets": [0, 2, 2, 2, 3]}
    sample = {
        "tokens": tokens,
        "response_length": 4,
        "loss_mask": loss_mask,
        "rollout_log_probs": [-0.5, 0, 0, 0.0],
        **rows,
    }
    first, second = rollouts_of(sample, {})
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5], [9])
    assert second.prompt_token_ids.tolist() == [1, 2, 3, 5, 50, 51]
    assert (first.sampling_mask.token_ids, second.sampling_mask.token_ids) == ([[5, 6]], [[9]])
    sky = {
        "prompt_token_ids": [PROMPT], "response_ids": [[5, 50, 9]], "loss_masks": [[1, 0, 1]],
        "rollout_logprobs": [[-0.5, 0, 0]], "rollout_sample_support": [[[5, 6], [-1, -1], [9, -1]]],
    }  # fmt: skip
    assert [r.token_ids.tolist() for r in rollouts_of(sky, {})] == [[5], [9]]


def test_rollout_files_and_parts_are_read(tmp_path):
    path = write_rollouts(tmp_path / "r.parquet", made_rollouts(), {"dtype": "float32"})
    rollouts, metadata = read_any(path, {})
    assert (rollouts, metadata["dtype"]) == (made_rollouts(), "float32")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plain words", "neither a rollout file nor JSON"),
        (json.dumps(VLLM) + "\n{", "line 2: is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1}', "document 1: has none of the members that tell a layout: choices, meta_info"),
        ("3", "document 1: must be an object, got int"),
        (json.dumps(SGLANG), "prompt_token_ids: not in SGLang's answer"),
        ('{"tokens": [1], "response_length": 2}', "response_length=2: must be a number of the tokens"),
        ('{"token_ids": [1]}', "sampled: absent"),
        ('{"response_ids": [[1]]}', "must have one entry a trajectory"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(MaskError, match=says):
        read_any(path, {})
