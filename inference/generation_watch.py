"""Looks at the open generations of an event loop every so often, and only while there are any."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import Context
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

if TYPE_CHECKING:
    from inference.services.generation import Generation


class GenerationWatch(ABC):
    """One per event loop and kind."""

    INTERVAL_S: ClassVar[float]

    def __init__(self) -> None:
        self._open: WeakSet[Generation] = WeakSet()
        self._task: asyncio.Task[None] | None = None

    def add(self, generation: Generation) -> None:
        self._open.add(generation)
        if self._task is None or self._task.done():
            # For all of them: not in the context of the request that opens the first.
            self._task = asyncio.create_task(self._watch(), name=type(self).__name__, context=Context())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.INTERVAL_S)
            running = [generation for generation in self._open if generation.is_running]
            if not running:
                return
            await self._look(running)

    @abstractmethod
    async def _look(self, running: Sequence[Generation]) -> None:
        """Once each interval. What it raises ends the watch until the next generation comes."""
