"""Where top-k and top-p cut a row off, without sorting it: by bisection over the values that a float can have.

Sorting a vocabulary costs a GPU more than a small model's whole step, and what fits among the likeliest few hundred
can't be known before: a graph has no branches. 32 halvings find a value exactly, for any row.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def floors(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """float32[rows]: the smallest logit that each row keeps; ties with it are kept.

    `logits`: float32[rows, vocabulary]. `top_k`: int32[rows], 0 keeps all. `top_p`: float32[rows], of what top-k
    has left; 1 keeps all. The token that reaches top-p is kept.
    """
    vocab_size = logits.shape[-1]
    keys = _ordered(logits)
    wanted = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)[:, None]
    # The largest value that at least `wanted` logits reach: that of the one in place `wanted`.
    low = torch.full_like(wanted, _LOWEST, dtype=torch.int64)
    high = torch.full_like(low, _HIGHEST + 1)
    for _ in range(32):
        middle = (low + high) >> 1
        reached = (keys >= middle).sum(dim=-1, keepdim=True) >= wanted
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    kept = low
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp().masked_fill(keys < kept, 0)
    # Off is beyond 1, where no rounding of a sum can reach it.
    share = torch.where(top_p < 1, top_p.double(), 2.0)[:, None]
    most = share * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # The smallest value above which there is less than `most`.
    low, high = torch.full_like(kept, _LOWEST - 1), keys.amax(dim=-1, keepdim=True).long()
    for _ in range(33):
        middle = (low + high) >> 1
        above = torch.where(keys > middle, weights, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        enough = above < most
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return _value(torch.maximum(kept, high).int())[:, 0]


def _ordered(values: Tensor) -> Tensor:
    """int32, in the order of the floats: those below 0 are stored as sign and size."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0, though not in bits
    return torch.where(bits >= 0, bits, bits ^ _HIGHEST)


def _value(keys: Tensor) -> Tensor:
    return torch.where(keys >= 0, keys, keys ^ _HIGHEST).view(torch.float32)
