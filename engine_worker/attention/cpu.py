"""Attention on the CPU, from torch's own kernels.

Decode. One call per sequence and layer would spend its time on the call: 20 sequences in 30 layers
are 600 calls. Instead the batch dimension of one product is the *block*: queries are repeated per
block of their sequence, all scores come from one batched product over the whole span of blocks in
use, and the parts of each sequence are joined as in flash-decoding (Dao et al., 2023). It needs no
copy of the cache, no padding to the longest sequence, and works for any block order.

Prefill. Per sequence, through `scaled_dot_product_attention`: there is enough work in each call.

Windows. Layers that see only the last tokens get plans of their own, over the blocks that they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_worker.attention.interface import KVShape, Scoring, Segment, zeroed

# Below this share of wanted blocks in the span, copying them out is cheaper than computing over all.
_DENSE = 0.5


class CpuAttention:
    """Keys and values of all layers.

    `keys`: [layers, blocks, kv_heads, head_dim, block_size], so that a decode's product of queries and keys
    runs along memory: 1.6 times as fast as over keys that lie as values do.
    `values`: [layers, blocks, kv_heads, block_size, head_dim].
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        heads = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        self.keys = zeroed(*heads, shape.head_dim, shape.block_size)
        self.values = zeroed(*heads, shape.block_size, shape.head_dim)
        self.layers = [
            _LayerCache(keys, values, keys.permute(0, 3, 1, 2), values.transpose(1, 2))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def plan(self, segments: Sequence[Segment]) -> CpuPlan:
        return CpuPlan(self, *self._slots(segments), segments)

    def scrub(self, blocks: Sequence[int]) -> None:
        self.keys[:, list(blocks)] = 0
        self.values[:, list(blocks)] = 0

    def _slots(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """int64[tokens] each: the block that each token's key and value go to, and where in it."""
        positions = [
            np.arange(segment.context_len - segment.num_tokens, segment.context_len) for segment in segments
        ]
        size = self.shape.block_size
        blocks = [
            np.asarray(segment.blocks)[at // size] for segment, at in zip(segments, positions, strict=True)
        ]
        return torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(np.concatenate(positions) % size)


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """One layer's part, and both as [blocks, block_size, kv_heads, head_dim], where tokens are stored."""

    keys: Tensor
    values: Tensor
    key_slots: Tensor
    value_slots: Tensor


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """See AttentionPlan."""

    cache: CpuAttention
    blocks: Tensor
    offsets: Tensor
    segments: Sequence[Segment]
    views: dict[tuple[int | None, bool], _View] = field(default_factory=dict)
    """What layers of one kind share, made when the first of them comes by."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        cache = self.cache.layers[layer]
        slots = (self.blocks, self.offsets)
        cache.key_slots.index_put_(slots, key)
        cache.value_slots.index_put_(slots, value)
        out = query.new_empty(query.shape)
        view = self._view(scoring)
        if view.decode is not None:
            view.decode.attend(query, cache, scoring, out)
        for prefill in view.prefills:
            prefill.attend(query, key, value, cache, scoring, out)
        return out

    def _view(self, scoring: Scoring) -> _View:
        kind = (scoring.window, scoring.softcap is not None)
        if kind not in self.views:
            shape = self.cache.shape
            decodes = [segment for segment in self.segments if segment.num_tokens == 1]
            self.views[kind] = _View(
                _DecodePlan.of(decodes, shape, scoring.window) if decodes else None,
                [_PrefillPlan.of(segment, shape, scoring) for segment in self.segments[len(decodes) :]],
            )
        return self.views[kind]


@dataclass(frozen=True, slots=True)
class _View:
    decode: _DecodePlan | None
    prefills: Sequence[_PrefillPlan]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Sequences of one token each, which are the first tokens of the packed row.

    `owner`: int64[blocks], the sequence that each block belongs to; `num_sequences` for a block of
    the span that none of them holds, whose results are dropped. `asked`: the same, but for these blocks some
    sequence.
    `parts`: int64[num_sequences, most blocks of any], each sequence's blocks, its last one repeated.
    `mask`: [blocks, 1, 1, block_size], 0 or -inf.
    """

    num_sequences: int
    span: slice
    gathered: Tensor | None
    """int64[blocks]: the blocks themselves, where the span holds too many others or one block twice."""
    owner: Tensor
    asked: Tensor
    parts: Tensor
    mask: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], shape: KVShape, window: int | None) -> _DecodePlan:
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
        first, end = int(blocks.min()), int(blocks.max()) + 1
        gathered = None
        if len(blocks) < _DENSE * (end - first) or len(np.unique(blocks)) < len(blocks):
            gathered = torch.from_numpy(blocks)
        else:
            at = blocks - first
            spread_owner = np.full(end - first, len(segments))
            # Blocks of nobody are hidden whole: beside another's highest score theirs might overflow.
            spread_begins, spread_lengths = np.full_like(spread_owner, size), np.full_like(spread_owner, size)
            spread_owner[at], spread_begins[at], spread_lengths[at] = owner, begins, lengths
            owner, begins, lengths, parts = spread_owner, spread_begins, spread_lengths, at[parts]
        slot = np.arange(size)
        outside = torch.from_numpy((slot < begins[:, None]) | (slot >= lengths[:, None]))
        mask = torch.zeros(outside.shape).masked_fill_(outside, -torch.inf)
        return cls(
            num_sequences=len(segments),
            span=slice(first, end),
            gathered=gathered,
            owner=torch.from_numpy(owner),
            asked=torch.from_numpy(np.minimum(owner, len(segments) - 1)),
            parts=torch.from_numpy(parts),
            mask=mask[:, None, None],
        )

    def attend(self, query: Tensor, cache: _LayerCache, scoring: Scoring, out: Tensor) -> None:
        """`query`: [tokens, heads, head_dim]; writes out[:num_sequences]."""
        if self.gathered is None:
            keys, values = cache.keys[self.span], cache.values[self.span]
        else:
            keys = cache.keys.index_select(0, self.gathered)
            values = cache.values.index_select(0, self.gathered)
        blocks, kv_heads, size, head_dim = values.shape
        n, heads = self.num_sequences, query.shape[1]
        group = heads // kv_heads
        scaled = query[:n] * scoring.scale
        repeated = scaled.index_select(0, self.asked).view(blocks * kv_heads, group, head_dim)
        scores = torch.bmm(repeated, keys.view(blocks * kv_heads, head_dim, size))
        _cap(scores, scoring.softcap)
        scores = scores.view(blocks, kv_heads, group, size).add_(self.mask)
        # Softmax over the blocks of each sequence: a common maximum, then sums.
        highest = scores.amax(dim=-1)[self.parts].amax(dim=1)
        scores.sub_(highest.index_select(0, self.asked)[..., None]).exp_()
        weighted = torch.bmm(
            scores.view(blocks * kv_heads, group, size), values.view(blocks * kv_heads, size, head_dim)
        )
        # One more row than sequences, for the blocks of nobody.
        joined = query.new_zeros(n + 1, heads, head_dim)
        joined.index_add_(0, self.owner, weighted.view(blocks, heads, head_dim))
        total = query.new_zeros(n + 1, heads)
        total.index_add_(0, self.owner, scores.sum(dim=-1).view(blocks, heads))
        torch.div(joined[:n], total[:n, :, None], out=out[:n])


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    """A chunk of one sequence's tokens."""

    segment: Segment
    first: int
    """The first position of the context that is looked at: a multiple of the block size."""
    blocks: Tensor | None
    """int64[blocks] of the context from `first` on; None for a chunk that is its whole context."""
    mask: Tensor | None
    """[tokens, context - first], 0 or -inf; None: causal, and the chunk is its whole context."""

    @classmethod
    def of(cls, segment: Segment, shape: KVShape, scoring: Scoring) -> _PrefillPlan:
        tokens, context, size = segment.num_tokens, segment.context_len, shape.block_size
        window = context if scoring.window is None else scoring.window
        if tokens == context and window >= context and scoring.softcap is None:
            return cls(segment, 0, None, None)
        before = context - tokens
        first = max(0, before + 1 - window) // size * size
        hidden = torch.ones(tokens, context - first, dtype=torch.bool).triu_(before - first + 1)
        if window < context:
            hidden |= torch.ones_like(hidden).tril_(before - first - window)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        blocks = None if tokens == context else torch.tensor(segment.blocks[first // size :])
        return cls(segment, first, blocks, mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: _LayerCache,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """`query`, `key`, `value`: the step's, [tokens, heads, head_dim]; writes out[the segment's tokens]."""
        tokens = slice(self.segment.start, self.segment.start + self.segment.num_tokens)
        if self.blocks is None:
            key, value = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
        else:
            key = self._context(cache.keys.index_select(0, self.blocks).transpose(2, 3))
            value = self._context(cache.values.index_select(0, self.blocks))
        kv_heads, _, head_dim = key.shape
        # Grouped queries as a batch of kv_heads: each key is shared by expansion, not by a copy.
        grouped = query[tokens].transpose(0, 1).view(kv_heads, -1, self.segment.num_tokens, head_dim)
        if scoring.softcap is None:
            shape = (-1, grouped.shape[1], -1, -1)
            result = scaled_dot_product_attention(
                grouped,
                key[:, None].expand(shape),
                value[:, None].expand(shape),
                attn_mask=self.mask,
                is_causal=self.mask is None,
                scale=scoring.scale,
            )
        else:
            assert self.mask is not None
            scores = torch.matmul(grouped, key[:, None].transpose(2, 3)).mul_(scoring.scale)
            _cap(scores, scoring.softcap)
            result = torch.matmul(scores.add_(self.mask).softmax(-1), value[:, None])
        out[tokens] = result.flatten(0, 1).transpose(0, 1)

    def _context(self, blocks: Tensor) -> Tensor:
        """[blocks, kv_heads, block_size, head_dim] to [kv_heads, context - first, head_dim]."""
        return blocks.transpose(0, 1).flatten(1, 2)[:, : self.segment.context_len - self.first]


def _cap(scores: Tensor, softcap: float | None) -> None:
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
