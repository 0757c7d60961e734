"""What a step of a GPU is made of besides kernels: copies on streams of their own, events, graphs.

Behind one interface, so that the logic that uses it runs in tests on the CPU too: `host_streams.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

_cuda: Any = torch.cuda
"""Its stubs are half typed."""

Work = Callable[[], None]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """The host waits until it has passed."""


class Streams(Protocol):
    """One stream of kernels, one of copies to the device, one of copies back. Each keeps its own order."""

    def pinned(self, size: int) -> Tensor:
        """int32[size] in host memory that copies may be made from and to."""

    def run(self, work: Work) -> None:
        """Launches kernels."""

    def event(self) -> Event:
        """Passes when all kernels launched so far have ended."""

    def wait(self, event: Event) -> None:
        """Kernels launched from now on begin after it."""

    def upload(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        """The end of a copy to the device that begins after `after`, whatever kernels do meanwhile."""

    def download(self, source: Tensor, target: Tensor) -> Event:
        """The end of a copy to the host that begins after the kernels launched so far, and holds up none."""

    def settle(self) -> None:
        """What was launched is about to be used by torch's operations."""

    def capture(self, work: Work) -> Work:
        """`work`, which always uses the same memory, to be run again at the price of one launch."""


class CudaStreams:
    """`device`'s own streams. The host waits for events only, and only where it is told to."""

    def __init__(self, device: torch.device) -> None:
        # "cuda" means whichever device a thread has chosen: the number does not change with the thread.
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._up, self._down, self._captures = (_cuda.Stream(self._device) for _ in range(3))
        self._pool: Any = None

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> None:
        # Triton and libraries launch on the calling thread's device.
        with torch.cuda.device(self._device):
            work()

    def event(self) -> Event:
        return self._mark(self._kernels)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._kernels.wait_event(event.event)

    def upload(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        if after is not None:
            assert isinstance(after, _CudaEvent)
            self._up.wait_event(after.event)
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
        return self._mark(self._up)

    def download(self, source: Tensor, target: Tensor) -> Event:
        self._down.wait_stream(self._kernels)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        return self._mark(self._down)

    def settle(self) -> None:
        """torch's operations are kernels of the same stream."""

    def capture(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            self._captures.wait_stream(self._kernels)
            with torch.cuda.stream(self._captures):
                # On the stream of the capture: what Triton compiles, modules that are loaded at their first
                # kernel and the workspaces of libraries, one per stream, must all be there before it.
                for _ in range(2):
                    work()
            self._kernels.wait_stream(self._captures)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads ask of the device meanwhile is no business of this graph.
            with _cuda.graph(
                graph, pool=self._pool, stream=self._captures, capture_error_mode="thread_local"
            ):
                work()
        # Graphs never run at the same time: all of them may compute in the same memory.
        self._pool = self._pool or graph.pool()
        return partial(_replay, graph, work)

    @property
    def _kernels(self) -> Any:
        return torch.cuda.current_stream(self._device)

    @staticmethod
    def _mark(stream: Any) -> _CudaEvent:
        event = _cuda.Event()
        event.record(stream)
        return _CudaEvent(event)


def _replay(graph: torch.cuda.CUDAGraph, work: Work) -> None:
    """`work` is held and not run: a graph knows addresses, so what lies there must live as long as it does."""
    graph.replay()


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()
