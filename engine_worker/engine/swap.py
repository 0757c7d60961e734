"""Host memory for the blocks of preempted sequences: which of its blocks are taken, and when that pays. No tensors.

A preempted sequence comes back by computing its tokens again, or by copying its blocks out and in. Both
costs grow with its length, so what is cheaper is a property of machine and model: two copies of a block
against its tokens in a prompt. The copy is measured at start, the tokens as they are computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.3


@dataclass(frozen=True, slots=True)
class Move:
    """Copies of whole blocks, in all layers: `device[i]` to `host[i]`, or back."""

    to_host: bool
    device: Rows[int]
    host: Rows[int]


class HostBlocks:
    """`copy_s`: what copying one block takes, one way."""

    def __init__(self, num_blocks: int, *, block_size: int, copy_s: float = 0.0) -> None:
        self.total = num_blocks
        self._block_s = 2 * copy_s / block_size
        self._token_s: float | None = None
        self._free = list(range(num_blocks))

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def pays(self) -> bool:
        """Until a prompt was computed nobody knows, and copies rarely lose."""
        return self._token_s is None or self._block_s < self._token_s

    def note_prompt(self, duration_s: float, num_tokens: int) -> None:
        """A step that computed little else than so many prompt tokens."""
        token_s = duration_s / num_tokens
        old = token_s if self._token_s is None else self._token_s
        self._token_s = old + _SMOOTHING * (token_s - old)

    def take(self, count: int) -> list[int]:
        """So many blocks; none where they are too few, or copying does not pay."""
        if count > len(self._free) or not self.pays:
            return []
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, blocks: Rows[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)
