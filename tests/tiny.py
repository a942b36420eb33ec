"""Checkpoints and tokenizers small enough to build in a test: random weights, 512 ids, contexts of 256 tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 512
MAX_MODEL_LEN = 256
BOS, EOS = 1, 2
WINDOW = 8
CHAT_TEMPLATE = """{% for message in messages -%}
{{ raise_exception('no such role') if message['role'] not in ('user', 'assistant') -}}
<bos>{{ message['role'] }}: {{ message['content'] }}<eos>
{%- endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"""

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},  # biased queries, keys and values
    "qwen3": {},  # normalised queries and keys
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},  # windows in one layer of two
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
}
_WINDOWED = {"gemma3_text": ["sliding_attention", "full_attention"], "gemma2": ["sliding_attention", "full_attention"]}
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def config(architecture: str, **changes):
    """Its config; `changes` go over it, and architectures that are not in `ARCHITECTURES` take the common shape."""
    fields = _SHAPE | ARCHITECTURES.get(architecture, {}) | changes
    if architecture in _WINDOWED:
        fields = {"layer_types": _WINDOWED[architecture]} | fields
    return CONFIG_MAPPING[architecture](**fields)


def save(folder: Path, architecture: str, *, seed: int = 0, **changes) -> Path:
    """Write a checkpoint without a tokenizer; weights large enough for logits that differ and attention that looks."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(architecture, **changes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight * 5 if weight.ndim > 1 else weight + 0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte, then words w259 to w511, as GPT-2 spells them; ids 0 to 2 are <pad>, <bos>, <eos>."""
    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"w{token_id}" for token_id in range(len(names), VOCAB_SIZE)]
    backend = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=10**9
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A few pieces as SentencePiece spells them, and <0x00> to <0xFF> for all other text; a backend alone."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁a", "b", "▁the", "é", "▁<", "world", "▁▁", "▁hello", "\ufffd"]
    backend = Tokenizer(
        models.BPE({name: token_id for token_id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
