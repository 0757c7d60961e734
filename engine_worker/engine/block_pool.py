"""Paged KV memory: who holds which block. Pure bookkeeping, no tensors.

Each block is in exactly one state: free, cached (kept for its content, taken when free ones run
out) or used. Block 0 is scratch: it is never handed out, so padding and absent entries may point
at it without harm.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Only the pool changes it."""

    blocks: list[int] = field(default_factory=list)


class BlockPool:
    """Hands out KV blocks and takes them back. Raises ValueError for a pool without a usable block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs a scratch block and at least one more")
        self.block_size = block_size
        self.total = num_blocks - 1
        # The lowest free block goes first: the CPU backend computes over the span from the first to
        # the last block in use, so blocks in use should lie close together.
        self._free = list(range(1, num_blocks))
        self._refs = [0] * num_blocks

    @property
    def free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """How many more blocks `table` needs to hold `num_tokens`."""
        return max(0, self.blocks_for(num_tokens) - len(table.blocks))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes `table` large enough for `num_tokens`. False, and nothing changed, if too few are free."""
        missing = self.missing(table, num_tokens)
        if missing > self.free:
            return False
        for _ in range(missing):
            block = heapq.heappop(self._free)
            self._refs[block] = 1
            table.blocks.append(block)
        return True

    def release(self, table: BlockTable) -> None:
        """Gives back all blocks of `table`. The one place where blocks are freed; a second call does nothing."""
        blocks, table.blocks = table.blocks, []
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                heapq.heappush(self._free, block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError unless `tables`, the live ones, account for every block exactly."""
        held = Counter(block for table in tables for block in table.blocks)
        assert 0 not in held, "the scratch block was handed out"
        assert held == Counter({b: n for b, n in enumerate(self._refs) if n}), "reference counts are off"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is both free and used"
        assert len(free) + len(held) == self.total, "blocks were lost"
