"""The gateway, with a clock on its event loop: `GET /probe` tells how long it was held since the last time.

    python -m benchmarks.gateway.probed PORT

The loop is asked every millisecond. `held_ms` is the longest time between two of these by the clock: what a token of
somebody else's would have waited. `worked_ms` is the longest by the loop's own CPU time: on a machine that others use,
what the product is to blame for; it does not see who holds the interpreter's lock in another thread.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Final

from weir.uvicorn_server import serve

_TICK_S: Final = 0.001


class LoopClock:
    """Ticks from now on, in the loop that runs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin()
        self._loop.call_later(_TICK_S, self._tick)

    def take(self) -> dict[str, float]:
        """The longest gaps since the last time, in ms, and all of the loop's CPU time."""
        self._look()
        told = {"held_ms": self._held * 1000, "worked_ms": self._worked * 1000}
        self._begin()
        return told

    def _begin(self) -> None:
        self._held = self._worked = 0.0
        self._at, self._cpu = time.perf_counter(), time.thread_time()

    def _look(self) -> None:
        at, cpu = time.perf_counter(), time.thread_time()
        self._held, self._worked = max(self._held, at - self._at), max(self._worked, cpu - self._cpu)
        self._at, self._cpu = at, cpu

    def _tick(self) -> None:
        self._look()
        self._loop.call_later(_TICK_S, self._tick)


_clocks: list[LoopClock] = []


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if not _clocks:
        _clocks.append(LoopClock())
    if scope["type"] != "http" or scope["path"] != "/probe":
        await _gateway(scope, receive, send)
        return
    body = json.dumps(_clocks[0].take()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    serve("benchmarks.gateway.probed:application", host="127.0.0.1", port=int(sys.argv[1]))
else:
    from weir.asgi import application as _gateway
