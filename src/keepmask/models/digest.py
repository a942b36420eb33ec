"""`digests`: what a checkpoint and its tokenizer are, whatever their folder is called."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

__all__ = ["digests"]

_WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|config\.json")
_TOKENIZER = re.compile(r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|spiece|sentencepiece).*")


def digests(source: str) -> dict[str, str]:
    """`checkpoint` and `tokenizer`, each a digest in hex of names and bytes of the files, or `commit <id>` of a hub id.

    source: a checkpoint's folder or a hub id, as `engine.loading.checkpoint` gives it.
    """
    folder = Path(source)
    if not folder.is_dir():
        from transformers.utils import cached_file
        from transformers.utils.hub import extract_commit_hash

        commit = f"commit {extract_commit_hash(cached_file(source, 'config.json'), None)}"
        return {"checkpoint": commit, "tokenizer": commit}
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return {
        "checkpoint": _digest([file for file in files if _WEIGHTS.fullmatch(file.name)]),
        "tokenizer": _digest([file for file in files if _TOKENIZER.fullmatch(file.name)]),
    }


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:32]
