"""Linear layers from tiles: y = x W^T, with what surrounds it done while the result is in cache.

Activations come tiled, [tiles][depth][rows], as `tile.tile` reads them, or rounded to bytes, as
`dot.dot_tile` does; `rows` is the same for all tiles of a step, the last padded. Weights are packed once
into panels of WIDTH outputs.

Threads take chunks of panels from a shared counter, so that one which the system holds up does not
keep the others waiting.
"""

from __future__ import annotations

from typing import Final

import torch
from numba import njit
from torch import Tensor

from engine_worker.compiled import dot
from engine_worker.compiled.low_rank import GATE, UP, raised_panel
from engine_worker.compiled.memory import floats
from engine_worker.compiled.pointwise import gelu_gate, silu_gate, turned
from engine_worker.compiled.team import take
from engine_worker.compiled.tile import BYTE, FLOAT, HALF, SIZES, tile, widen_bytes, widen_half
from engine_worker.compiled.vector import CONVERTS_BESIDE, MAX_ROWS, VECTORS, WIDTH

DOT: Final = 4
"""A kind of weights beside `tile`'s: bytes that meet bytes, see `dot`."""

_NEAR_NUMBERS: Final = 192 << 10
"""Activations that stay in the second-level cache meet the weights panel by panel, each read once from memory while
the one before is used. Where they are more, a tile of them stays in the first level, and meets a group of panels
that stays in the second."""
_GROUP_BYTES: Final = 384 << 10
_PANELS: Final = 64
"""Panels that a thread takes at once, at most: one that the system holds up does not keep the others waiting long."""
_WORTH_WIDENING: Final = 3
"""Tiles from which on a panel is made float32 once, and not by each; float16 never where that costs a tile nothing."""


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
    if kind == DOT:
        depth = dot.groups(depth) * dot.GROUP
    padded = torch.zeros(panels * WIDTH, depth)
    padded[:outputs, :inputs] = weight
    packed = padded.view(panels, WIDTH, depth).transpose(1, 2)
    if kind in (FLOAT, HALF):
        packed = packed.to(torch.float16 if kind == HALF else torch.float32).contiguous()
        return packed.view(torch.uint8).view(panels, -1)
    scales = padded.abs().amax(dim=1).clamp_(min=1e-9).view(panels, WIDTH) / 127
    whole = (packed / scales[:, None]).round_()
    if kind == DOT:
        # Four steps of a column side by side, as one instruction takes them.
        whole = (whole + 128).view(panels, depth // 4, 4, WIDTH).transpose(2, 3).to(torch.uint8)
    else:
        whole = whole.to(torch.int8).view(torch.uint8)
    return torch.cat((scales.view(torch.uint8), whole.reshape(panels, -1)), dim=1)


@njit(nogil=True)
def panel_bytes(kind: int, depth: int) -> int:
    if kind == DOT:
        return 4 * WIDTH + dot.groups(depth) * dot.GROUP * WIDTH
    return depth * WIDTH * SIZES[kind] + (4 * WIDTH if kind == BYTE else 0)


@njit(nogil=True)
def tile_bytes(kind: int, rows: int, depth: int) -> int:
    """Bytes of one tile of activations, as weights of a kind meet them."""
    return dot.tile_bytes(rows, depth) if kind == DOT else 4 * rows * depth


@njit(nogil=True)
def group_panels(kind: int, depth: int) -> int:
    """Panels that are kept in the second-level cache at once: bytes, or float32."""
    return max(1, _GROUP_BYTES // panel_bytes(DOT if kind == DOT else FLOAT, depth))


@njit(nogil=True)
def scratch_floats(depth: int) -> int:
    """float32 numbers of scratch that a thread needs for products of this depth."""
    return _widened_floats(depth) + 2 * MAX_ROWS * WIDTH


@njit(nogil=True)
def _widened_floats(depth: int) -> int:
    """A group of panels in float32, or a gate's and its factor's, of which a group may hold but one."""
    return max(2, group_panels(FLOAT, depth)) * depth * WIDTH


@njit(nogil=True)
def _portions(
    kind: int, units: int, beside: int, threads: int, tiles: int, rows: int, depth: int
) -> tuple[int, int, int]:
    """(chunks that threads take, units of a chunk that meet all tiles before the next do, bytes of the next panel that
    are fetched while a tile meets one). A unit: `beside` panels."""
    is_near = tiles * rows * depth <= _NEAR_NUMBERS
    most = max(1, (_PANELS if is_near else group_panels(kind, depth)) // beside)
    helpings = max(2, -(-units // (most * threads)))
    chunks = min(units, helpings * threads)
    if is_near:
        return chunks, 1, panel_bytes(kind, depth) // tiles
    return chunks, most, 0


@njit(nogil=True)
def chunk(number: int, chunks: int, units: int) -> tuple[int, int]:
    """(first unit, one past the last): chunks of the same size, or the first of one unit more. Where there are as many
    for each thread, each gets the same to do."""
    size, more = units // chunks, units % chunks
    first = number * size + min(number, more)
    return first, first + size + (1 if number < more else 0)


@njit(nogil=True)
def _one(
    kind: int, rows: int, x: int, w: int, depth: int, y: int, ldy: int, add: bool, ahead: int, share: int
) -> None:
    """One tile; meanwhile `share` bytes from `ahead` on are fetched."""
    if kind == DOT:
        dot.dot_tile(rows, x, w, dot.groups(depth), y, ldy, add, ahead)
    else:
        tile(kind, rows, False, x, w, WIDTH, depth, y, ldy, add, ahead, share // depth)


@njit(nogil=True)
def _widened(kind: int, panels: int, count: int, tiles: int, depth: int, scratch: int) -> tuple[int, int]:
    """`count` panels as the tiles meet them: (kind, address), where they are or in float32 in `scratch`."""
    if kind in (FLOAT, DOT) or tiles < _WORTH_WIDENING or (kind == HALF and CONVERTS_BESIDE):
        return kind, panels
    for number in range(count):
        source, target = panels + number * panel_bytes(kind, depth), scratch + 4 * number * depth * WIDTH
        if kind == HALF:
            widen_half(source, target, depth)
        else:
            widen_bytes(source, target, depth)
    return FLOAT, scratch


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

    `x`: `tiles` tiles of `tile_bytes`; `w`: panels of `kind`; `bias`: float32[panels * WIDTH] or 0, not
    together with `accumulate`; `y`: float32[tiles * rows][ldy]; `scratch`: `scratch_floats(depth)` of this
    thread's own.
    """
    each, of_x = panel_bytes(kind, depth), tile_bytes(kind, rows, depth)
    chunks, block, share = _portions(kind, panels, 1, threads, tiles, rows, depth)
    add = accumulate or bias != 0
    while True:
        number = take(counter, 1)
        if number >= chunks:
            return
        first, last = chunk(number, chunks, panels)
        if bias != 0:
            for row in range(tiles * rows):
                target = floats(y + 4 * (row * ldy + first * WIDTH), (last - first) * WIDTH)
                target[:] = floats(bias + 4 * first * WIDTH, (last - first) * WIDTH)
        for begin in range(first, last, block):
            end = min(begin + block, last)
            wide, at = _widened(kind, w + begin * each, end - begin, tiles, depth, scratch)
            stride = panel_bytes(wide, depth)
            ahead = w + end * each
            for t in range(tiles):
                for panel in range(begin, end):
                    target = y + 4 * (t * rows * ldy + panel * WIDTH)
                    b = at + (panel - begin) * stride
                    _one(wide, rows, x + t * of_x, b, depth, target, ldy, add, ahead, share)
                    ahead += share


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
    ldy: int,
    gelu: bool,
    adapters: int,
    layer: int,
    scratch: int,
) -> None:
    """One thread's part of y = silu(x Wg^T) * (x Wu^T), or with GELU for SiLU; either product with what `adapters` add
    in `layer`.

    `x`: as `linear`'s; `w`: [panels][2], each panel of Wg followed by that of Wu; `y`: tiled again,
    float32[tiles][panels * WIDTH][rows]; for bytes, which are rounded by rows, float32[tiles * rows][ldy].
    """
    each, of_x = panel_bytes(kind, depth), tile_bytes(kind, rows, depth)
    results = scratch + 4 * _widened_floats(depth)
    other = results + 4 * MAX_ROWS * WIDTH
    chunks, block, share = _portions(kind, panels, 2, threads, tiles, rows, depth)
    while True:
        number = take(counter, 1)
        if number >= chunks:
            return
        first, last = chunk(number, chunks, panels)
        for begin in range(first, last, block):
            end = min(begin + block, last)
            wide, at = _widened(kind, w + 2 * begin * each, 2 * (end - begin), tiles, depth, scratch)
            stride = panel_bytes(wide, depth)
            ahead = w + 2 * end * each
            for t in range(tiles):
                for panel in range(begin, end):
                    g = at + 2 * (panel - begin) * stride
                    _one(wide, rows, x + t * of_x, g, depth, results, WIDTH, False, ahead, share)
                    _one(
                        wide, rows, x + t * of_x, g + stride, depth, other, WIDTH, False, ahead + share, share
                    )
                    ahead += 2 * share
                    if adapters != 0:
                        raised_panel(adapters, layer, t * rows, rows, GATE, 0, panel, results)
                        raised_panel(adapters, layer, t * rows, rows, UP, 1, panel, other)
                    if kind == DOT:
                        target = y + 4 * (t * rows * ldy + panel * WIDTH)
                        _act(gelu, results, other, rows, target, ldy)
                    else:
                        _act(gelu, results, other, rows, results, WIDTH)
                        target = y + 4 * (t * panels + panel) * WIDTH * rows
                        turned(results, WIDTH, rows, WIDTH, target)


@njit(nogil=True)
def _act(gelu: bool, gate: int, up: int, rows: int, target: int, lead: int) -> None:
    if gelu:
        gelu_gate(gate, up, rows, VECTORS, target, lead)
    else:
        silu_gate(gate, up, rows, VECTORS, target, lead)
