"""A step of single tokens as one array, of the size that its graph was captured for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine_worker.attention.interface import Segment

KNOWN: Final = -1
"""Where a token comes from: it is known. Else the row of the step before that chooses it."""


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, and then in steps that waste an eighth of the rows at most."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size += max(1, size // 4) if size >= 8 else size
    return [*sizes, max_num_seqs]


def decode_size(rows: int, blocks: int) -> int:
    return rows * (5 + blocks) + rows + 1


def pack_decode(
    token_ids: Sequence[int],
    positions: Sequence[int],
    segments: Sequence[Segment],
    sources: Sequence[int],
    rows: int,
    blocks: int,
    block_size: int,
) -> NDArray[np.int32]:
    """A decode step as one array: ids, positions, sources, slots, lengths, context starts, block tables.

    Rows beyond the segments are one token long, at the beginning of the scratch block.
    """
    n = len(segments)
    head = np.zeros((5, rows), np.int32)
    head[2], head[4] = KNOWN, 1
    head[0, :n], head[1, :n], head[2, :n] = token_ids, positions, sources
    tables = np.zeros((rows, blocks), np.int32)
    for row, segment in enumerate(segments):
        used = -(-segment.context_len // block_size)
        tables[row, :used] = segment.blocks[:used]
        last = segment.context_len - 1
        head[3, row] = tables[row, last // block_size] * block_size + last % block_size
        head[4, row] = segment.context_len
    starts = np.concatenate([[0], head[4].cumsum()]).astype(np.int32)
    return np.concatenate([head.reshape(-1), starts, tables.reshape(-1)])
