"""Numbers on their way to a device and back, through buffers that are used again and again."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.runner.streams import Event, Streams

RING: Final = 3
"""Buffers: one being copied from, one waiting, one being filled."""


class Ring:
    """Ways to the device: a step's numbers go up while the step before still reads its own.

    A buffer on the host is written again when its copy has ended, its twin on the device when kernels have
    taken from it what it held.
    """

    def __init__(self, streams: Streams, size: int, device: torch.device, buffers: int = RING) -> None:
        self._streams = streams
        self._host = [streams.pinned(size) for _ in range(buffers)]
        self._device = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._copied: list[Event | None] = [None] * buffers
        self._taken: list[Event | None] = [None] * buffers
        self._next = 0

    def upload(self, values: NDArray[np.int32], target: Tensor) -> None:
        """`values` to the head of `target`, int32[at least as many], for kernels launched after this."""
        at, size = self._next, values.size
        self._next = (at + 1) % len(self._host)
        if (before := self._copied[at]) is not None:
            before.wait()
        buffer, staged = self._host[at][:size], self._device[at][:size]
        buffer.numpy()[:] = values
        self._copied[at] = copied = self._streams.upload(buffer, staged, self._taken[at])
        self._streams.wait(copied)
        self._streams.run(lambda: _copy(staged, target[:size]))
        self._taken[at] = self._streams.event()


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class Told:
    """Numbers on their way to the host."""

    def __init__(self, copied: Event, buffer: Tensor) -> None:
        self._copied, self._buffer = copied, buffer
        self._values: list[int] | None = None

    def values(self) -> list[int]:
        """Waits for them, the first time."""
        if self._values is None:
            self._copied.wait()
            self._values = self._buffer.tolist()
        return self._values


class BackRing:
    """Ways back to the host: kernels go on while a copy runs."""

    def __init__(self, streams: Streams, size: int, device: torch.device, buffers: int = RING) -> None:
        self._streams = streams
        self._host = [streams.pinned(size) for _ in range(buffers)]
        self._device = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(buffers)]
        self._told: list[Told | None] = [None] * buffers
        self._next = 0

    def download(self, source: Tensor) -> Told:
        """int32[as many], as kernels launched before this leave it. Whoever has not looked yet keeps what was told."""
        at, size = self._next, len(source)
        self._next = (at + 1) % len(self._host)
        if (before := self._told[at]) is not None:
            before.values()
        staged, buffer = self._device[at][:size], self._host[at][:size]
        self._streams.run(lambda: _copy(source, staged))
        self._told[at] = told = Told(self._streams.download(staged, buffer), buffer)
        return told
