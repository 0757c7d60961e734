"""The text of single tokens, for log probabilities: a token may be half a character, so bytes come first."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """What each token id stands for. The bytes of a text's tokens, joined, are the text's."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in set(_decoder_types(tokenizer_json))
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            # GPT-2's printable stand-in for each byte.
            return bytes(_byte_of_char()[char] for char in token if char in _byte_of_char())
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Bytes that are no whole character show as U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


class _Described(msgspec.Struct):
    """The one part of a tokenizer.json that is looked at: the rest, megabytes, is skipped."""

    decoder: Any = None


def _decoder_types(tokenizer_json: bytes) -> list[str]:
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.append(str(node.get("type")))
            for inner in node.get("decoders") or ():
                walk(inner)

    walk(msgspec.json.decode(tokenizer_json, type=_Described).decoder)
    return found


@cache
def _byte_of_char() -> dict[str, int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
