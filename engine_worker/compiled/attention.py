"""Attention over KV blocks, decodes and prompt chunks alike.

A task is up to MAX_ROWS queries of one sequence that share a key head: (token, head of the group)
pairs. A unit is what one tile takes: up to WIDTH keys of one block. Unit by unit, a tile product gives
scores; span by span, up to _SPAN units, an online softmax (Milakov, Gimelshein, 2018; FlashAttention)
weighs them, and a second product per unit adds up the values. Neither copies the cache, and blocks may
lie anywhere and be shared. Spans are counted from the sequence's beginning, so that a query's result does
not depend on which others are computed with it.

Keys are kept transposed, [layer][block][head][unit][head_dim][WIDTH], so that both products read their
second operand as it lies. Values: [layer][block][head][unit][keys of the unit][head_dim padded to WIDTH].
Both in float32, float16 or int8: what a long context reads is the time it takes, once batches are large.
Bytes are rounded to 127 steps of the largest number of one head of one token, and a unit begins with the
float32[WIDTH] scales of its tokens: those of keys are applied to scores, those of values to their weights
(as KVQuant and KIVI do per token; arXiv 2401.18079, 2402.02750). Products are summed in float32.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine_worker.compiled.memory import floats, int8s, ints
from engine_worker.compiled.pointwise import capped, exponentials, largest, scaled
from engine_worker.compiled.tile import HALF, LEVEL, SIZES, SPREAD, put_half, tile
from engine_worker.compiled.vector import LANES, MAX_ROWS, WIDTH, padded

_NOTHING = np.float32(-np.inf)
_SPAN = SPREAD // max(WIDTH, 1)


def scratch_floats(head_dim: int) -> int:
    """float32 numbers of scratch that a thread needs."""
    return MAX_ROWS * (max(head_dim, SPREAD) + SPREAD + padded(head_dim) + 4)


@njit(nogil=True)
def _header(kind: int) -> int:
    """Bytes of the scales that a unit begins with."""
    return 4 * WIDTH if kind == LEVEL else 0


@njit(nogil=True)
def _unit_bytes(kind: int, head_dim: int) -> tuple[int, int]:
    """From one unit of a block to the next: (of keys, of values)."""
    size = SIZES[kind]
    return _header(kind) + head_dim * WIDTH * size, _header(kind) + WIDTH * padded(head_dim) * size


@njit(nogil=True)
def lane_bytes(kind: int, block_size: int, head_dim: int) -> tuple[int, int]:
    """Of one head of one block: (of keys, of values)."""
    units = padded(block_size) // WIDTH
    of_keys, of_values = _unit_bytes(kind, head_dim)
    # The last unit may have fewer rows of values, but not fewer columns of keys.
    missing = (padded(block_size) - block_size) * padded(head_dim) * SIZES[kind]
    return units * of_keys, units * of_values - missing


@njit(nogil=True)
def _reach(
    segment: NDArray[np.int64], first: int, rows: int, group: int, window: int, block_size: int
) -> tuple[int, int]:
    """(first unit, one past the last) that some query of a task sees; the first is a span's."""
    tokens, context = segment[1], segment[2]
    units = padded(block_size) // WIDTH
    begin = 0
    if window > 0:
        seen_from = context - tokens + first // group + 1 - window
        begin = max(0, seen_from) // block_size * units // _SPAN * _SPAN
    last = context - tokens + (first + rows - 1) // group
    return begin, last // block_size * units + last % block_size // WIDTH + 1


