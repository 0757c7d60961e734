"""Attention of chunks of prompts, of any lengths in one packed batch, over paged contexts.

FlashAttention-2 (Dao, 2023, arXiv 2307.08691): a program holds a tile of queries and walks over the
keys. Its rows are the queries of all heads that share one KV head, so keys are loaded once for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.attention.kernels.runtime import (
    MIN_TILE,
    accumulate,
    check_attention,
    load_tile,
    padded,
    power_of_two,
    scores,
    upcasts,
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one program's work. `rows`: queries times heads of a group; `tile`: keys per loop step."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dim: int, dtype: torch.dtype) -> Tiles:
        """Queries, and two steps of keys and values, within the 99 KiB of shared memory of small GPUs."""
        row_bytes = padded(dim) * dtype.itemsize
        if dtype.itemsize == 2:
            return cls(128, 64, 8, 2) if row_bytes <= 256 else cls(64, 32, 8, 2)
        # Products in float32 run on ordinary cores, from registers: small tiles.
        return cls(32, 32, 4, 2) if row_bytes <= 512 else cls(16, 16, 4, 2)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Query j of sequence i sits at position seq_lens[i] - query_len(i) + j and sees that and all before.

    Shapes and dtypes as in `decode_attention`, but `query`: [num_tokens, num_heads, head_dim], packed;
    `query_start_loc`: int32[num_seqs + 1], where each sequence's queries begin and, last, where all end.
    `max_query_len`: of any sequence; a bound is enough, it only limits the tile.
    Tokens of no sequence, and of sequences of length 0, are padding: their result is 0.
    The grid depends on shapes alone.
    """
    check_attention(query, key_cache, value_cache, block_tables, sliding_window)
    num_tokens, heads, dim = query.shape
    page, kv_heads = key_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    # No program visits tokens behind the last sequence.
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device) if out is None else out.zero_()
    if not num_tokens:
        return out
    group = heads // kv_heads
    tiles = tiles or Tiles.of(dim, query.dtype)
    # Two sizes, not one per length: each is compiled when it first comes up, while all streams wait.
    rows = max(power_of_two(group), MIN_TILE if max_query_len * group <= MIN_TILE else tiles.rows)
    queries = rows // group
    # Each sequence adds at most one tile that is not full.
    _prefill[(num_tokens // queries + num_seqs, kv_heads)](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        num_seqs,
        scale,
        softcap or 0.0,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        ROWS=rows,
        QUERIES=queries,
        SEQUENCES=_counted(num_seqs),
        DIM=dim,
        DIM_PADDED=padded(dim),
        PAGE=page,
        TILE=tiles.tile,
        WINDOW=sliding_window or 0,
        HAS_SOFTCAP=softcap is not None,
        UPCAST=upcasts(query.dtype),
        num_warps=min(tiles.num_warps, max(4, rows // 16)),
        num_stages=tiles.num_stages,
    )
    return out


def _counted(num_seqs: int) -> int:
    """Entries that a program looks through to find its sequence: few sizes, for the same reason."""
    return next(size for size in (16, 64, 256, power_of_two(num_seqs)) if size >= num_seqs)


@triton.jit(
    do_not_specialize=["num_seqs", "table_row"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def _prefill(
    out: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    num_seqs: tl.tensor,
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
    QUERIES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # Late tiles see the most keys: started first, they do not trail behind the others.
    work = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    # Which sequence's tile this is: all tiles are numbered through, sequence after sequence.
    index = tl.arange(0, SEQUENCES)
    start = tl.load(starts + index, mask=index < num_seqs, other=0)
    stop = tl.load(starts + index + 1, mask=index < num_seqs, other=0)
    counts = (stop - start + QUERIES - 1) // QUERIES
    sequence = tl.sum((tl.cumsum(counts, 0) <= work).to(tl.int32), 0)
    if sequence >= num_seqs:
        return
    begin = (work - tl.sum(tl.where(index < sequence, counts, 0), 0)) * QUERIES
    sequence = sequence.to(tl.int64)
    token = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - token
    length = tl.load(lengths + sequence).to(tl.int32)
    context = length - num_queries

    row = tl.arange(0, ROWS)
    nth = begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIM_PADDED)
    inside = ((row // GROUP < QUERIES) & (nth < num_queries))[:, None] & (dim < DIM)[None, :]
    at_token = (token + nth).to(tl.int64)
    q = tl.load(
        query + at_token[:, None] * query_row + head[:, None] * query_head + dim[None, :],
        mask=inside,
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    keys += kv_head * head_stride
    values += kv_head * head_stride
    table = tables + sequence * table_row

    position = context + nth
    end = tl.minimum(context + tl.minimum(begin + QUERIES, num_queries), length)
    first = 0
    # Keys before this are seen by every query of the tile: no mask is needed for them.
    whole = 0
    if WINDOW:
        first = tl.maximum(context + begin - WINDOW + 1, 0)
    else:
        whole = tl.maximum(context + begin + 1, 0) // TILE * TILE
        for at in range(0, whole, TILE):
            key_at = at + tl.arange(0, TILE)
            wanted = key_at >= 0
            k = load_tile(keys, table, key_at, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
            v = load_tile(values, table, key_at, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
            product = scores(q, k, scale, softcap, HAS_SOFTCAP)
            highest, total, joined = accumulate(product, v, highest, total, joined)
    for at in range(tl.maximum(whole, first // TILE * TILE), end, TILE):
        key_at = at + tl.arange(0, TILE)
        wanted = (key_at >= first) & (key_at < end)
        k = load_tile(keys, table, key_at, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
        v = load_tile(values, table, key_at, wanted, dim, block_stride, slot_stride, DIM, PAGE, UPCAST)
        seen = wanted[None, :] & (key_at[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key_at[None, :] > position[:, None] - WINDOW)
        product = tl.where(seen, scores(q, k, scale, softcap, HAS_SOFTCAP), float("-inf"))
        highest, total, joined = accumulate(product, v, highest, total, joined)

    joined = joined / tl.where(total > 0, total, 1.0)[:, None]
    target = (at_token * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(out + target, joined.to(out.dtype.element_ty), mask=inside)
