"""Attention over KV blocks, decodes and prompt chunks alike.

A task is up to MAX_ROWS queries of one sequence that share a key head: (token, head of the group)
pairs. Block by block, one tile product gives their scores, an online softmax (Milakov, Gimelshein,
2018; FlashAttention) weighs them, and a second product adds up the values. Neither copies the
cache, and blocks may lie anywhere and be shared.

Keys are kept transposed, [layer][block][head][head_dim][columns], so that both products read their
second operand as it lies; `columns` is the block size padded to WIDTH. Values: [layer][block]
[head][block_size][head_dim padded to WIDTH].
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine_worker.compiled.memory import floats, ints
from engine_worker.compiled.tile import LANES, MAX_ROWS, WIDTH, exponentials, largest, tile

_NOTHING = np.float32(-np.inf)


def padded(size: int) -> int:
    """`size`, up to a multiple of WIDTH."""
    return -(-size // WIDTH) * WIDTH


def scratch_floats(head_dim: int, block_size: int) -> int:
    """float32 numbers of scratch that a thread needs."""
    return MAX_ROWS * (head_dim + 2 * padded(block_size) + padded(head_dim) + 2)


@njit(nogil=True)
def attend(
    query: int,
    ldq: int,
    keys: int,
    values: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    tables: int,
    segment: NDArray[np.int64],
    head: int,
    first: int,
    rows: int,
    out: int,
    out_rows: int,
    scratch: int,
) -> None:
    """One task: queries `first` to `first + rows` of a segment at key head `head`.

    `query`: float32[tokens][ldq], scaled; `keys`, `values`: one layer's; `window`: 0, or how many
    tokens a query sees, its own included; `tables`: int64, block tables end to end; `segment`: (first
    token, tokens, context length, start of its table); `out`: tiled [tiles][heads * head_dim][out_rows].
    """
    group = heads // kv_heads
    columns = (block_size + WIDTH - 1) // WIDTH * WIDTH
    width = (head_dim + WIDTH - 1) // WIDTH * WIDTH
    start, tokens, context, table = segment[0], segment[1], segment[2], segment[3]

    q = floats(scratch, head_dim * rows)
    scores_at = scratch + 4 * MAX_ROWS * head_dim
    weights_at = scores_at + 4 * MAX_ROWS * columns
    sums_at = weights_at + 4 * MAX_ROWS * columns
    state = floats(sums_at + 4 * MAX_ROWS * width, 2 * MAX_ROWS)
    scores, weights = floats(scores_at, rows * columns), floats(weights_at, block_size * rows)
    sums = floats(sums_at, rows * width)
    # Of each row: the largest score so far and the sum of weights.
    peaks, totals = state[:rows], state[MAX_ROWS : MAX_ROWS + rows]
    sums[:] = 0
    for row in range(rows):
        index = first + row
        column = (head * group + index % group) * head_dim
        source = floats(query + 4 * ((start + index // group) * ldq + column), head_dim)
        for d in range(head_dim):
            q[d * rows + row] = source[d]
        peaks[row] = _NOTHING
        totals[row] = 0

    visible_first = context - tokens + first // group + 1
    visible_last = context - tokens + (first + rows - 1) // group + 1
    begin = max(0, visible_first - window) // block_size if window > 0 else 0
    key_bytes, value_bytes = head_dim * columns * 4, block_size * width * 4
    table_of = ints(tables + 8 * table, (context + block_size - 1) // block_size)
    for number in range(begin, (visible_last + block_size - 1) // block_size):
        lane = table_of[number] * kv_heads + head
        k, v = keys + lane * key_bytes, values + lane * value_bytes
        base = number * block_size
        used = min(block_size, visible_last - base)
        # The values are fetched while the keys are used.
        share = (used + WIDTH - 1) // WIDTH
        for part in range(share):
            ahead = v + part * (value_bytes // share)
            tile(
                rows, scratch, k + 4 * part * WIDTH, columns, head_dim, scores_at + 4 * part * WIDTH, columns,
                False, ahead, value_bytes // share // head_dim,
            )  # fmt: skip
        for row in range(rows):
            visible = context - tokens + (first + row) // group + 1
            stop = min(used, visible - base)
            low = max(0, visible - window - base) if window > 0 else 0
            at = scores_at + 4 * row * columns
            line = scores[row * columns : row * columns + share * WIDTH]
            if stop <= low:
                line[:] = 0
                continue
            line[:low] = _NOTHING
            line[stop:] = _NOTHING
            peak = max(peaks[row], largest(at, share * WIDTH // LANES))
            total = exponentials(at, peak, share * WIDTH // LANES)
            if peak != peaks[row]:
                shrink = np.float32(0) if peaks[row] == _NOTHING else np.exp(peaks[row] - peak)
                totals[row] *= shrink
                sums[row * width : (row + 1) * width] *= shrink
                peaks[row] = peak
            totals[row] += total
        for row in range(rows):
            for column in range(used):
                weights[column * rows + row] = scores[row * columns + column]
        following = k
        if base + block_size < visible_last:
            following = keys + (table_of[number + 1] * kv_heads + head) * key_bytes
        parts = width // WIDTH
        for part in range(parts):
            ahead = following + part * (key_bytes // parts)
            tile(
                rows, weights_at, v + 4 * part * WIDTH, width, used, sums_at + 4 * part * WIDTH, width,
                True, ahead, key_bytes // parts // block_size,
            )  # fmt: skip

    for row in range(rows):
        index = first + row
        token = start + index // group
        depth = heads * head_dim
        target = floats(out + 4 * (token // out_rows) * depth * out_rows, depth * out_rows)
        column = (head * group + index % group) * head_dim
        part = 1 / totals[row]
        for d in range(head_dim):
            target[(column + d) * out_rows + token % out_rows] = sums[row * width + d] * part


@njit(nogil=True)
def store(
    key: NDArray[np.float32],
    value: NDArray[np.float32],
    keys: int,
    values: int,
    lane: int,
    offset: int,
    block_size: int,
) -> None:
    """Writes one token's key and value of one head; `lane`: block * kv_heads + head."""
    head_dim = len(key)
    columns = (block_size + WIDTH - 1) // WIDTH * WIDTH
    width = (head_dim + WIDTH - 1) // WIDTH * WIDTH
    k = floats(keys + 4 * lane * head_dim * columns, head_dim * columns)
    v = floats(values + 4 * (lane * block_size + offset) * width, head_dim)
    for d in range(head_dim):
        k[d * columns + offset] = key[d]
        v[d] = value[d]
