"""The whole forward pass of a Llama-like decoder, as each thread of the team runs it.

Between two stages that depend on each other is a barrier; within a stage, threads share rows or take
chunks. Every array is given by its address in one of the records below, so that a step costs
Python one call.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from engine_worker.compiled.attention import attend, store
from engine_worker.compiled.dot import GROUP, quantise
from engine_worker.compiled.low_rank import (
    DOWN,
    GATE,
    KEY,
    OUT,
    QUERY,
    VALUE,
    has_adapter,
    lowered,
    raised,
)
from engine_worker.compiled.memory import floats, ints, record, record_reader
from engine_worker.compiled.pointwise import scaled, sum_of_squares, turned
from engine_worker.compiled.product import DOT, gated, linear
from engine_worker.compiled.team import barrier, clock, take, thread_count, thread_number
from engine_worker.compiled.vector import LANES, MAX_ROWS, SUMS, WIDTH, padded, panels

LAYER: Final = record(
    # Addresses of packed weights and float32 vectors; 0: this model has none.
    "input_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias",
    "post_norm", "gate_up", "down", "keys", "values", "window",
    # Norms of what attention and MLP add, where a model has them, and which of its rotations this layer takes.
    "attention_norm", "mlp_norm", "turn",
)  # fmt: skip

STEP: Final = np.dtype(
    [
        ("scale", np.float64),
        ("epsilon", np.float64),
        ("cap", np.float64),
        *(
            (name, np.int64)
            for name in (
                # the model
                "layers", "num_layers", "size", "lead", "heads", "kv_heads", "head_dim", "inner", "rotary", "kind",
                "kv_kind", "gelu",
                "final_norm", "lm_head", "vocab_panels", "block_size",
                # the step: how many, and addresses
                "tokens", "tiles", "rows", "samples", "sample_tiles", "sample_rows", "tasks",
                "cos", "sin", "blocks", "offsets", "segments", "num_segments", "tables", "task_list",
                "sampled", "adapters", "counters", "arrived", "times",
                # buffers
                "hidden", "branch", "operand", "qkv", "attended", "gated", "logits", "scratch", "scratch_bytes",
            )
        ),
    ]
)  # fmt: skip

_layers = record_reader(LAYER)
_steps = record_reader(STEP)

STAGES: Final = ("norm", "qkv", "place", "attention", "out", "gate_up", "down", "round", "lm_head")
"""What a step's time is spent on: norms, the linear layers, and between them rotation and the cache's writes
("place"), attention, rounding to bytes."""
_NORM, _QKV, _PLACE, _ATTENTION, _OUT, _GATE_UP, _DOWN, _ROUND, _LM_HEAD = range(len(STAGES))

STAGES_PER_LAYER: Final = 5
"""Stages of a layer whose work is taken from a counter."""


@njit(nogil=True)
def qkv_lead(step: Any) -> int:
    """Columns from one row of query, key and value to the next."""
    return padded((step.heads + 2 * step.kv_heads) * step.head_dim)


@njit(nogil=True, fastmath=SUMS)
def _inverse_rms(row: NDArray[np.float32], epsilon: float) -> np.float32:
    total = np.float32(0)
    for value in row:
        total += value * value
    return np.float32(1 / np.sqrt(total / np.float32(len(row)) + np.float32(epsilon)))


@njit(nogil=True)
def _norm(source: int, size: int, weight: int, epsilon: float, target: int) -> None:
    """RMSNorm (Zhang, Sennrich, 2019) of one row. All three are padded with zeros to a multiple of LANES."""
    vectors = (size + LANES - 1) // LANES
    mean = sum_of_squares(source, vectors) / np.float32(size)
    inverse = np.float32(1 / np.sqrt(mean + np.float32(epsilon)))
    scaled(source, inverse, weight, target, vectors)


@njit(nogil=True)
def grouped(depth: int) -> int:
    """Numbers of a row that is rounded to bytes: zeros fill its last group."""
    return (depth + GROUP - 1) // GROUP * GROUP


@njit(nogil=True)
def _row_floats(size: int, inner: int, attended: int) -> int:
    """What a thread needs of scratch for one row of a token's, of whatever it is."""
    return max(padded(size), max(padded(inner), padded(attended)))


