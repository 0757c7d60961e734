"""Attention of one new token per sequence over its whole paged context.

The context of a sequence is split among programs, since a batch of one would otherwise occupy one
processor per KV head, and a second pass joins the parts (Flash-Decoding, Dao, Haziza, Massa, Sizov,
2023). All query heads that share a KV head are rows of one product, so its keys are loaded once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.kernels.runtime import (
    INTERPRETED,
    accumulate,
    check_attention,
    load_tile,
    multiprocessors,
    padded,
    power_of_two,
    scores,
    upcasts,
)

_MAX_SPLITS: Final = 64
_TILE_BYTES: Final = 16384
"""Of keys per step of the loop, and as many of values: several steps fit in shared memory at once."""


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    tile: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Row i of `query` is the last token of sequence i. Returns [num_seqs, num_heads, head_dim].

    `query`: [num_seqs, num_heads, head_dim], float32, float16 or bfloat16; sums are in float32.
    `key_cache`, `value_cache`: [num_blocks, block_size, num_kv_heads, head_dim], of the same dtype.
    `block_tables`: int32[num_seqs, max_blocks]; only entries below ceil(seq_len / block_size) are read.
    `seq_lens`: int32[num_seqs], tokens including the query's own. 0 is a padded row: its result is 0.
    `sliding_window`: tokens that a query sees, its own included.
    `tile`, `num_splits`: tokens per loop step and programs per sequence; None chooses both from the
    shapes, never from the lengths, so the call can be part of a CUDA graph.
    """
    check_attention(query, key_cache, value_cache, block_tables, sliding_window)
    num_seqs, heads, dim = query.shape
    page, kv_heads = key_cache.shape[1:3]
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not num_seqs:
        return out
    tile = tile or _tile(dim, query.dtype)
    if num_splits is None:
        num_splits = _num_splits(num_seqs * kv_heads, block_tables.shape[1] * page, tile, query.device)
    parts, logs = out, out
    if num_splits > 1:
        parts = torch.empty(num_seqs, heads, num_splits, dim, dtype=torch.float32, device=query.device)
        logs = torch.empty(num_seqs, heads, num_splits, dtype=torch.float32, device=query.device)
    _decode[(num_seqs, kv_heads, num_splits)](
        parts,
        logs,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale,
        softcap or 0.0,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        ROWS=padded(heads // kv_heads),
        DIM=dim,
        DIM_PADDED=padded(dim),
        PAGE=page,
        TILE=tile,
        SPLITS=num_splits,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        UPCAST=upcasts(query.dtype),
        num_warps=4,
        num_stages=3,
    )
    if num_splits > 1:
        _join[(num_seqs, heads)](
            out,
            parts,
            logs,
            HEADS=heads,
            DIM=dim,
            DIM_PADDED=padded(dim),
            SPLITS=num_splits,
            SPLITS_PADDED=power_of_two(num_splits),
            num_warps=4,
        )
    return out


def _tile(dim: int, dtype: torch.dtype) -> int:
    return max(16, min(128, _TILE_BYTES // (padded(dim) * dtype.itemsize)))


def _num_splits(programs: int, max_context: int, tile: int, device: torch.device) -> int:
    """Enough to fill the device twice over, but each with at least four tiles of the longest context."""
    if INTERPRETED:
        return 1
    wanted = triton.cdiv(2 * multiprocessors(device), programs)
    return power_of_two(max(1, min(wanted, max_context // (4 * tile), _MAX_SPLITS)))


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["tables", "lengths"])
def _decode(
    out: tl.tensor,
    logs: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_row: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    # Every split gets the same number of tiles of this sequence; the last may get none.
    origin = first // TILE * TILE
    share = tl.cdiv(tl.cdiv(length - origin, TILE), SPLITS) * TILE
    begin = origin + split * share
    end = tl.minimum(begin + share, length)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    inside = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + row
    q = tl.load(
        query + sequence * query_row + head[:, None] * query_head + dim[None, :], mask=inside, other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    keys += kv_head * head_stride
    values += kv_head * head_stride
    table = tables + sequence * table_row
    for at in range(begin, end, TILE):
        position = at + tl.arange(0, TILE)
        wanted = (position >= first) & (position < end)
        k = load_tile(keys, table, position, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
        v = load_tile(values, table, position, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
        product = scores(q, k, scale, softcap, HAS_SOFTCAP)
        product = tl.where(wanted[None, :], product, float("-inf"))
        highest, total, joined = accumulate(product, v, highest, total, joined)

    joined = joined / tl.where(total > 0, total, 1.0)[:, None]
    part = (sequence * HEADS + head) * SPLITS + split
    tl.store(out + part[:, None] * DIM + dim[None, :], joined.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        log = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(logs + part, log, mask=row < GROUP)


@triton.jit
def _join(
    out: tl.tensor,
    parts: tl.tensor,
    logs: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
) -> None:
    """The mean of a head's parts, weighted by their sums of exponentials; 0 if all are empty."""
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    log = tl.load(logs + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    highest = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(highest == float("-inf"), 0.0, highest))
    at = (row * SPLITS + split)[:, None] * DIM + dim[None, :]
    part = tl.load(parts + at, mask=(split < SPLITS)[:, None] & (dim < DIM)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dim, mean.to(out.dtype.element_ty), mask=dim < DIM)
