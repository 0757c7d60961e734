"""How long the event loop is held: while it is, no token of anybody's is passed on."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Final

import structlog
from prometheus_client import Histogram

log = structlog.get_logger(__name__)

_TICK_S: Final = 0.05
_LOGGED_S: Final = 0.25
LAG: Final = Histogram(
    "weir_event_loop_lag_seconds",
    "How late the gateway's event loop comes to what is due, asked every 50 ms.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)


class LoopLag:
    """Asks from now on until it is closed. One per event loop."""

    def __init__(self, tick_s: float = _TICK_S) -> None:
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._context = Context()  # not that of the request that comes first: nothing here is about it
        self.longest_s = 0.0
        self._ask()

    def close(self) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        self._due = self._loop.time() + self._tick_s
        self._timer = self._loop.call_at(self._due, self._answer, context=self._context)

    def _answer(self) -> None:
        late_s = max(0.0, self._loop.time() - self._due)
        LAG.observe(late_s)
        self.longest_s = max(self.longest_s, late_s)
        if late_s > _LOGGED_S:
            log.warning("event_loop_held", held_ms=round(late_s * 1000))
        self._ask()
