"""Attention on the CPU, from torch's own kernels.

Decode. One call per sequence and layer would spend its time on the call: 20 sequences in 30 layers
are 600 calls. Instead the batch dimension of one product is the *block*: queries are repeated per
block of their sequence, all scores come from one batched product over the whole span of blocks in
use, and the parts of each sequence are joined as in flash-decoding (Dao et al., 2023). It needs no
copy of the cache, no padding to the longest sequence, and works for any block order.

Prefill. Per sequence, through `scaled_dot_product_attention`: there is enough work in each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_worker.attention.interface import KVShape, Segment

# Below this share of wanted blocks in the span, copying them out is cheaper than computing over all.
_DENSE = 0.5


class CpuAttention:
    """Keys and values of all layers, each [layers, blocks, kv_heads, block_size, head_dim]."""

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        self.shape = shape
        size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        # Zeros, which the system maps only once they are written: a masked score is -inf whatever
        # the key was, unless it was NaN, and memory that was never written may hold NaN.
        self.keys = torch.zeros(size, dtype=dtype)
        self.values = torch.zeros(size, dtype=dtype)

    def plan(self, segments: Sequence[Segment]) -> CpuPlan:
        decodes = [segment for segment in segments if segment.num_tokens == 1]
        return CpuPlan(
            self,
            self._rows(segments),
            _DecodePlan.of(decodes, self.shape) if decodes else None,
            [_PrefillPlan.of(segment, self.keys.dtype) for segment in segments[len(decodes) :]],
        )

    def scrub(self, blocks: Sequence[int]) -> None:
        self.keys[:, list(blocks)] = 0
        self.values[:, list(blocks)] = 0

    def _rows(self, segments: Sequence[Segment]) -> Tensor:
        """int64[tokens * kv_heads]: row of each (token, head) in a layer seen as [rows, head_dim]."""
        size, heads = self.shape.block_size, self.shape.num_kv_heads
        parts = []
        for segment in segments:
            positions = np.arange(segment.context_len - segment.num_tokens, segment.context_len)
            blocks = np.asarray(segment.blocks)[positions // size]
            parts.append(blocks * (heads * size) + positions % size)
        rows = np.concatenate(parts)[:, None] + np.arange(heads) * size
        return torch.from_numpy(rows.reshape(-1))


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """See AttentionPlan."""

    cache: CpuAttention
    rows: Tensor
    decode: _DecodePlan | None
    prefills: Sequence[_PrefillPlan]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        head_dim = key.shape[-1]
        keys.view(-1, head_dim).index_copy_(0, self.rows, key[0].transpose(0, 1).reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.rows, value[0].transpose(0, 1).reshape(-1, head_dim))
        out = query.new_empty(query.shape[2], query.shape[1], head_dim)
        if self.decode is not None:
            self.decode.attend(query[0], keys, values, scale, out)
        for prefill in self.prefills:
            prefill.attend(query[0], key[0], value[0], keys, values, scale, out)
        return out[None]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Sequences of one token each, which are the first tokens of the packed row.

    `owner`: int64[blocks], the sequence that each block belongs to; `num_sequences` for a block of
    the span that none of them holds, whose results are dropped.
    `parts`: int64[num_sequences, most blocks of any], each sequence's blocks, its last one repeated.
    `mask`: [blocks, 1, 1, block_size], 0 or -inf.
    """

    num_sequences: int
    span: slice
    gathered: Tensor | None
    """int64[blocks]: the blocks themselves, where the span holds too many others or one block twice."""
    owner: Tensor
    parts: Tensor
    mask: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], shape: KVShape) -> _DecodePlan:
        size = shape.block_size
        used = np.array([-(-segment.context_len // size) for segment in segments])
        blocks = np.concatenate([segment.blocks[:n] for segment, n in zip(segments, used, strict=True)])
        owner = np.repeat(np.arange(len(segments)), used)
        lengths = np.full(len(blocks), size)
        last = np.cumsum(used) - 1
        lengths[last] = [(segment.context_len - 1) % size + 1 for segment in segments]
        parts = np.minimum((last - used + 1)[:, None] + np.arange(used.max()), last[:, None])
        first, end = int(blocks.min()), int(blocks.max()) + 1
        gathered = None
        if len(blocks) < _DENSE * (end - first) or len(np.unique(blocks)) < len(blocks):
            gathered = torch.from_numpy(blocks)
        else:
            at = blocks - first
            spread_owner = np.full(end - first, len(segments))
            spread_lengths = np.full(end - first, size)
            spread_owner[at], spread_lengths[at] = owner, lengths
            owner, lengths, parts = spread_owner, spread_lengths, at[parts]
        outside = torch.from_numpy(np.arange(size) >= lengths[:, None])
        mask = torch.zeros(outside.shape).masked_fill_(outside, -torch.inf)
        return cls(
            num_sequences=len(segments),
            span=slice(first, end),
            gathered=gathered,
            owner=torch.from_numpy(owner),
            parts=torch.from_numpy(parts),
            mask=mask[:, None, None],
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """`query`: [heads, tokens, head_dim]; `keys`, `values`: one layer's; writes out[:num_sequences]."""
        if self.gathered is None:
            keys, values = keys[self.span], values[self.span]
        else:
            keys, values = keys.index_select(0, self.gathered), values.index_select(0, self.gathered)
        blocks, kv_heads, size, head_dim = keys.shape
        n, heads = self.num_sequences, query.shape[0]
        group = heads // kv_heads
        # One more row than sequences, for the blocks of nobody.
        padded = query.new_zeros(n + 1, heads, head_dim)
        torch.mul(query[:, :n].transpose(0, 1), scale, out=padded[:n])
        repeated = padded.index_select(0, self.owner).view(blocks * kv_heads, group, head_dim)
        scores = torch.bmm(repeated, keys.view(blocks * kv_heads, size, head_dim).transpose(1, 2))
        scores = scores.view(blocks, kv_heads, group, size).add_(self.mask)
        # Softmax over the blocks of each sequence: a common maximum, then sums.
        highest = scores.new_zeros(n + 1, kv_heads, group)
        torch.amax(scores.amax(dim=-1)[self.parts], dim=1, out=highest[:n])
        scores.sub_(highest.index_select(0, self.owner)[..., None]).exp_()
        weighted = torch.bmm(
            scores.view(blocks * kv_heads, group, size), values.view(blocks * kv_heads, size, head_dim)
        )
        joined = query.new_zeros(n + 1, heads, head_dim)
        joined.index_add_(0, self.owner, weighted.view(blocks, heads, head_dim))
        total = query.new_zeros(n + 1, heads)
        total.index_add_(0, self.owner, scores.sum(dim=-1).view(blocks, heads))
        torch.div(joined[:n], total[:n, :, None], out=out[:n])


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    """A chunk of one sequence's tokens."""

    segment: Segment
    blocks: Tensor | None
    """int64[blocks] of the context; None for a chunk that is its whole context."""
    mask: Tensor | None
    """[tokens, context], 0 or -inf: causal from the chunk's offset on."""

    @classmethod
    def of(cls, segment: Segment, dtype: torch.dtype) -> _PrefillPlan:
        tokens, context = segment.num_tokens, segment.context_len
        if tokens == context:
            return cls(segment, None, None)
        later = torch.ones(tokens, context, dtype=torch.bool).triu_(context - tokens + 1)
        mask = torch.zeros(tokens, context, dtype=dtype).masked_fill_(later, -torch.inf)
        return cls(segment, torch.tensor(segment.blocks), mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """`query`, `key`, `value`: the step's, [heads, tokens, head_dim]; writes out[the segment's tokens]."""
        tokens = slice(self.segment.start, self.segment.start + self.segment.num_tokens)
        if self.blocks is None:
            key, value = key[:, tokens], value[:, tokens]
        else:
            key, value = self._context(keys), self._context(values)
        kv_heads = key.shape[0]
        # Grouped queries as a batch of kv_heads: each key is shared by expansion, not by a copy.
        grouped = query[:, tokens].view(kv_heads, -1, self.segment.num_tokens, query.shape[-1])
        shape = (-1, grouped.shape[1], -1, -1)
        result = scaled_dot_product_attention(
            grouped,
            key[:, None].expand(shape),
            value[:, None].expand(shape),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
        )
        out[tokens] = result.flatten(0, 1).transpose(0, 1)

    def _context(self, cache: Tensor) -> Tensor:
        """[kv_heads, context, head_dim] of one layer's keys or values."""
        assert self.blocks is not None
        return cache.index_select(0, self.blocks).transpose(0, 1).flatten(1, 2)[:, : self.segment.context_len]
