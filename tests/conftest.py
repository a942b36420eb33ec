"""Fixtures shared by the whole suite."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Kernels in Triton then run on the CPU. It reads this when first imported, which PyTorch does in many places.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("check", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("check")


@pytest.fixture(params=[1, 2, 5])
def num_threads(request):
    """Threads that torch has during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """tiny_checkpoint(architecture): the folder of a random checkpoint without a tokenizer, made once."""
    import tiny

    return functools.cache(lambda architecture: tiny.save(tmp_path_factory.mktemp(architecture), architecture))


@pytest.fixture(scope="session")
def tiny_with_text(tmp_path_factory) -> Path:
    """The folder of a random Llama with a tokenizer of bytes and a few words."""
    import tiny

    folder = tiny.save(tmp_path_factory.mktemp("text"), "llama")
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llm(tiny_checkpoint) -> Callable[..., object]:
    """tiny_llm(architecture="llama", **options): an LLM over a random checkpoint, float32, made once for all who ask.

    Tests that share one leave it without requests. Options are those of `EngineConfig`.
    """
    from keepmask import LLM

    @functools.cache
    def make(architecture="llama", **options):
        given = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True, "device": "cpu"}
        return LLM(str(tiny_checkpoint(architecture)), **given | options)

    return make


@pytest.fixture(scope="session")
def smollm2():
    """The packaged SmolLM2 in float32, masks on: real weights, shared by the few tests that need them."""
    from keepmask import LLM

    return LLM(
        "smollm2-135m",
        dtype="float32",
        device="cpu",
        max_model_len=512,
        kv_cache_memory_bytes=192 * 2**20,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )
