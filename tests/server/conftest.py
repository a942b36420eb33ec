"""Servers shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Serving

import tiny

CHAT_TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a context of 512 tokens, a tokenizer that maps every id, and a chat template."""
    folder = tiny.save(tmp_path_factory.mktemp("served"), "llama", max_position_embeddings=512)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared(checkpoint: Path) -> Iterator[Serving]:
    """A server for tests that leave it as they found it."""
    with Serving(checkpoint) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.settle()