@njit(nogil=True)
def scratch_floats(size: int, inner: int, attended: int) -> int:
    """float32 numbers of scratch that a thread needs between products: a row, and the normed ones of a tile."""
    return _row_floats(size, inner, attended) + MAX_ROWS * padded(size)


@njit(nogil=True)
def _norm_to_operand(
    step: Any, source: int, weight: int, index: int, rows: int, first: int, last: int, scratch: int
) -> int:
    """RMSNorm of one row of hidden states, as the next product reads it. Returns where it lies as a row.

    `first`, `last`: this thread's rows, which come in order. Those of a tile are put there together.
    """
    size = step.size
    if step.kind == DOT:
        _norm(source, size, weight, step.epsilon, scratch)
        floats(scratch + 4 * size, grouped(size) - size)[:] = 0
        quantise(scratch, size, step.operand, index, rows)
        return scratch
    lead, place = padded(size), index % rows
    kept = scratch + 4 * _row_floats(size, step.inner, step.heads * step.head_dim)
    _norm(source, size, weight, step.epsilon, kept + 4 * place * lead)
    if place == rows - 1 or index == last - 1:
        begin = max(0, place - (index - first))
        tiled = step.operand + 4 * (index // rows) * size * rows
        if place - begin == rows - 1:
            turned(kept, lead, rows, size, tiled)
        else:
            for row in range(begin, place + 1):
                _into_tile(floats(kept + 4 * row * lead, size), floats(tiled, size * rows), rows, row)
    return kept + 4 * place * lead


@njit(nogil=True)
def _into_tile(row: NDArray[np.float32], tiled: NDArray[np.float32], rows: int, place: int) -> None:
    for i in range(len(row)):
        tiled[i * rows + place] = row[i]


@njit(nogil=True)
def _norm_head(row: NDArray[np.float32], weight: int, epsilon: float) -> None:
    scale, inverse = floats(weight, len(row)), _inverse_rms(row, epsilon)
    for i in range(len(row)):
        row[i] = scale[i] * (row[i] * inverse)


@njit(nogil=True)
def _rotate(
    row: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32], scale: float
) -> None:
    """Rotary embedding (Su et al., 2021) of one head, halves paired, in place, times `scale`."""
    half = len(cos) // 2
    for i in range(half):
        low, high = row[i], row[i + half]
        row[i] = (low * cos[i] - high * sin[i]) * scale
        row[i + half] = (high * cos[i + half] + low * sin[i + half]) * scale
    for i in range(2 * half, len(row)):
        row[i] *= scale


