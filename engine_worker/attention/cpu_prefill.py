"""Attention of one sequence's chunk of tokens, by `scaled_dot_product_attention`: each call has work enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_worker.attention.interface import KVShape, Scoring, Segment


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A chunk of one sequence's tokens."""

    segment: Segment
    first: int
    """The first position of the context that is looked at: a multiple of the block size."""
    blocks: Tensor | None
    """int64[blocks] of the context from `first` on; None for a chunk that is its whole context."""
    mask: Tensor | None
    """[tokens, context - first], 0 or -inf; None: causal, and the chunk is its whole context."""

    @classmethod
    def of(cls, segment: Segment, shape: KVShape, scoring: Scoring) -> PrefillPlan:
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
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
        out: Tensor,
    ) -> None:
        """Writes out[the segment's tokens].

        `query`, `key`, `value`: the step's, [tokens, heads, head_dim]; `keys`, `values`: one layer's.
        """
        tokens = slice(self.segment.start, self.segment.start + self.segment.num_tokens)
        if self.blocks is None:
            key, value = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
        else:
            key = self._context(keys.index_select(0, self.blocks).transpose(2, 3))
            value = self._context(values.index_select(0, self.blocks))
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
            scoring.cap_(scores)
            result = torch.matmul(scores.add_(self.mask).softmax(-1), value[:, None])
        out[tokens] = result.flatten(0, 1).transpose(0, 1)

    def _context(self, blocks: Tensor) -> Tensor:
        """[blocks, kv_heads, block_size, head_dim] to [kv_heads, context - first, head_dim]."""
        return blocks.transpose(0, 1).flatten(1, 2)[:, : self.segment.context_len - self.first]
