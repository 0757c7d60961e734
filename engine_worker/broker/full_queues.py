"""What one process remembers of refusals: a flood of requests costs the broker a call now and then, not one each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engine_worker.broker.errors import QueueFull

_LONGEST_S: Final = 1.0
_SHARE: Final = 0.1
"""Of the longest wait: a queue that was refused for its length does not run empty meanwhile."""
_MANY: Final = 4096

Line = tuple[str, int, str]
"""Model, rank of the tier, tenant: where a request would stand."""


class FullQueues:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[Line, tuple[float, float, int]] = {}
        """Until when it holds, when it could be tried again, and for which longest wait, ms."""

    def remember(self, line: Line, max_wait_ms: int, refusal: QueueFull) -> None:
        """Of refusals for the wait alone: the other bounds count requests, and one may just have left."""
        if refusal.scope != "wait":
            return
        now = self._clock()
        if len(self._refused) >= _MANY:
            self._refused = {line: kept for line, kept in self._refused.items() if kept[0] > now}
        holds_s = min(_LONGEST_S, _SHARE * max_wait_ms / 1000, refusal.retry_after_ms / 1000)
        self._refused[line] = (now + holds_s, now + refusal.retry_after_ms / 1000, max_wait_ms)

    def check(self, line: Line, max_wait_ms: int) -> None:
        """Raises QueueFull where the broker has just refused one that would have waited as long, or longer."""
        found = self._refused.get(line)
        if found is None:
            return
        holds_until, again_at, refused_wait_ms = found
        now = self._clock()
        if now >= holds_until:
            del self._refused[line]
        elif max_wait_ms <= refused_wait_ms:
            raise QueueFull("wait", max(1000, round((again_at - now) * 1000)))
