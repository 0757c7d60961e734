"""Requests of which a gateway can't know whether they were queued: they are cancelled in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from engine_worker.broker.errors import BrokerUnavailable

_ATTEMPTS: Final = 20
_AGAIN_S: Final = 1.0


class Doubts:
    """One per event loop. Each has a task named `broker-undo`, so that none waits for another's answer."""

    def __init__(self, cancel: Callable[[str, str], Awaitable[None]]) -> None:
        self._cancel = cancel
        self._tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, model: str, request_id: str) -> None:
        task = asyncio.create_task(self._undo(model, request_id), name="broker-undo")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _undo(self, model: str, request_id: str) -> None:
        # Twice in a row without failure, a second apart: the first may overtake an enqueue that still
        # sits in the dead connection's buffer at the server.
        succeeded = 0
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(BrokerUnavailable):
                await self._cancel(model, request_id)
                succeeded += 1
                if succeeded == 2:
                    return
            await asyncio.sleep(_AGAIN_S)
