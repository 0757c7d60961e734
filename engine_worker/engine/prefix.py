"""Names for the content of KV blocks, so that equal beginnings of prompts are computed once.

A block's key is SHA-256 over the key of the block before it and its own tokens; the first one's
predecessor stands for everything else that keys and values depend on, and for who may find them: the
tenant's salt. A collision would hand one tenant's text to another, hence a cryptographic hash.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_key(*, model_revision: str, adapter: str = "", salt: str = "") -> bytes:
    """What every chain of one model, adapter and tenant begins with."""
    digest = hashlib.sha256(b"weir.prefix.1")
    for part in (model_revision, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class PrefixKeys:
    """The keys of one sequence's full blocks, made when asked for and kept."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._keys: list[bytes] = []

    def of(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """One key per full block among the first `num_tokens` of `token_ids`, which only ever grows."""
        size, count = self._block_size, num_tokens // self._block_size
        while len(self._keys) < count:
            at = len(self._keys) * size
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.sha256(parent + array("q", token_ids[at : at + size])).digest())
        return self._keys[:count]
