"""What a plain `transformers` forward says: eager attention, float32, no cache."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@functools.cache
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits(folder: Path, token_ids) -> np.ndarray:
    """[T, V] float64: row t scores the token after token_ids[t]."""
    return logits_of(model(folder), token_ids)


@torch.inference_mode()
def logits_of(network, token_ids) -> np.ndarray:
    return network(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].double().numpy()


def row(entry, width) -> np.ndarray:
    """[V]: a `logprobs` entry that names every id, as an array."""
    assert sorted(entry) == list(range(width))
    return np.array([entry[token_id].logprob for token_id in range(width)])


def rows(entries, width) -> np.ndarray:
    """[T, V] of T such entries."""
    return np.stack([row(entry, width) for entry in entries])
