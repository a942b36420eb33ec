"""`TokenBytes`: the bytes that a token stands for, which its text alone cannot always tell."""

from __future__ import annotations

from typing import Any

__all__ = ["TokenBytes", "byte_values"]

_SPACE = "▁"


class TokenBytes:
    """Bytes of a token id, whatever tokens stand around it. Ids the tokenizer does not map have none.

    tokenizer: the backend. Byte-level tokens (GPT-2's alphabet) may end within a character, and so do
    <0x00> to <0xFF> of SentencePiece, which writes a space as "▁". Others stand for the text they decode to.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._byte_values = byte_values(tokenizer)
        self._alphabet = _alphabet() if _decodes(tokenizer, "Ġ", " ") else {}
        self._spaced = any(
            _decodes(tokenizer, f"{_SPACE}{word}", text) for word in ("a", "the") for text in (word, f" {word}")
        )

    def __call__(self, token_id: int) -> bytes:
        """The bytes of the token, before any stripping at the start of a text."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        if (value := self._byte_values.get(token_id)) is not None:
            return bytes([value])
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self._alphabet and all(letter in self._alphabet for letter in name):
            return bytes(self._alphabet[letter] for letter in name)
        text: str = name.replace(_SPACE, " ") if self._spaced else self._backend.decode([token_id])
        return text.encode()


def byte_values(tokenizer: Any) -> dict[int, int]:
    """The byte that each of <0x00> to <0xFF> stands for, by its id, if this backend reads them so, as SentencePiece
    models do.

    It decodes a run of them together: one wrong byte turns them all into replacement characters, those before it too.
    """
    if not _decodes(tokenizer, "<0x41>", "A"):
        return {}
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    ids.pop(None, None)
    return ids


def _decodes(tokenizer: Any, name: str, text: str) -> bool:
    """Whether there is a token of this name, and it decodes to this text."""
    token_id = tokenizer.token_to_id(name)
    return token_id is not None and tokenizer.decode([token_id]) == text


def _alphabet() -> dict[str, int]:
    """The byte of each letter that byte-level tokenizers write it as: printable ones as themselves, others from 256 on.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}
