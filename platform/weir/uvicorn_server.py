"""uvicorn, less patient with who does not read: `python -m weir.uvicorn_server --host HOST --port PORT`.

Its sends wait for the client, so that a slow one costs a bounded buffer; but they wait for ever. Here a client that
does not read enough for `STALL_S` to let the next send begin is cut off: the application then hears of it as of any
client that left.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
from typing import Any, Final

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

log = structlog.get_logger(__name__)

STALL_S: Final = 30.0
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_DRAIN_S: Final = 10
"""Open streams have so long to end; then they are cut, and clients resume at another gateway."""


class _Impatient(asyncio.Protocol):
    """What the transport tells of its buffer: above the high-water mark, and below the low one again."""

    stall_s = STALL_S
    transport: Any
    _cutting: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cutting = asyncio.get_running_loop().call_later(self.stall_s, self._cut_off)

    def resume_writing(self) -> None:
        self._wait_no_longer()
        super().resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._wait_no_longer()
        super().connection_lost(error)

    def _wait_no_longer(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None

    def _cut_off(self) -> None:
        log.warning("slow_reader_cut_off", waiting_bytes=self.transport.get_write_buffer_size())
        # A reset: without it the kernel goes on keeping what it could not deliver.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()


class ImpatientHttp(_Impatient, HttpToolsProtocol):
    pass


class ImpatientWebSocket(_Impatient, WebSocketsSansIOProtocol):
    pass


def serve(application: str, *, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT."""
    uvicorn.run(
        application,
        host=host,
        port=port,
        loop="uvloop",
        http=ImpatientHttp,
        ws=ImpatientWebSocket,
        lifespan="off",
        access_log=False,  # it would have whole URLs
        log_config=None,  # logs.py configures logging
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # tenants/client_address.py reads them, where WEIR_BEHIND_PROXY says that it may
        timeout_graceful_shutdown=_DRAIN_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir.uvicorn_server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    serve("weir.asgi:application", host=asked.host, port=asked.port)


if __name__ == "__main__":
    main()
