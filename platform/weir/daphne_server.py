"""Daphne with back-pressure: `python -m weir.daphne_server` takes what `python -m daphne` takes.

Daphne hands to the transport whatever the application sends and never looks back, so that a client that does
not read costs as much memory as there is to say. Here a send waits until the client has read most of what was
sent before, and a client that reads nothing for `STALL_S` is cut off: the application then hears of it as of any
client that left. Others never wait: each connection has a coroutine of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog
from daphne.cli import CommandLineInterface
from daphne.server import Server

log = structlog.get_logger(__name__)

BACKLOG_MAX: Final = 256 * 1024
"""Bytes that may wait in this process for one client; its kernel buffer is besides."""
STALL_S: Final = 30.0
_LOOK_S: Final = 0.05


class BoundedServer(Server):  # type: ignore[misc]  # Daphne has no types
    backlog_max = BACKLOG_MAX
    stall_s = STALL_S

    async def handle_reply(self, protocol: Any, message: dict[str, Any]) -> None:
        if message["type"] in ("http.response.body", "websocket.send"):
            await self._has_room(protocol)
        await super().handle_reply(protocol, message)

    async def _has_room(self, protocol: Any) -> None:
        """Until little of what was sent waits any more, or the client is gone or cut off."""
        transport = _transport(protocol)
        least = waiting = _backlog(transport)
        if waiting <= self.backlog_max:
            return
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
        while (waiting := _backlog(transport)) > self.backlog_max // 2:
            if self.connections.get(protocol, {"disconnected": True}).get("disconnected"):
                return
            if waiting < least:
                least, moved_at = waiting, loop.time()
            elif loop.time() - moved_at > self.stall_s:
                log.warning("slow_reader_cut_off", waiting_bytes=waiting)
                transport.abortConnection()
                return
            await asyncio.sleep(_LOOK_S)


def _transport(protocol: Any) -> Any:
    """Twisted's, of a request or of a websocket."""
    channel = getattr(protocol, "channel", None)
    return getattr(protocol if channel is None else channel, "transport", None)


def _backlog(transport: Any) -> int:
    """What Twisted holds for the socket: `FileDescriptor` has a word for it only when it tells a producer."""
    if transport is None:
        return 0
    waiting: int = len(transport.dataBuffer) - transport.offset + transport._tempDataLen
    return waiting


class CommandLine(CommandLineInterface):  # type: ignore[misc]
    server_class = BoundedServer


if __name__ == "__main__":
    CommandLine.entrypoint()