@njit(nogil=True)
def attend(
    query: int,
    ldq: int,
    keys: int,
    values: int,
    kind: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    cap: float,
    tables: int,
    segments: NDArray[np.int64],
    task: NDArray[np.int64],
    following: NDArray[np.int64],
    out: int,
    out_depth: int,
    out_rows: int,
    scratch: int,
) -> None:
    """One task: `rows` queries from `first` on, of a segment, at key head `head`.

    `query`: float32[tokens][ldq], scaled; `keys`, `values`: one layer's, of `kind`; `window`: 0, or how
    many tokens a query sees, its own included; `cap`: 0, or where scores are capped by a tangent (Gemma 2,
    arXiv 2408.00118, section 2); `tables`: int64, block tables end to end; `segments`: int64,
    (first token, tokens, context length, start of its table) of each; `task`: (segment, head, first, rows);
    `following`: the task that this thread takes next, whose keys are fetched at the end, or nothing; `out`:
    tiled [tiles][out_depth][out_rows].
    """
    group = heads // kv_heads
    width = padded(head_dim)
    head, first, rows = task[1], task[2], task[3]
    segment = segments[4 * task[0] : 4 * task[0] + 4]
    start, tokens, context = segment[0], segment[1], segment[2]

    # Queries as the product reads them fastest, or, where they are too long for that, transposed.
    spread = head_dim <= SPREAD
    q = floats(scratch, MAX_ROWS * max(head_dim, SPREAD))
    scores_at = scratch + 4 * len(q)
    sums_at = scores_at + 4 * MAX_ROWS * SPREAD
    state = floats(sums_at + 4 * MAX_ROWS * width, 4 * MAX_ROWS)
    scores, sums = floats(scores_at, rows * SPREAD), floats(sums_at, rows * width)
    # Of each row: the largest score so far, with this span's, and the sum of weights; vectors of this span's scores.
    peaks, totals = state[:rows], state[MAX_ROWS : MAX_ROWS + rows]
    tops, reached = state[2 * MAX_ROWS : 2 * MAX_ROWS + rows], state[3 * MAX_ROWS : 3 * MAX_ROWS + rows]
    sums[:] = 0
    for row in range(rows):
        index = first + row
        column = (head * group + index % group) * head_dim
        source = floats(query + 4 * ((start + index // group) * ldq + column), head_dim)
        if spread:
            q[row * SPREAD : row * SPREAD + head_dim] = source
        else:
            for d in range(head_dim):
                q[d * rows + row] = source[d]
        peaks[row] = _NOTHING
        totals[row] = 0

    size, header = SIZES[kind], _header(kind)
    key_bytes, value_bytes = lane_bytes(kind, block_size, head_dim)
    key_unit, value_unit = _unit_bytes(kind, head_dim)
    table = ints(tables + 8 * segment[3], (context + block_size - 1) // block_size)
    units = padded(block_size) // WIDTH  # of a block
    regular = block_size % WIDTH == 0  # every unit is WIDTH keys, one after the other
    begin, end = _reach(segment, first, rows, group, window, block_size)
    next_head, next_begin, next_end, next_table = 0, 0, 0, table
    if len(following) > 0:
        then = segments[4 * following[0] : 4 * following[0] + 4]
        next_head = following[1]
        next_begin, next_end = _reach(then, following[2], following[3], group, window, block_size)
        next_table = ints(tables + 8 * then[3], (then[2] + block_size - 1) // block_size)
    visible_last = context - tokens + (first + rows - 1) // group + 1
    for span in range(begin, end, _SPAN):
        count = min(_SPAN, end - span)
        for number in range(count):
            block, part = (span + number) // units, (span + number) % units
            lane = table[block] * kv_heads + head
            unit, place = keys + lane * key_bytes + part * key_unit, scores_at + 4 * number * WIDTH
            # The unit's values are fetched while its keys are used.
            tile(
                kind, rows, spread, scratch, unit + header, WIDTH, head_dim, place, SPREAD, False,
                values + lane * value_bytes + part * value_unit, value_unit // head_dim,
            )  # fmt: skip
            if kind == LEVEL:
                _apply_scales(unit, place, rows)
            if cap > 0:
                capped(place, np.float32(cap), rows, WIDTH // LANES, SPREAD)
        for row in range(rows):
            visible = context - tokens + (first + row) // group + 1
            hidden = max(0, visible - window) if window > 0 else 0
            # Units that it sees whole, and up to which it sees anything.
            whole = 0
            if regular and hidden <= span * WIDTH:
                whole = max(0, min(count, visible // WIDTH - span))
            seen = whole
            for number in range(whole, count):
                block, part = (span + number) // units, (span + number) % units
                base = block * block_size + part * WIDTH
                stop = min(min(WIDTH, block_size - part * WIDTH), visible - base)
                low = max(0, hidden - base)
                line = scores[row * SPREAD + number * WIDTH : row * SPREAD + (number + 1) * WIDTH]
                if stop <= low:
                    line[:] = _NOTHING
                    continue
                seen = number + 1
                line[:low] = _NOTHING
                line[stop:] = _NOTHING
            scores[row * SPREAD + seen * WIDTH : row * SPREAD + count * WIDTH] = 0
            reached[row], tops[row] = seen * WIDTH // LANES, peaks[row]
            if seen > 0:
                tops[row] = max(peaks[row], largest(scores_at + 4 * row * SPREAD, seen * WIDTH // LANES))
        # Apart, so that no row waits for the one before.
        for row in range(rows):
            if reached[row] == 0:
                continue
            total = exponentials(scores_at + 4 * row * SPREAD, tops[row], int(reached[row]))
            if tops[row] != peaks[row]:
                if peaks[row] != _NOTHING:
                    shrink = np.exp(peaks[row] - tops[row])
                    totals[row] *= shrink
                    sums[row * width : (row + 1) * width] *= shrink
                peaks[row] = tops[row]
            totals[row] += total
        for number in range(count):
            block, part = (span + number) // units, (span + number) % units
            unit = values + (table[block] * kv_heads + head) * value_bytes + part * value_unit
            v = unit + header
            if kind == LEVEL:
                _apply_scales(unit, scores_at + 4 * number * WIDTH, rows)
            depth = min(
                min(WIDTH, block_size - part * WIDTH), visible_last - block * block_size - part * WIDTH
            )
            # Meanwhile the keys of the same place in the next span, or in the first of the next task.
            ahead, share = v, 0
            if span + number + _SPAN < end:
                block, part = (span + number + _SPAN) // units, (span + number + _SPAN) % units
                ahead = keys + (table[block] * kv_heads + head) * key_bytes + part * key_unit
                share = key_unit
            elif next_begin + number < next_end:
                block, part = (next_begin + number) // units, (next_begin + number) % units
                ahead = keys + (next_table[block] * kv_heads + next_head) * key_bytes + part * key_unit
                share = key_unit
            parts = width // WIDTH
            for part in range(parts):
                tile(
                    kind, rows, True, scores_at + 4 * number * WIDTH, v + size * part * WIDTH, width, depth,
                    sums_at + 4 * part * WIDTH, width, True,
                    ahead + part * (share // parts), share // parts // WIDTH,
                )  # fmt: skip

    for row in range(rows):
        index = first + row
        token = start + index // group
        column = (head * group + index % group) * head_dim
        target = (
            out + 4 * (token // out_rows) * out_depth * out_rows + 4 * (column * out_rows + token % out_rows)
        )
        part = np.float32(1) / totals[row]
        line = floats(target, (head_dim - 1) * out_rows + 1)
        if out_rows == 1:  # apart, so that it is vectorised
            for d in range(head_dim):
                line[d] = sums[row * width + d] * part
        else:
            for d in range(head_dim):
                line[d * out_rows] = sums[row * width + d] * part


@njit(nogil=True)
def _apply_scales(unit: int, scores: int, rows: int) -> None:
    """Multiplies each row's WIDTH numbers at `scores` by the scales that a unit begins with."""
    for row in range(rows):
        line = scores + 4 * row * SPREAD
        scaled(line, np.float32(1), unit, line, WIDTH // LANES)


@njit(nogil=True)
def _rounded(numbers: NDArray[np.float32], scale_at: int) -> np.float32:
    """Stores the scale of int8, and returns what the numbers are to be multiplied by. NaN is in the scale."""
    peak, nothing = np.float32(0), np.float32(0)
    for number in numbers:
        peak = max(peak, abs(number))
        nothing += number * np.float32(0)
    peak = max(peak, np.float32(1e-30))
    floats(scale_at, 1)[0] = peak / np.float32(127) + nothing
    return np.float32(127) / peak if nothing == 0 else np.float32(0)


@njit(nogil=True)
def store(
    key: NDArray[np.float32],
    value: NDArray[np.float32],
    keys: int,
    values: int,
    kind: int,
    lane: int,
    offset: int,
    block_size: int,
) -> None:
    """Writes one token's key and value of one head; `lane`: block * kv_heads + head."""
    head_dim = len(key)
    width, part, column = padded(head_dim), offset // WIDTH, offset % WIDTH
    of_keys, of_values = lane_bytes(kind, block_size, head_dim)
    key_unit, value_unit = _unit_bytes(kind, head_dim)
    keys += lane * of_keys + part * key_unit
    values += lane * of_values + part * value_unit
    if kind == LEVEL:
        by_key, by_value = _rounded(key, keys + 4 * column), _rounded(value, values + 4 * column)
        k = int8s(keys + _header(kind) + column, (head_dim - 1) * WIDTH + 1)
        v = int8s(values + _header(kind) + column * width, head_dim)
        for d in range(head_dim):
            k[d * WIDTH] = np.int8(np.rint(key[d] * by_key)) if by_key > 0 else np.int8(0)
            v[d] = np.int8(np.rint(value[d] * by_value)) if by_value > 0 else np.int8(0)
    elif kind == HALF:
        for d in range(head_dim):
            put_half(keys + 2 * (column + d * WIDTH), key[d])
            put_half(values + 2 * (column * width + d), value[d])
    else:
        k = floats(keys + 4 * column, (head_dim - 1) * WIDTH + 1)
        v = floats(values + 4 * column * width, head_dim)
        for d in range(head_dim):
            k[d * WIDTH] = key[d]
            v[d] = value[d]
