"""What LoRA adapters (Hu et al., 2021, arXiv 2106.09685) add to the linear layers: y += (x A) B, in float32.

Row by row, each by its own adapter or none: what is added to a row depends on nothing around it. `lowered` makes x A
where x is at hand, in the stage before the product; `raised` adds the rest once the product is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numba import njit
from torch import Tensor

from engine_worker.attention.interface import Segment
from engine_worker.compiled.memory import floats, ints, record, record_reader
from engine_worker.compiled.vector import SUMS, WIDTH, padded
from engine_worker.runner.adapters import LowRank

QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = range(7)
_NAMES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_KINDS: Final = len(_NAMES)
_TOGETHER: Final = 3
"""Layers at most that read the same row: query, key and value."""

_PART: Final = record("rank", "inputs", "outputs", "down", "up")
"""What one adapter adds to one layer; rank 0: nothing. `down`: float32[rank][inputs]; `up`: float32[rank][outputs],
each row padded with zeros to a multiple of WIDTH; the rank to one of 4."""

_STEP: Final = record("parts", "layers", "of", "low", "rank")
"""`parts`: [adapters][layers][kinds]; `of`: int64[rows], the adapter of each row, or -1; `low`: float32[rows]
[_TOGETHER][rank], x A."""

_parts = record_reader(_PART)
_steps = record_reader(_STEP)


@njit(nogil=True)
def has_adapter(adapters: int, row: int) -> bool:
    """`adapters`: what `LowRanks.select` gave."""
    return adapters != 0 and ints(_steps(adapters, 1)[0].of, row + 1)[row] >= 0


@njit(nogil=True)
def _part(step: Any, layer: int, row: int, kind: int) -> Any:
    number = (ints(step.of, row + 1)[row] * step.layers + layer) * _KINDS + kind
    return _parts(step.parts, number + 1)[number]


@njit(nogil=True)
def _low(step: Any, row: int, place: int) -> int:
    return step.low + 4 * (row * _TOGETHER + place) * step.rank


@njit(nogil=True, fastmath=SUMS)
def lowered(adapters: int, layer: int, row: int, first: int, count: int, x: int) -> None:
    """x A of the kinds `first` to `first + count - 1`, of a row that has an adapter. `x`: float32[inputs]."""
    step = _steps(adapters, 1)[0]
    for place in range(count):
        part = _part(step, layer, row, first + place)
        source, low = floats(x, part.inputs), floats(_low(step, row, place), part.rank)
        for r in range(0, part.rank, 4):
            w0, w1, w2, w3 = _four(part.down, r, part.inputs, part.inputs)
            t0 = t1 = t2 = t3 = np.float32(0)
            for i in range(part.inputs):
                t0 += w0[i] * source[i]
                t1 += w1[i] * source[i]
                t2 += w2[i] * source[i]
                t3 += w3[i] * source[i]
            low[r], low[r + 1], low[r + 2], low[r + 3] = t0, t1, t2, t3


@njit(nogil=True)
def _four(matrix: int, row: int, lead: int, count: int) -> Any:
    """Four rows of a matrix at once: what they meet is read once for all of them."""
    at, step = matrix + 4 * row * lead, 4 * lead
    return (
        floats(at, count),
        floats(at + step, count),
        floats(at + 2 * step, count),
        floats(at + 3 * step, count),
    )


@njit(nogil=True, fastmath=SUMS)
def _add(low: int, up: int, rank: int, lead: int, y: int, count: int) -> None:
    factors, target = floats(low, rank), floats(y, count)
    for r in range(0, rank, 4):
        w0, w1, w2, w3 = _four(up, r, lead, count)
        f0, f1, f2, f3 = factors[r], factors[r + 1], factors[r + 2], factors[r + 3]
        for i in range(count):
            target[i] += (f0 * w0[i] + f1 * w1[i]) + (f2 * w2[i] + f3 * w3[i])


@njit(nogil=True)
def raised(adapters: int, layer: int, row: int, kind: int, place: int, y: int) -> None:
    """Adds the `place`th of what `lowered` made to `y`, float32[outputs]."""
    step = _steps(adapters, 1)[0]
    part = _part(step, layer, row, kind)
    lead = padded(part.outputs)
    _add(_low(step, row, place), part.up, part.rank, lead, y, part.outputs)


@njit(nogil=True)
def raised_panel(
    adapters: int, layer: int, first: int, rows: int, kind: int, place: int, panel: int, y: int
) -> None:
    """The same for a panel of `rows` rows from `first` on, those among them that have an adapter.

    `y`: float32[rows][WIDTH], their outputs from panel * WIDTH on.
    """
    step = _steps(adapters, 1)[0]
    for row in range(rows):
        if ints(step.of, first + row + 1)[first + row] < 0:
            continue
        part = _part(step, layer, first + row, kind)
        lead = padded(part.outputs)
        up = part.up + 4 * panel * WIDTH
        _add(_low(step, first + row, place), up, part.rank, lead, y + 4 * row * WIDTH, WIDTH)


class LowRanks:
    """The adapters of one model, packed. `adapters`: by name, what each adds to which layer."""

    def __init__(self, adapters: Mapping[str, Mapping[str, LowRank]], num_layers: int) -> None:
        self._numbers = {name: number for number, name in enumerate(adapters)}
        self._kept: list[Tensor] = []
        self._parts = np.zeros((len(adapters), num_layers, _KINDS), _PART)
        ranks = [0]
        for number, layers in enumerate(adapters.values()):
            for name, low_rank in layers.items():
                layer, kind = _place(name)
                self._parts[number, layer, kind] = self._packed(low_rank)
                ranks.append(self._parts[number, layer, kind]["rank"])
        self._rank = int(max(ranks))
        self._low = np.zeros(0, np.float32)
        self._step = np.zeros(1, _STEP)

    def select(self, segments: Sequence[Segment], rows: int) -> int:
        """The address of what kernels read for a step of `rows` rows, padding included; 0: no row has an adapter."""
        if not any(segment.adapter for segment in segments):
            return 0
        self._of = np.full(rows, -1, np.int64)
        for segment in segments:
            if segment.adapter:
                own = slice(segment.start, segment.start + segment.num_tokens)
                self._of[own] = self._numbers[segment.adapter]
        if len(self._low) < rows * _TOGETHER * self._rank:
            self._low = np.zeros(rows * _TOGETHER * self._rank, np.float32)
        addresses = (
            self._parts.ctypes.data,
            self._parts.shape[1],
            self._of.ctypes.data,
            self._low.ctypes.data,
        )
        self._step[0] = (*addresses, self._rank)
        return int(self._step.ctypes.data)

    def _packed(self, low_rank: LowRank) -> tuple[int, ...]:
        (own_rank, inputs), outputs = low_rank.down.shape, len(low_rank.up)
        rank = -(-own_rank // 4) * 4
        down, up = torch.zeros(rank, inputs), torch.zeros(rank, padded(outputs))
        down[:own_rank] = low_rank.down
        up[:own_rank, :outputs] = low_rank.up.T
        self._kept += (down, up)
        return rank, inputs, outputs, down.data_ptr(), up.data_ptr()


def _place(name: str) -> tuple[int, int]:
    """(layer, kind) of "model.layers.3.mlp.up_proj"."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(\w+)", name)
    assert found is not None
    return int(found[1]), _NAMES.index(found[2])
