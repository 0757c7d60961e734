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
from engine_worker.compiled.memory import floats, ints, record_reader
from engine_worker.compiled.product import gated, linear
from engine_worker.compiled.team import barrier, take, thread_count, thread_number
from engine_worker.compiled.tile import WIDTH


def _record(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


LAYER: Final = _record(
    # Addresses of packed weights and float32 vectors; 0: this model has none.
    "input_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias",
    "post_norm", "gate_up", "down", "keys", "values", "window",
)  # fmt: skip

STEP: Final = np.dtype(
    [
        ("scale", np.float64),
        ("epsilon", np.float64),
        *(
            (name, np.int64)
            for name in (
                # the model
                "layers", "num_layers", "size", "lead", "heads", "kv_heads", "head_dim", "inner", "rotary", "kind",
                "final_norm", "lm_head", "vocab_panels", "block_size",
                # the step: how many, and addresses
                "tokens", "tiles", "rows", "samples", "sample_tiles", "sample_rows", "tasks",
                "cos", "sin", "blocks", "offsets", "segments", "num_segments", "tables", "task_list",
                "sampled", "counters", "arrived",
                # buffers
                "hidden", "normed", "qkv", "attended", "gated", "logits", "scratch", "scratch_bytes",
            )
        ),
    ]
)  # fmt: skip

_layers = record_reader(LAYER)
_steps = record_reader(STEP)

STAGES_PER_LAYER: Final = 5
"""Stages of a layer whose work is taken from a counter."""

# Sums may be reordered, so that they are vectorised; NaN stays NaN.
_SUMS = {"reassoc", "contract", "nsz"}


@njit(nogil=True)
def width_panels(width: int) -> int:
    return (width + WIDTH - 1) // WIDTH


@njit(nogil=True)
def qkv_lead(step: Any) -> int:
    """Columns from one row of query, key and value to the next."""
    return width_panels((step.heads + 2 * step.kv_heads) * step.head_dim) * WIDTH


@njit(nogil=True, fastmath=_SUMS)
def _inverse_rms(row: NDArray[np.float32], epsilon: float) -> np.float32:
    total = np.float32(0)
    for value in row:
        total += value * value
    return np.float32(1 / np.sqrt(total / np.float32(len(row)) + np.float32(epsilon)))


@njit(nogil=True)
def _norm_to_tiles(
    source: int, size: int, weight: int, epsilon: float, target: int, index: int, rows: int
) -> None:
    """RMSNorm (Zhang, Sennrich, 2019) of one row, stored as row `index` of a tiled matrix."""
    row, scale = floats(source, size), floats(weight, size)
    inverse = _inverse_rms(row, epsilon)
    out = floats(target + 4 * (index // rows) * size * rows, size * rows)
    at = index % rows
    for i in range(size):
        out[i * rows + at] = scale[i] * (row[i] * inverse)


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
def _place(step: Any, layer: Any, token: int) -> None:
    """One token's query, key and value: normed and rotated; key and value to the cache."""
    dim, heads, kv_heads = step.head_dim, step.heads, step.kv_heads
    line = floats(step.qkv + 4 * token * qkv_lead(step), qkv_lead(step))
    cos, sin = (
        floats(step.cos + 4 * token * step.rotary, step.rotary),
        floats(step.sin + 4 * token * step.rotary, step.rotary),
    )
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
        store(key, value, layer.keys, layer.values, block * kv_heads + head, offset, step.block_size)


@njit(nogil=True)
def _attention(step: Any, layer: Any, counter: int, scratch: int) -> None:
    tasks = ints(step.task_list, 4 * step.tasks)
    segments = ints(step.segments, 4 * step.num_segments)
    while True:
        number = take(counter, 1)
        if number >= step.tasks:
            return
        segment = segments[4 * tasks[4 * number] : 4 * tasks[4 * number] + 4]
        attend(
            step.qkv, qkv_lead(step), layer.keys, layer.values,
            step.heads, step.kv_heads, step.head_dim, step.block_size, layer.window, step.tables, segment,
            tasks[4 * number + 1], tasks[4 * number + 2], tasks[4 * number + 3],
            step.attended, step.rows, scratch,
        )  # fmt: skip


@njit(nogil=True)
def _run(step: Any, thread: int, threads: int) -> None:
    scratch = step.scratch + thread * step.scratch_bytes
    first, last = step.tokens * thread // threads, step.tokens * (thread + 1) // threads
    size, lead, kind = step.size, step.lead, step.kind
    attended = step.heads * step.head_dim
    layers = _layers(step.layers, step.num_layers)
    counter, arrived = step.counters, step.arrived
    for number in range(step.num_layers):
        layer = layers[number]
        for token in range(first, last):
            _norm_to_tiles(
                step.hidden + 4 * token * lead,
                size,
                layer.input_norm,
                step.epsilon,
                step.normed,
                token,
                step.rows,
            )
        barrier(arrived, threads)
        linear(
            counter, threads, step.normed, step.tiles, step.rows, size, layer.qkv, kind, qkv_lead(step) // WIDTH,
            layer.qkv_bias, step.qkv, qkv_lead(step), False, scratch,
        )  # fmt: skip
        barrier(arrived, threads)
        for token in range(first, last):
            _place(step, layer, token)
        barrier(arrived, threads)
        _attention(step, layer, counter + 8, scratch)
        barrier(arrived, threads)
        linear(
            counter + 16, threads, step.attended, step.tiles, step.rows, attended, layer.out, kind,
            width_panels(size), 0, step.hidden, lead, True, scratch,
        )  # fmt: skip
        barrier(arrived, threads)
        for token in range(first, last):
            if layer.out_bias != 0:
                floats(step.hidden + 4 * token * lead, size)[:] += floats(layer.out_bias, size)
            _norm_to_tiles(
                step.hidden + 4 * token * lead,
                size,
                layer.post_norm,
                step.epsilon,
                step.normed,
                token,
                step.rows,
            )
        barrier(arrived, threads)
        gated(
            counter + 24, threads, step.normed, step.tiles, step.rows, size, layer.gate_up, kind,
            width_panels(step.inner), step.gated, scratch,
        )  # fmt: skip
        barrier(arrived, threads)
        linear(
            counter + 32, threads, step.gated, step.tiles, step.rows, step.inner, layer.down, kind,
            width_panels(size), 0, step.hidden, lead, True, scratch,
        )  # fmt: skip
        barrier(arrived, threads)
        counter += 8 * STAGES_PER_LAYER
    sampled = ints(step.sampled, step.samples)
    for row in range(step.samples * thread // threads, step.samples * (thread + 1) // threads):
        _norm_to_tiles(
            step.hidden + 4 * sampled[row] * lead,
            size,
            step.final_norm,
            step.epsilon,
            step.normed,
            row,
            step.sample_rows,
        )
    barrier(arrived, threads)
    if step.samples > 0:
        linear(
            counter, threads, step.normed, step.sample_tiles, step.sample_rows, size, step.lm_head, kind,
            step.vocab_panels, 0, step.logits, step.vocab_panels * WIDTH, False, scratch,
        )  # fmt: skip


@cfunc(types.void(types.intp), cache=True, nogil=True)
def run_step(address: int) -> None:
    """What each thread of the team runs. `address`: of a STEP record."""
    _run(_steps(address, 1)[0], thread_number(), thread_count())