@njit(nogil=True)
def _of_tiles(tiled: int, token: int, depth: int, rows: int, scratch: int) -> int:
    """One token's row out of [tiles][depth][rows], in `scratch`."""
    source, row = floats(tiled + 4 * (token // rows) * depth * rows, depth * rows), floats(scratch, depth)
    for i in range(depth):
        row[i] = source[i * rows + token % rows]
    return scratch


@njit(nogil=True)
def _branch(step: Any, norm: int) -> int:
    """Where attention and MLP put what they add to the hidden states: there, unless it is normed first."""
    return step.hidden if norm == 0 else step.branch


@njit(nogil=True)
def _join(step: Any, norm: int, token: int, scratch: int) -> None:
    """Adds a token's branch to its hidden states."""
    if norm != 0:
        at = 4 * token * step.lead
        _norm(step.branch + at, step.size, norm, step.epsilon, scratch)
        floats(step.hidden + at, step.size)[:] += floats(scratch, step.size)


@njit(nogil=True)
def _finish_attention(step: Any, layer: Any, number: int, token: int, scratch: int) -> None:
    """What is left of a token's attention behind its last product."""
    at = _branch(step, layer.attention_norm) + 4 * token * step.lead
    if has_adapter(step.adapters, token):
        depth = step.heads * step.head_dim
        if step.kind == DOT:
            row = step.attended + 4 * token * grouped(depth)
        else:
            row = _of_tiles(step.attended, token, depth, step.rows, scratch)
        lowered(step.adapters, number, token, OUT, 1, row)
        raised(step.adapters, number, token, OUT, 0, at)
    if layer.out_bias != 0:
        floats(at, step.size)[:] += floats(layer.out_bias, step.size)
    _join(step, layer.attention_norm, token, scratch)


@njit(nogil=True)
def _finish_mlp(step: Any, layer: Any, number: int, token: int, scratch: int) -> None:
    """What is left of a token's MLP behind its last product."""
    if has_adapter(step.adapters, token):
        if step.kind == DOT:
            row = step.gated + 4 * token * grouped(step.inner)
        else:
            row = _of_tiles(step.gated, token, padded(step.inner), step.rows, scratch)
        lowered(step.adapters, number, token, DOWN, 1, row)
        raised(step.adapters, number, token, DOWN, 0, _branch(step, layer.mlp_norm) + 4 * token * step.lead)
    _join(step, layer.mlp_norm, token, scratch)


@njit(nogil=True)
def _place(step: Any, layer: Any, number: int, token: int) -> None:
    """One token's query, key and value: normed and rotated; key and value to the cache."""
    dim, heads, kv_heads = step.head_dim, step.heads, step.kv_heads
    at = step.qkv + 4 * token * qkv_lead(step)
    if has_adapter(step.adapters, token):
        raised(step.adapters, number, token, QUERY, 0, at)
        raised(step.adapters, number, token, KEY, 1, at + 4 * heads * dim)
        raised(step.adapters, number, token, VALUE, 2, at + 4 * (heads + kv_heads) * dim)
    line = floats(at, qkv_lead(step))
    turn = 4 * (layer.turn * step.tokens + token) * step.rotary
    cos, sin = floats(step.cos + turn, step.rotary), floats(step.sin + turn, step.rotary)
    block, offset = ints(step.blocks, step.tokens)[token], ints(step.offsets, step.tokens)[token]
    for head in range(heads):
        query = line[head * dim : (head + 1) * dim]
        if layer.query_norm != 0:
            _norm_head(query, layer.query_norm, step.epsilon)
        _rotate(query, cos, sin, np.float32(step.scale))
    for head in range(kv_heads):
        key = line[(heads + head) * dim : (heads + head + 1) * dim]
        value = line[(heads + kv_heads + head) * dim : (heads + kv_heads + head + 1) * dim]
        if layer.key_norm != 0:
            _norm_head(key, layer.key_norm, step.epsilon)
        _rotate(key, cos, sin, np.float32(1))
        lane = block * kv_heads + head
        store(key, value, layer.keys, layer.values, step.kv_kind, lane, offset, step.block_size)


@njit(nogil=True)
def _attention(step: Any, layer: Any, counter: int, scratch: int) -> None:
    tasks = ints(step.task_list, 4 * step.tasks)
    segments = ints(step.segments, 4 * step.num_segments)
    depth, rows = step.heads * step.head_dim, step.rows
    if step.kind == DOT:
        depth, rows = grouped(depth), 1
    number = take(counter, 1)
    while number < step.tasks:
        following = take(counter, 1)
        attend(
            step.qkv, qkv_lead(step), layer.keys, layer.values, step.kv_kind,
            step.heads, step.kv_heads, step.head_dim, step.block_size, layer.window, step.cap, step.tables, segments,
            tasks[4 * number : 4 * number + 4], tasks[4 * following : 4 * min(following + 1, step.tasks)],
            step.attended, depth, rows, scratch,
        )  # fmt: skip
        number = following


@njit(nogil=True)
def _meet(step: Any, thread: int, threads: int, stage: int, since: int) -> int:
    """The end of a stage: waits for the others; the first thread notes the cycles it took. Returns the time."""
    barrier(step.arrived, threads)
    now = clock()
    if thread == 0:
        ints(step.times, len(STAGES))[stage] += now - since
    return now


@njit(nogil=True)
def _run(step: Any, thread: int, threads: int) -> None:
    scratch = step.scratch + thread * step.scratch_bytes
    first, last = step.tokens * thread // threads, step.tokens * (thread + 1) // threads
    size, lead, kind = step.size, step.lead, step.kind
    attended = step.heads * step.head_dim
    # What the layers between the norms write, and the next product reads: the same, unless it is rounded first.
    rounded = kind == DOT
    of_attention = step.operand if rounded else step.attended
    of_gate = step.operand if rounded else step.gated
    layers = _layers(step.layers, step.num_layers)
    counter, now = step.counters, clock()
    for number in range(step.num_layers):
        layer = layers[number]
        for token in range(first, last):
            at = step.hidden + 4 * token * lead
            if number > 0:
                _finish_mlp(step, layers[number - 1], number - 1, token, scratch)
            row = _norm_to_operand(step, at, layer.input_norm, token, step.rows, first, last, scratch)
            if has_adapter(step.adapters, token):
                lowered(step.adapters, number, token, QUERY, 3, row)
        now = _meet(step, thread, threads, _NORM, now)
        linear(
            counter, threads, step.operand, step.tiles, step.rows, size, layer.qkv, kind, qkv_lead(step) // WIDTH,
            layer.qkv_bias, step.qkv, qkv_lead(step), False, scratch,
        )  # fmt: skip
        now = _meet(step, thread, threads, _QKV, now)
        for token in range(first, last):
            _place(step, layer, number, token)
        now = _meet(step, thread, threads, _PLACE, now)
        _attention(step, layer, counter + 8, scratch)
        now = _meet(step, thread, threads, _ATTENTION, now)
        if rounded:
            for token in range(first, last):
                quantise(
                    step.attended + 4 * token * grouped(attended), attended, step.operand, token, step.rows
                )
            now = _meet(step, thread, threads, _ROUND, now)
        linear(
            counter + 16, threads, of_attention, step.tiles, step.rows, attended, layer.out, kind,
            panels(size), 0, _branch(step, layer.attention_norm), lead, layer.attention_norm == 0, scratch,
        )  # fmt: skip
        now = _meet(step, thread, threads, _OUT, now)
        for token in range(first, last):
            at = step.hidden + 4 * token * lead
            _finish_attention(step, layer, number, token, scratch)
            row = _norm_to_operand(step, at, layer.post_norm, token, step.rows, first, last, scratch)
            if has_adapter(step.adapters, token):
                lowered(step.adapters, number, token, GATE, 2, row)
        now = _meet(step, thread, threads, _NORM, now)
        gated(
            counter + 24, threads, step.operand, step.tiles, step.rows, size, layer.gate_up, kind,
            panels(step.inner), step.gated, grouped(step.inner), step.gelu != 0, step.adapters, number,
            scratch,
        )  # fmt: skip
        now = _meet(step, thread, threads, _GATE_UP, now)
        if rounded:
            for token in range(first, last):
                quantise(
                    step.gated + 4 * token * grouped(step.inner), step.inner, step.operand, token, step.rows
                )
            now = _meet(step, thread, threads, _ROUND, now)
        linear(
            counter + 32, threads, of_gate, step.tiles, step.rows, step.inner, layer.down, kind,
            panels(size), 0, _branch(step, layer.mlp_norm), lead, layer.mlp_norm == 0, scratch,
        )  # fmt: skip
        now = _meet(step, thread, threads, _DOWN, now)
        counter += 8 * STAGES_PER_LAYER
    sampled = ints(step.sampled, step.samples)
    first, last = step.samples * thread // threads, step.samples * (thread + 1) // threads
    for index in range(first, last):
        _finish_mlp(step, layers[step.num_layers - 1], step.num_layers - 1, sampled[index], scratch)
        at = step.hidden + 4 * sampled[index] * lead
        _norm_to_operand(step, at, step.final_norm, index, step.sample_rows, first, last, scratch)
    now = _meet(step, thread, threads, _NORM, now)
    if step.samples > 0:
        linear(
            counter, threads, step.operand, step.sample_tiles, step.sample_rows, size, step.lm_head, kind,
            step.vocab_panels, 0, step.logits, step.vocab_panels * WIDTH, False, scratch,
        )  # fmt: skip
        _meet(step, thread, threads, _LM_HEAD, now)


@cfunc(types.void(types.intp), cache=True, nogil=True)
def run_step(address: int) -> None:
    """What each thread of the team runs. `address`: of a STEP record."""
    _run(_steps(address, 1)[0], thread_number(), thread_count())
