"""Linear layers from tiles: y = x W^T, with what surrounds it done while the result is in cache.

Activations come tiled, [tiles][depth][rows], as `tile.tile` reads them; `rows` is the same for all
tiles of a step, the last padded. Weights are packed once into panels of WIDTH outputs.

Threads take chunks of panels from a shared counter, so that one which the system holds up does not
keep the others waiting.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.compiled.memory import floats
from engine_worker.compiled.team import take
from engine_worker.compiled.tile import (
    BYTE,
    FLOAT,
    HALF,
    LANES,
    MAX_ROWS,
    SIZES,
    WIDTH,
    byte_tile,
    half_tile,
    silu_gate,
    tile,
    widen_bytes,
    widen_half,
)

FEW_TILES: Final = 4
"""Up to here the weights are read once from memory, panel by panel; beyond, a group of panels that fits
the second-level cache meets all tiles, each of which then stays in the first level."""
_GROUP_BYTES: Final = 384 << 10


def tiling(rows: int) -> tuple[int, int]:
    """(tiles, rows of each), as even as can be: a tile of 10 rows is computed as fast per row as one of 12."""
    tiles = -(-rows // MAX_ROWS)
    return tiles, -(-rows // tiles)


def pack(weight: Tensor, kind: int, depth: int | None = None) -> Tensor:
    """[out, in] to panels, uint8[ceil(out / WIDTH), panel_bytes(kind, depth)], padded with zeros.

    A panel is [depth][WIDTH] weights. Bytes are rounded to 127 steps of the largest weight of their output.
    """
    outputs, inputs = weight.shape
    panels, depth = -(-outputs // WIDTH), depth or inputs
    padded = torch.zeros(panels * WIDTH, depth)
    padded[:outputs, :inputs] = weight
    packed = padded.view(panels, WIDTH, depth).transpose(1, 2)
    if kind != BYTE:
        packed = packed.to(torch.float16 if kind == HALF else torch.float32).contiguous()
        return packed.view(torch.uint8).view(panels, -1)
    scales = padded.abs().amax(dim=1).clamp_(min=1e-9).view(panels, WIDTH) / 127
    whole = (packed / scales[:, None]).round_().to(torch.int8).contiguous()
    return torch.cat((scales.view(torch.uint8), whole.view(torch.uint8).view(panels, -1)), dim=1)


@njit(nogil=True)
def panel_bytes(kind: int, depth: int) -> int:
    return depth * WIDTH * SIZES[kind] + (4 * WIDTH if kind == BYTE else 0)


@njit(nogil=True)
def group_panels(depth: int) -> int:
    """Panels of float32 weights that are kept in the second-level cache at once."""
    return max(1, _GROUP_BYTES // (depth * WIDTH * 4))


@njit(nogil=True)
def scratch_floats(depth: int) -> int:
    """float32 numbers of scratch that a thread needs for products of this depth."""
    return group_panels(depth) * depth * WIDTH + 2 * MAX_ROWS * WIDTH


@njit(nogil=True)
def _chunk(panels: int, threads: int, tiles: int, depth: int) -> int:
    """Panels that a thread takes at a time: two helpings each, no more than a group where tiles are many."""
    share = (panels + 2 * threads - 1) // (2 * threads)
    if tiles > FEW_TILES:
        return min(share, group_panels(depth))
    return min(share, 64)


@njit(nogil=True)
def _one(
    kind: int, rows: int, x: int, w: int, depth: int, y: int, ldy: int, add: bool, ahead: int, step: int
) -> None:
    if kind == HALF:
        half_tile(rows, x, w, WIDTH, depth, y, ldy, add, ahead, step)
    elif kind == BYTE:
        byte_tile(rows, x, w, WIDTH, depth, y, ldy, add, ahead, step)
    else:
        tile(rows, x, w, WIDTH, depth, y, ldy, add, ahead, step)


@njit(nogil=True)
def _widen(kind: int, panels: int, count: int, depth: int, scratch: int) -> int:
    """The address of `count` panels in float32: where they are, or copied to `scratch`."""
    if kind == FLOAT:
        return panels
    for number in range(count):
        source, target = panels + number * panel_bytes(kind, depth), scratch + 4 * number * depth * WIDTH
        if kind == HALF:
            widen_half(source, target, depth)
        else:
            widen_bytes(source, target, depth)
    return scratch


@njit(nogil=True)
def linear(
    counter: int,
    threads: int,
    x: int,
    tiles: int,
    rows: int,
    depth: int,
    w: int,
    kind: int,
    panels: int,
    bias: int,
    y: int,
    ldy: int,
    accumulate: bool,
    scratch: int,
) -> None:
    """One thread's part of y (+)= x W^T (+ bias).

    `x`: float32[tiles][depth][rows]; `w`: panels of `kind`; `bias`: float32[panels * WIDTH] or 0, not
    together with `accumulate`; `y`: float32[tiles * rows][ldy]; `scratch`: `scratch_floats(depth)` of this
    thread's own.
    """
    size, each = SIZES[kind], panel_bytes(kind, depth)
    chunk = _chunk(panels, threads, tiles, depth)
    add = accumulate or bias != 0
    while True:
        first = take(counter, chunk)
        if first >= panels:
            return
        last = min(first + chunk, panels)
        if bias != 0:
            for row in range(tiles * rows):
                target = floats(y + 4 * (row * ldy + first * WIDTH), (last - first) * WIDTH)
                target[:] = floats(bias + 4 * first * WIDTH, (last - first) * WIDTH)
        if tiles <= FEW_TILES:
            for panel in range(first, last):
                at = w + panel * each
                for t in range(tiles):
                    # While this panel is used, the next is fetched: each tile fetches its share.
                    ahead = at + each + t * (each // tiles)
                    target = y + 4 * (t * rows * ldy + panel * WIDTH)
                    source = x + 4 * t * depth * rows
                    _one(kind, rows, source, at, depth, target, ldy, add, ahead, WIDTH * size // tiles)
        else:
            at = _widen(kind, w + first * each, last - first, depth, scratch)
            for t in range(tiles):
                for panel in range(first, last):
                    b = at + (panel - first) * depth * WIDTH * 4
                    target = y + 4 * (t * rows * ldy + panel * WIDTH)
                    tile(rows, x + 4 * t * depth * rows, b, WIDTH, depth, target, ldy, add, b, WIDTH * 4)


@njit(nogil=True)
def gated(
    counter: int,
    threads: int,
    x: int,
    tiles: int,
    rows: int,
    depth: int,
    w: int,
    kind: int,
    panels: int,
    y: int,
    scratch: int,
) -> None:
    """One thread's part of y = silu(x Wg^T) * (x Wu^T), tiled again: float32[tiles][panels * WIDTH][rows].

    `w`: [panels][2], each panel of Wg followed by that of Wu.
    """
    size, each = SIZES[kind], panel_bytes(kind, depth)
    results = scratch + 4 * (scratch_floats(depth) - 2 * MAX_ROWS * WIDTH)
    other = results + 4 * MAX_ROWS * WIDTH
    made = floats(results, rows * WIDTH)
    chunk = max(1, _chunk(2 * panels, threads, tiles, depth) // 2)
    while True:
        first = take(counter, chunk)
        if first >= panels:
            return
        last = min(first + chunk, panels)
        if tiles <= FEW_TILES:
            for panel in range(first, last):
                at = w + 2 * panel * each
                for t in range(tiles):
                    source = x + 4 * t * depth * rows
                    ahead = at + 2 * each + 2 * t * (each // tiles)
                    step = WIDTH * size // tiles
                    _one(kind, rows, source, at, depth, results, WIDTH, False, ahead, step)
                    ahead += each // tiles
                    _one(kind, rows, source, at + each, depth, other, WIDTH, False, ahead, step)
                    silu_gate(results, other, rows * WIDTH // LANES)
                    _store_tiled(made, y + 4 * (t * panels + panel) * WIDTH * rows, rows)
        else:
            at = _widen(kind, w + 2 * first * each, 2 * (last - first), depth, scratch)
            for t in range(tiles):
                source = x + 4 * t * depth * rows
                for panel in range(first, last):
                    g = at + 2 * (panel - first) * depth * WIDTH * 4
                    u = g + depth * WIDTH * 4
                    tile(rows, source, g, WIDTH, depth, results, WIDTH, False, g, WIDTH * 4)
                    tile(rows, source, u, WIDTH, depth, other, WIDTH, False, u, WIDTH * 4)
                    silu_gate(results, other, rows * WIDTH // LANES)
                    _store_tiled(made, y + 4 * (t * panels + panel) * WIDTH * rows, rows)


@njit(nogil=True)
def _store_tiled(made: NDArray[np.float32], target: int, rows: int) -> None:
    """float32[rows][WIDTH] to [WIDTH][rows]."""
    out = floats(target, WIDTH * rows)
    for column in range(WIDTH):
        for row in range(rows):
            out[column * rows + row] = made[row * WIDTH + column]
