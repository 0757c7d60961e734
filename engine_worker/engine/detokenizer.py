"""Tokens to text while they come: never half a character, never one twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_INCOMPLETE: Final = "\ufffd"
# A UTF-8 character has four bytes at most. A decoder shows an incomplete one as up to three
# replacement characters, and five tokens that still end in one hold bytes that never were text.
_MAX_HELD_CHARS: Final = 3
_MAX_HELD_TOKENS: Final = 4
_WINDOW: Final = 8


class Detokenizer:
    """Text of a growing list of token ids, as far as it can no longer change.

    Decoders look at neighbours (leading spaces, runs of bytes), so a token's text is what a short
    window of tokens gains by it, never its own decoding.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], before: Sequence[int] = ()) -> None:
        """`special_ids` have no text (end of turn and the like). `before`: tokens that the text goes on from; without
        them the decoders of SentencePiece's kind take the space from its beginning."""
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window = self._neighbours(before)
        self._settled = len(self._window)  # tokens of the window whose text is out
        self._sent = len(self._decode(self._window))  # characters of the window's text that are out

    def _neighbours(self, before: Sequence[int]) -> list[int]:
        """The last of `before`, from where a character begins; none where they end within one."""
        ordinary = [token for token in before[-2 * _WINDOW :] if token not in self._special_ids]
        for size in range(_WINDOW, _WINDOW + _MAX_HELD_CHARS + 1):
            if not self._decode(ordinary[-size:]).endswith(_INCOMPLETE):
                return ordinary[-size:]
        return []

    def push(self, token_ids: Sequence[int]) -> str:
        """What became printable with `token_ids`."""
        self._window.extend(token for token in token_ids if token not in self._special_ids)
        if self._settled == len(self._window):
            return ""
        text = self._decode(self._window)
        if not text.endswith(_INCOMPLETE):
            new = text[self._sent :]
            # The newest tokens stay, as neighbours of the next.
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._sent = len(self._decode(self._window))
            return new
        if len(self._window) - self._settled <= _MAX_HELD_TOKENS:
            return ""
        # Bytes that are no text: let them out as U+FFFD, but for a tail that may yet become a character.
        new = text[self._sent : -_MAX_HELD_CHARS]
        self._sent += len(new)
        if len(self._window) > _WINDOW:
            self._window = self._window[-_WINDOW:]
            self._settled = 0
            self._sent = max(0, len(self._decode(self._window)) - _MAX_HELD_CHARS)
        return new

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD."""
        text = self._decode(self._window)
        new = text[self._sent :]
        self._settled = len(self._window)
        self._sent = len(text)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
