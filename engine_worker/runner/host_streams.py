"""The twin of a GPU's streams on the CPU: whatever events do not order gives wrong numbers sooner or later."""

from __future__ import annotations

import random
import threading
from collections import deque

import torch
from torch import Tensor

from engine_worker.runner.streams import Event, Work


class HostStreams:
    """The twin on the CPU: three queues, worked off in an order drawn from `seed` among those that events allow.

    Nothing runs before somebody waits for it.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, no secret
        self._kernels: deque[_Step] = deque()
        self._up: deque[_Step] = deque()
        self._down: deque[_Step] = deque()
        self._lock = threading.Lock()
        self.captured = 0

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def run(self, work: Work) -> None:
        self._kernels.append(_Step(work))

    def event(self) -> Event:
        return self._mark(self._kernels)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _HostEvent)
        self._kernels.append(_Step(_nothing, event))

    def upload(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        assert after is None or isinstance(after, _HostEvent)
        self._up.append(_Step(lambda: _copy(source, target), after))
        return self._mark(self._up)

    def download(self, source: Tensor, target: Tensor) -> Event:
        self._down.append(_Step(lambda: _copy(source, target), self._mark(self._kernels)))
        return self._mark(self._down)

    def settle(self) -> None:
        self.event().wait()

    def capture(self, work: Work) -> Work:
        self.run(work)
        self.captured += 1
        return work

    def advance(self, event: _HostEvent) -> None:
        with self._lock:
            while not event.passed:
                queues = [
                    queue for queue in (self._kernels, self._up, self._down) if queue and queue[0].is_ready
                ]
                assert queues, "streams wait for each other"
                self._random.choice(queues).popleft().work()

    def _mark(self, queue: deque[_Step]) -> _HostEvent:
        event = _HostEvent(self)
        queue.append(_Step(event.pass_))
        return event


class _HostEvent:
    def __init__(self, streams: HostStreams) -> None:
        self._streams = streams
        self.passed = False

    def pass_(self) -> None:
        self.passed = True

    def wait(self) -> None:
        self._streams.advance(self)


class _Step:
    def __init__(self, work: Work, after: _HostEvent | None = None) -> None:
        self.work, self._after = work, after

    @property
    def is_ready(self) -> bool:
        return self._after is None or self._after.passed


def _nothing() -> None: ...


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
