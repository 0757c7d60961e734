"""What every kernel needs to know of Triton, and the steps of a softmax that they share."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Kernels run in numpy, on CPU tensors. Decided when they are defined, so fixed for the process."""

_LOG2_E = tl.constexpr(1.4426950408889634)

MIN_TILE: Final = 16
"""Smallest side of a matrix that tensor cores, and so `tl.dot`, take."""


def padded(size: int) -> int:
    """Tiles are powers of two; what a head or a group lacks of one is masked."""
    return max(MIN_TILE, power_of_two(size))


def power_of_two(size: int) -> int:
    """The next one at or above `size`."""
    return 1 << max(0, size - 1).bit_length()


def upcasts(dtype: torch.dtype) -> bool:
    """numpy has no bfloat16: the interpreter would multiply the bit patterns (triton#11584)."""
    return INTERPRETED and dtype is torch.bfloat16


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs the device runs at once, in units of its processors; 1 where it is not a GPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, window: int | None
) -> None:
    """Raises ValueError for shapes or layouts that a kernel would read out of bounds."""
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError("key_cache and value_cache must have the same shape and strides")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"head_dim is {query.shape[2]} in query and {key_cache.shape[3]} in the cache")
    if query.stride(2) != 1 or key_cache.stride(3) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the last dimension of query, caches and block_tables must be contiguous")
    if query.dtype != key_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the cache {key_cache.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"a sliding window holds at least the token itself, not {window} tokens")


@triton.jit
def scores(
    query: tl.tensor, key: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """[rows, tile] of query [rows, dim] times key [tile, dim], in units of log 2 for `exp2`.

    softcap * tanh(x / softcap), as in Gemma 2 (arXiv 2408.00118), section 2.
    """
    products = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        ratio = products / softcap
        # tanh without overflow: the exponent is never positive.
        small = tl.exp2(tl.abs(ratio) * (-2.0 * _LOG2_E))
        tanh = (1.0 - small) / (1.0 + small)
        products = softcap * tl.where(ratio < 0, -tanh, tanh)
    return products * _LOG2_E


@triton.jit
def accumulate(
    product: tl.tensor, value: tl.tensor, highest: tl.tensor, total: tl.tensor, joined: tl.tensor
) -> tl.tensor:
    """One step of the online softmax (FlashAttention-2, Dao, 2023, arXiv 2307.08691, algorithm 1).

    `product`: float32[rows, tile] from `scores`, -inf where masked; `value`: [tile, dim]; `highest`,
    `total`: float32[rows], running maximum and sum; `joined`: float32[rows, dim], not yet divided.
    """
    new = tl.maximum(highest, tl.max(product, 1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    anchor = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(product - anchor[:, None])
    shrink = tl.exp2(highest - anchor)
    total = total * shrink + tl.sum(weights, 1)
    joined = joined * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new, total, joined


@triton.jit
def load_tile(
    cache: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    wanted: tl.tensor,
    dim: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """[tile, dim] of one head's keys or values at `position`, int32[tile]; 0 where not `wanted`.

    `cache` points at the head in block 0, `table` at the sequence's row of the block table.
    """
    block = tl.load(table + position // PAGE, mask=wanted, other=0).to(tl.int64)
    row = block * block_stride + (position % PAGE) * slot_stride
    inside = wanted[:, None] & (dim < DIM)[None, :]
    # Not read rather than masked later: 0 times NaN is NaN.
    tile = tl.load(cache + row[:, None] + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile
