"""Packed batches over a paged cache, and what attention over them must give, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Batch:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
        )


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    tail: int = 0,
    seed: int = 0,
) -> Batch:
    """`lengths`: (query tokens, context with them) of each sequence; (n, 0) is a padded row.

    Everything outside the sequences is NaN: the scratch block, the rest of last blocks, blocks of nobody,
    and the table's unused entries point at scratch. `tail`: tokens behind the last sequence.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for _, length in lengths]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, block_size, kv_heads, dim)
    caches = [torch.randn(shape, generator=random) for _ in range(2)]
    order = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    tables = torch.zeros(len(lengths), max([1, *counts]), dtype=torch.int32)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, ((_, length), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            written[blocks[position // block_size], position % block_size] = True
    for cache in caches:
        cache[~written] = torch.nan
    starts = torch.tensor([0] + [n for n, _ in lengths]).cumsum(0)
    query = torch.randn(int(starts[-1]) + tail, heads, dim, generator=random)
    return Batch(
        query=query.to(DEVICE, dtype),
        key_cache=caches[0].to(DEVICE, dtype),
        value_cache=caches[1].to(DEVICE, dtype),
        block_tables=tables.to(DEVICE),
        query_start_loc=starts.to(DEVICE, torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32, device=DEVICE),
        max_query_len=max([1, *(n for n, _ in lengths)]),
    )


def expected(
    batch: Batch, scale: float, sliding_window: int | None = None, softcap: float | None = None
) -> Tensor:
    """One query and one head at a time, in float64: too simple to be wrong."""
    out = torch.zeros(batch.query.shape, dtype=torch.float64, device=batch.query.device)
    block_size, kv_heads = batch.key_cache.shape[1:3]
    group = batch.query.shape[1] // kv_heads
    starts = batch.query_start_loc.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_tables[row, : -(-length // block_size)].long()
        keys = batch.key_cache[blocks].double().flatten(0, 1)
        values = batch.value_cache[blocks].double().flatten(0, 1)
        for token in range(starts[row], starts[row + 1]):
            position = length - (starts[row + 1] - token)
            if length == 0:
                continue
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(batch.query.shape[1]):
                seen = keys[low : position + 1, head // group]
                score = seen @ batch.query[token, head].double() * scale
                if softcap is not None:
                    score = softcap * (score / softcap).tanh()
                out[token, head] = score.softmax(0) @ values[low : position + 1, head // group]
    return out


def assert_equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[got.dtype])
