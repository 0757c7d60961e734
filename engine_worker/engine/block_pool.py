"""Paged KV memory: who holds which block, and which blocks are kept for their content. No tensors.

Each block is in exactly one state: free, cached (nobody holds it, it is kept for its content and
taken when free ones run out) or used (one or more sequences hold it). Block 0 is scratch: it is never
handed out, so padding and absent entries may point at it without harm.

A full block may be known by a key of its content (`prefix.PrefixKeys`). Who holds a known block only
reads it: it is full, so nothing is written to it any more.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Only the pool changes it."""

    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    """Blocks at its head whose content has been found by, or told to, the pool."""


class BlockPool:
    """Hands out KV blocks and takes them back. Raises ValueError for a pool without a usable block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs a scratch block and at least one more")
        self.block_size = block_size
        self.total = num_blocks - 1
        # The lowest free block goes first, which keeps blocks in use close together.
        self._free = list(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Known blocks that nobody holds, the one to be taken first at the front.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks without content that anybody could want."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds, kept for their content."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        return self.total - self.available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known head of `keys`."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cost(self, num_tokens: int, found: Sequence[int], released: Collection[int] = ()) -> int:
        """How many available blocks a new sequence of `num_tokens` takes if it shares the blocks `found`.

        `released`: blocks to be counted as if nobody held them.
        """
        shared = sum(1 for block in found if self._refs[block] and block not in released)
        return self.blocks_for(num_tokens) - shared

    def freed_by(self, tables: Iterable[BlockTable]) -> set[int]:
        """The blocks that would have no holder left if `tables` were released."""
        held = Counter(block for table in tables for block in table.blocks)
        return {block for block, count in held.items() if self._refs[block] == count}

    def share(self, table: BlockTable, found: Sequence[int]) -> None:
        """Puts known blocks at the head of an empty table."""
        assert not table.blocks, "only an empty table can start with known blocks"
        for block in found:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
        table.blocks.extend(found)
        table.num_known = len(found)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes `table` large enough for `num_tokens`. False, and nothing changed, if too few are available."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.available:
            return False
        for _ in range(missing):
            block = self._take()
            self._refs[block] = 1
            table.blocks.append(block)
        return True

    def learn(self, table: BlockTable, keys: Sequence[bytes]) -> None:
        """The first blocks of `table` hold what `keys` say, and will not change. One key per block."""
        for at in range(table.num_known, len(keys)):
            # Another block may have the same content, computed at the same time: the first one stays
            # known, this one is freed like any other.
            if keys[at] not in self._block_of:
                self._block_of[keys[at]] = table.blocks[at]
                self._key_of[table.blocks[at]] = keys[at]
        table.num_known = max(table.num_known, len(keys))

    def forget(self, table: BlockTable) -> list[int]:
        """Nobody will find the blocks of `table` any more. Returns those that no other table holds."""
        for block in table.blocks:
            self._unlearn(block)
        return [block for block in table.blocks if self._refs[block] == 1]

    def release(self, table: BlockTable) -> None:
        """Gives back all blocks of `table`. The one place where blocks are freed; a second call does nothing."""
        blocks, table.blocks, table.num_known = table.blocks, [], 0
        # Last first: without its beginning a chain is of no use, so its end is to be taken first.
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    heapq.heappush(self._free, block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError unless `tables`, the live ones, account for every block exactly."""
        held = Counter(block for table in tables for block in table.blocks)
        assert 0 not in held, "the scratch block was handed out"
        assert held == Counter({b: n for b, n in enumerate(self._refs) if n}), "reference counts are off"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is both free and used"
        assert not self._cached.keys() & held.keys(), "a block is both cached and used"
        assert not self._cached.keys() & free, "a block is both cached and free"
        assert len(free) + len(self._cached) + len(held) == self.total, "blocks were lost"
        assert self._key_of == {block: key for key, block in self._block_of.items()}, "keys are off"
        assert self._cached.keys() <= self._key_of.keys(), "a block is cached that nobody can find"
        assert not free & self._key_of.keys(), "a free block can be found"

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        block, _ = self._cached.popitem(last=False)
        self._unlearn(block)
        return block

    def _unlearn(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
