"""Angles of positions: those of the model's module, and the same bits whatever positions and threads there are."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from keepmask.forward.rotation import Rotation

DIM = 80


def rotation(dtype=torch.float32):
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=DIM, num_attention_heads=1, max_position_embeddings=4096))
    return module, Rotation(module, torch.zeros(1, 1, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_those_of_the_module(dtype):
    module, angles = rotation(dtype)
    for positions in ([0], [3, 1, 700], [2999, 0, 24, 25, 26]):
        at = torch.tensor(positions)
        for got, want in zip(angles(at), module(torch.zeros(1, 1, dtype=dtype), at[None]), strict=True):
            assert got.dtype == dtype
            assert got.is_contiguous()
            torch.testing.assert_close(got, want[0])


def test_a_position_has_the_same_bits_in_any_order_and_on_any_threads(num_threads):
    _, whole = rotation()
    _, stepwise = rotation()
    everything = whole(torch.arange(1000))
    for start in range(0, 1000, 97):
        positions = torch.arange(start, min(start + 97, 1000))
        for got, want in zip(stepwise(positions), everything, strict=True):
            assert torch.equal(got, want[positions])
