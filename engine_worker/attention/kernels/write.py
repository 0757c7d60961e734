"""Stores a step's keys and values in the paged cache."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.kernels.runtime import power_of_two

_ELEMENTS: Final = 4096
"""Of keys, and as many of values, per program: enough loads in flight per thread, still many programs."""


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes token i's key and value to slot `slot_mapping[i]`, in place. A slot of -1 is padding: not written.

    `key`, `value`: [num_tokens, num_kv_heads, head_dim], last dimension contiguous, any other strides.
    `key_cache`, `value_cache`: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
    `slot_mapping`: int32 or int64[num_tokens]: block * block_size + offset in the block.
    The grid depends on shapes alone, so the call can be part of a CUDA graph.
    """
    tokens, heads, dim = key.shape
    if key_cache.shape[2:] != key.shape[1:] or value.shape != key.shape or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, slots {tuple(slot_mapping.shape)} and cache "
            f"{tuple(key_cache.shape)} do not fit"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache must be contiguous")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("the last dimension of key and value must be contiguous")
    width = power_of_two(heads * dim)
    per_program = max(1, _ELEMENTS // width)
    _write[(triton.cdiv(tokens, per_program),)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        DIM=dim,
        WIDTH=width,
        TOKENS=per_program,
    )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    element = tl.arange(0, WIDTH)
    head, dim = element // DIM, element % DIM
    wanted = (slot >= 0)[:, None] & (element < HEADS * DIM)[None, :]
    target = slot[:, None] * (HEADS * DIM) + element[None, :]
    token = token.to(tl.int64)
    keys = tl.load(key + token[:, None] * key_token + (head * key_head + dim)[None, :], mask=wanted)
    values = tl.load(value + token[:, None] * value_token + (head * value_head + dim)[None, :], mask=wanted)
    tl.store(key_cache + target, keys, mask=wanted)
    tl.store(value_cache + target, values, mask=wanted)
