import numpy as np
import pytest
from pydantic import ValidationError

from keepmask.config import EngineConfig
from keepmask.errors import ConfigError


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m"} | options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "legal", "illegal"),
    [
        ("model", ["m"], ["", None, 5]),
        ("tokenizer", [None, "t"], [5]),
        ("skip_tokenizer_init", [True], [1, "yes"]),
        ("dtype", ["auto", "bfloat16", "float16", "float32"], ["int8", None]),
        ("device", ["auto", "cpu", "cuda"], ["cuda:1"]),
        ("seed", [0, 2**63 - 1], [-1, 2**63, 1.0, None]),
        ("max_model_len", [None, 1], [0, -1, "8k"]),
        ("max_num_seqs", [1], [0]),
        ("max_num_batched_tokens", [1], [0]),
        ("block_size", [1, 256], [0, 257, 16.0]),
        ("kv_cache_memory_bytes", [None, 1], [0]),
        ("return_sampling_mask", [False], [0]),
        ("logprobs_mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"], ["raw"]),
        ("max_logprobs", [-1, 0, 2**31 - 1], [-2, 2**31]),
        ("sampling_mask_contract", ["exact", "vllm"], ["strict"]),
        ("sampling_semantics", ["vllm", "vllm-torch", "sglang", "sglang-torch", "hf"], [None]),
        ("max_mask_bytes_per_request", [1], [0]),
        ("ban_unmapped_token_ids", [True], ["no"]),
        ("trust_remote_code", [False, True], [1]),
    ],
)
def test_legal_values_are_taken_and_others_refused_by_name(name, legal, illegal):
    for value in legal:
        assert getattr(EngineConfig(**{"model": "m"} | {name: value}), name) == value
    for value in illegal:
        said = refusal(**{name: value})
        assert said.startswith(f"{name}={value!r}: should ")
        assert said.endswith(EngineConfig.model_fields[name].description)


def test_error_sentences_say_what_came_and_what_is_legal():
    assert refusal(max_num_seqs=0) == (
        "max_num_seqs=0: should be greater than or equal to 1. Most completions decoded in one step."
    )
    assert refusal(max_seqs=1).startswith("max_seqs: unknown engine option; known are ban_unmapped_token_ids, ")
    with pytest.raises(ConfigError, match=r"^model: must be given\. Name of a packaged model"):
        EngineConfig()


def test_masks_need_processed_logprobs():
    config = EngineConfig(model="m", return_sampling_mask=True, logprobs_mode="processed_logprobs")
    assert config.return_sampling_mask
    for mode in ("raw_logprobs", "raw_logits", "processed_logits"):
        said = refusal(return_sampling_mask=True, logprobs_mode=mode)
        assert f"logprobs_mode={mode!r}" in said
        assert "set logprobs_mode='processed_logprobs'" in said


def test_thinking_tokens_come_in_pairs_of_valid_ids():
    config = EngineConfig(model="m", thinking_start_token_ids=[1, 2], thinking_end_token_ids=[3])
    assert config.thinking_start_token_ids == [1, 2]
    for name in ("thinking_start_token_ids", "thinking_end_token_ids"):
        assert "give both or neither" in refusal(**{name: [1]})
    said = refusal(thinking_start_token_ids=[1, -1], thinking_end_token_ids=[2])
    assert said.startswith("thinking_start_token_ids[1]=-1: should be greater than or equal to 0")
    assert refusal(thinking_start_token_ids=["a"]).startswith("thinking_start_token_ids[0]='a': should be a valid int")


def test_numpy_numbers_count_as_what_they_hold():
    assert type(EngineConfig(model="m", seed=np.int64(4)).seed) is int
    assert refusal(block_size=np.float64(16)).startswith("block_size=16.0: should be a valid integer")


def test_the_configuration_is_frozen():
    config = EngineConfig(model="m")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    assert EngineConfig(**config.model_dump()) == config


def test_every_option_has_a_help_text():
    for name, field in EngineConfig.model_fields.items():
        assert field.description, name
