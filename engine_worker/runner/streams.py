"""What a step of a GPU is made of besides kernels: copies on streams of their own, events, graphs.

Behind one interface, so that the logic that uses it runs in tests on the CPU too. The twin there makes each
copy as late as it may: a buffer that is written again before its copy has ended gives wrong numbers in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_cuda: Any = torch.cuda
"""Its stubs are half typed."""


class Copy(Protocol):
    """One that was begun."""

    def wait(self) -> None:
        """The host waits for its end."""


class Streams(Protocol):
    def pinned(self, size: int) -> Tensor:
        """int32[size] in host memory that copies may be made from."""

    def upload(self, source: Tensor, target: Tensor) -> Copy:
        """What is computed from now on sees the copy; nothing computed before is disturbed by it."""

    def settle(self) -> None:
        """Kernels are launched next."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run`, which always uses the same memory, to be repeated at the price of one call."""


class CudaStreams:
    """Copies on a stream beside that of the kernels; the two wait for each other's events, the host for neither."""

    def __init__(self, device: torch.device) -> None:
        self._copies: Any = _cuda.Stream(device)
        self._pool: Any = None

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> Copy:
        kernels = torch.cuda.current_stream()
        # What reads the target's old content was launched before.
        self._copies.wait_stream(kernels)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            done = _cuda.Event()
            done.record()
        kernels.wait_event(done)
        return _Event(done)

    def settle(self) -> None: ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        side = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets libraries take their memory, which a graph must not
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        # Graphs never run at the same time: all of them may compute in the same memory.
        self._pool = self._pool or graph.pool()
        return graph.replay


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class HostStreams:
    """The twin on the CPU. A copy reads its source when somebody waits for it, or its target is about to be used."""

    def __init__(self) -> None:
        self._late: list[_LateCopy] = []
        self.captured = 0

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    def upload(self, source: Tensor, target: Tensor) -> Copy:
        copy = _LateCopy(source, target)
        self._late.append(copy)
        return copy

    def settle(self) -> None:
        while self._late:
            self._late.pop(0).wait()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.captured += 1
        return run


class _LateCopy:
    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._is_done = False

    def wait(self) -> None:
        if not self._is_done:
            self._target.copy_(self._source)
        self._is_done = True


RING: Final = 3
"""Buffers: one being copied from, one waiting, one being filled."""


class Ring:
    """Host buffers to copy from, each written again only when its last copy has ended."""

    def __init__(self, streams: Streams, size: int, buffers: int = RING) -> None:
        self._streams = streams
        self._buffers = [streams.pinned(size) for _ in range(buffers)]
        self._copies: list[Copy | None] = [None] * buffers
        self._next = 0

    def upload(self, values: NDArray[np.int32], target: Tensor) -> None:
        """`values` to the head of `target`: int32[at least as many]."""
        at = self._next
        self._next = (at + 1) % len(self._buffers)
        if (before := self._copies[at]) is not None:
            before.wait()
        buffer = self._buffers[at][: values.size]
        buffer.numpy()[:] = values
        self._copies[at] = self._streams.upload(buffer, target[: values.size])
