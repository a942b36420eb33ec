"""A checkpoint small enough to build in a second: a random Llama, and a tokenizer that maps every id."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
EOS = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_checkpoint(folder: Path, *, seed: int = 0, max_model_len: int = 512, tied: bool = False) -> Path:
    """Write model and tokenizer to `folder`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        eos_token_id=EOS,
        bos_token_id=1,
        tie_word_embeddings=tied,
        initializer_range=0.3,  # logits that differ enough for filters to have something to do
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and words w259 to w511 for the other ids."""
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = specials + letters
    names += [f"w{token_id}" for token_id in range(len(names), VOCAB_SIZE)]
    model = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
