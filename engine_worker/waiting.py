"""Waiting: for the next try, and for an event with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

_MIN_S: Final = 0.05
_MAX_S: Final = 2.0


class Backoff:
    """Doubling waits with jitter: a fleet must not come back in one instant."""

    def __init__(self) -> None:
        self._next_s = _MIN_S

    def reset(self) -> None:
        self._next_s = _MIN_S

    async def sleep(self) -> None:
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1))  # noqa: S311 - no secret
        self._next_s = min(self._next_s * 2, _MAX_S)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set or the time is over."""
    # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation (python/cpython#86296).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
