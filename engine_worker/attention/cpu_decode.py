"""Attention of sequences of one token each, as one group, from torch's own kernels.

One call per sequence and layer would spend its time on the call: 20 sequences in 30 layers
are 600 calls. Instead the batch dimension of one product is the *block*: queries are repeated per
block of their sequence, all scores come from a batched product or a few over stretches of blocks in
use, and the parts of each sequence are joined as in flash-decoding (Dao et al., 2023). It needs no
copy of the cache, no padding to the longest sequence, and works for any block order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.interface import KVShape, Scoring, Segment

_GAP: Final = 4
"""A product's call costs as much as computing over so many blocks: so many of nobody's are not gone round."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences of one token each, which are the first tokens of the packed row.

    `owner`: int64[blocks], the sequence that each block belongs to; `num_sequences` for a block that none of
    them holds, between two of theirs, whose results are dropped. `asked`: the same, but for these blocks some
    sequence.
    `parts`: int64[num_sequences, most blocks of any], each sequence's blocks, its last one repeated.
    `mask`: [blocks, 1, 1, block_size], 0 or -inf.
    """

    num_sequences: int
    runs: Sequence[tuple[slice, slice]]
    """Heads of blocks that lie together: where in the cache or in what is gathered, and where here."""
    gathered: Tensor | None
    """int64[blocks]: the blocks themselves, where they lie in too many runs or one is held twice."""
    owner: Tensor
    asked: Tensor
    parts: Tensor
    mask: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], shape: KVShape, window: int | None) -> DecodePlan:
        size = shape.block_size
        ends = np.array([segment.context_len for segment in segments])
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        used = -(-ends // size) - firsts // size
        blocks = np.concatenate(
            [
                segment.blocks[first : first + n]
                for segment, first, n in zip(segments, firsts // size, used, strict=True)
            ]
        )
        owner = np.repeat(np.arange(len(segments)), used)
        last = np.cumsum(used) - 1
        begins, lengths = np.zeros(len(blocks), dtype=np.int64), np.full(len(blocks), size)
        begins[last - used + 1] = firsts % size
        lengths[last] = (ends - 1) % size + 1
        parts = np.minimum((last - used + 1)[:, None] + np.arange(used.max()), last[:, None])
        runs, at = _runs(blocks)
        gathered = None
        if _GAP * len(runs) > len(blocks) or len(np.unique(blocks)) < len(blocks):
            gathered, runs = torch.from_numpy(blocks), [(slice(0, len(blocks)), slice(0, len(blocks)))]
        else:
            spread_owner = np.full(runs[-1][1].stop, len(segments))
            # Blocks of nobody are hidden whole: beside another's highest score theirs might overflow.
            spread_begins, spread_lengths = np.full_like(spread_owner, size), np.full_like(spread_owner, size)
            spread_owner[at], spread_begins[at], spread_lengths[at] = owner, begins, lengths
            owner, begins, lengths, parts = spread_owner, spread_begins, spread_lengths, at[parts]
        slot = np.arange(size)
        outside = torch.from_numpy((slot < begins[:, None]) | (slot >= lengths[:, None]))
        mask = torch.zeros(outside.shape).masked_fill_(outside, -torch.inf)
        return cls(
            num_sequences=len(segments),
            runs=[(_heads(there, shape), _heads(here, shape)) for there, here in runs],
            gathered=gathered,
            owner=torch.from_numpy(owner),
            asked=torch.from_numpy(np.minimum(owner, len(segments) - 1)),
            parts=torch.from_numpy(parts),
            mask=mask[:, None, None],
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, out: Tensor) -> None:
        """`query`: [tokens, heads, head_dim]; `keys`, `values`: one layer's; writes out[:num_sequences]."""
        if self.gathered is not None:
            keys, values = keys.index_select(0, self.gathered), values.index_select(0, self.gathered)
        _, kv_heads, size, head_dim = values.shape
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        n, heads, blocks = self.num_sequences, query.shape[1], len(self.asked)
        group = heads // kv_heads
        scaled = query[:n] * scoring.scale
        repeated = scaled.index_select(0, self.asked).view(blocks * kv_heads, group, head_dim)
        scores = query.new_empty(blocks * kv_heads, group, size)
        for there, here in self.runs:
            torch.bmm(repeated[here], keys[there], out=scores[here])
        scoring.cap_(scores)
        scores = scores.view(blocks, kv_heads, group, size).add_(self.mask)
        # Softmax over the blocks of each sequence: a common maximum, then sums.
        highest = scores.amax(dim=-1)[self.parts].amax(dim=1)
        scores.sub_(highest.index_select(0, self.asked)[..., None]).exp_()
        by_head = scores.view(blocks * kv_heads, group, size)
        weighted = query.new_empty(blocks * kv_heads, group, head_dim)
        for there, here in self.runs:
            torch.bmm(by_head[here], values[there], out=weighted[here])
        # One more row than sequences, for the blocks of nobody.
        joined = query.new_zeros(n + 1, heads, head_dim)
        joined.index_add_(0, self.owner, weighted.view(blocks, heads, head_dim))
        total = query.new_zeros(n + 1, heads)
        total.index_add_(0, self.owner, scores.sum(dim=-1).view(blocks, heads))
        torch.div(joined[:n], total[:n, :, None], out=out[:n])


def _runs(blocks: NDArray[np.int64]) -> tuple[list[tuple[slice, slice]], NDArray[np.int64]]:
    """Stretches of the cache that hold all `blocks`, each with its place when they are put end to end; and the place of
    each block. No stretch has more than `_GAP` blocks together that are not asked for."""
    ordered = np.sort(blocks)
    gaps = np.flatnonzero(np.diff(ordered) > _GAP + 1)
    firsts, ends = ordered[np.append(0, gaps + 1)], ordered[np.append(gaps, -1)] + 1
    places = np.cumsum(ends - firsts)
    begins = places - (ends - firsts)
    run = np.searchsorted(firsts, blocks, side="right") - 1
    stretches = zip(firsts.tolist(), ends.tolist(), begins.tolist(), places.tolist(), strict=True)
    return [(slice(f, e), slice(b, p)) for f, e, b, p in stretches], begins[run] + blocks - firsts[run]


def _heads(blocks: slice, shape: KVShape) -> slice:
    return slice(blocks.start * shape.num_kv_heads, blocks.stop * shape.num_kv_heads)
