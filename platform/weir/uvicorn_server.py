"""uvicorn, less patient with who does not read: `python -m weir.uvicorn_server --host HOST --port PORT`.

Its sends wait for the client, so that a slow one costs a bounded buffer; but they wait for ever. Here a client that
does not read enough for `STALL_S` to let the next send begin is cut off: the application then hears of it as of any
client that left.

It waits for ever for headers and bodies too, and takes headers of any size. Here a request's headers come within
`HEADERS_S` and fit into `HEADERS_MAX`, and its body goes on coming (`BODY_PACE` bytes in `BODY_S`), or the connection
is closed, for a body with an answer that says why: so a gateway can stand without a proxy before it.

What hundreds of clients send in one moment it would all parse in one turn of the event loop, before the application
sees the first of them. Here it is `READ_PER_TURN` connections a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import sys
from http import HTTPStatus
from typing import Any, Final, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from weir.servers import WEBSOCKET_MESSAGE_MAX
from weir.slow_clients import (
    BODY_PACE,
    BODY_S,
    HEADERS_S,
    LAST_READS_S,
    SLOW_BODIES,
    STALL_S,
    Answer,
)
from weir.stopping import LAST_WORDS_S, STOPPING
from weir.turnstile import Turnstile

log = structlog.get_logger(__name__)

HEADERS_MAX: Final = 64 * 1024
"""Bytes of the request line and all headers, as `deploy/nginx/weir.conf` has it."""
_RESET: Final = struct.pack("ii", 1, 0)
SMALL: Final = 16 * 1024
"""Bytes that wait for the end of the loop's turn, to go out together."""
READ_PER_TURN: Final = 32
"""A request is a tenth of a millisecond's work until its task exists."""
_NOT_STARTED: Final = 3


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
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


class JoiningTransport:
    """A transport that makes one write of what is small and written in one turn of the loop, or until `flush`: an
    answer's headers and its body. For the rest it is the one within."""

    def __init__(self, within: asyncio.Transport) -> None:
        self._within = within
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._within, name)

    def write(self, data: bytes) -> None:
        if self._size + len(data) > SMALL:
            # Not worth a copy; and who writes much is told at once when the client does not keep up.
            self.flush()
            self._within.write(data)
            return
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)

    def get_write_buffer_size(self) -> int:
        return self._size + self._within.get_write_buffer_size()

    def close(self) -> None:
        self.flush()
        self._within.close()

    def flush(self) -> None:
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if not self._within.is_closing():
                self._within.write(data)


_DOOR: Final = Turnstile(READ_PER_TURN)
"""This process has one event loop."""


class ImpatientHttp(_Impatient, HttpToolsProtocol):
    headers_s = HEADERS_S
    body_s = BODY_S
    _giving_up: asyncio.TimerHandle | None = None
    _is_in_headers = False
    _header_bytes = 0
    _body_bytes = 0
    _is_refused = False
    _unread: bytes = b""
    """What came before its turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport)))
        self._await_headers()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._unread += data
        elif _DOOR.passes(self._read_on):
            self._read(data)
        else:
            self._unread = data
            self.transport.pause_reading()

    def _read_on(self) -> bool:
        data, self._unread = self._unread, b""
        if self.transport.is_closing():
            return False
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._read(data)
        return True

    def _read(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._giving_up is None:
            self._await_headers()  # of the next request on this connection
        super().data_received(data)
        if self._is_in_headers:  # of those that are not complete the parser tells nothing
            self._header_bytes += len(data)
            self._refuse_large_headers()

    def on_headers_complete(self) -> None:
        own = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._header_bytes = max(self._header_bytes, own)
        self._refuse_large_headers()
        if self._is_refused:
            return
        super().on_headers_complete()
        self._is_in_headers = False
        self._stop_clock()
        self._await_body()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            self._stop_clock()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # What is left to do for a request that is answered, its client need not wait for.
        cast(JoiningTransport, self.transport).flush()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        self._stop_clock()
        super().handle_websocket_upgrade()

    def _await_headers(self) -> None:
        self._is_in_headers, self._header_bytes = True, 0
        self._giving_up = asyncio.get_running_loop().call_later(self.headers_s, self._look_at_headers)

    def _look_at_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_headers()  # a line break after the request that is being answered is not the next one
        else:
            log.warning("slow_client_cut_off", waiting_for="headers")
            self.transport.abort()

    def _await_body(self) -> None:
        self._body_bytes = 0
        self._giving_up = asyncio.get_running_loop().call_later(self.body_s, self._look_at_body)

    def _look_at_body(self) -> None:
        # While the application has not taken what came, it is not the client that is slow.
        if self._body_bytes >= BODY_PACE or self.flow.read_paused:
            self._await_body()
            return
        log.warning("slow_client_cut_off", waiting_for="body")
        is_next = not self.pipeline and not self.cycle.response_started
        self._refuse(SLOW_BODIES.answer(dict(self.scope)), is_next=is_next)

    def _refuse_large_headers(self) -> None:
        if self._header_bytes > HEADERS_MAX:
            self._is_in_headers = False
            is_next = self.cycle is None or self.cycle.response_complete
            self._refuse(Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, (), b""), is_next=is_next)

    def _refuse(self, answer: Answer, *, is_next: bool) -> None:
        """The last word on this connection, where it would not stand in another answer's place. An application that
        waits for the rest of a body hears that its client has left."""
        self._is_refused = True
        self._stop_clock()
        if not is_next:
            self.transport.abort()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(answer.on_wire())
        self._giving_up = asyncio.get_running_loop().call_later(LAST_READS_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class ImpatientWebSocket(_Impatient, WebSocketsSansIOProtocol):
    def handle_parser_exception(self) -> None:
        """The client's message is none, or too large. The rest of it is read and forgotten for a moment: a connection
        that is closed before its input is read is reset, and the client never learns why."""
        if self.close_sent:
            return
        told = self.conn.close_sent
        assert told is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": told.code, "reason": told.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self.disconnected = True
        self.close_timer = self.loop.call_later(LAST_READS_S, self.transport.close)


class PoliteServer(uvicorn.Server):
    """Does not cut what is open without a word."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.timeout_graceful_shutdown = STOPPING.drain_s + LAST_WORDS_S
        telling = asyncio.get_running_loop().call_later(STOPPING.drain_s, STOPPING.break_off)
        try:
            await super().shutdown(sockets)
        finally:
            telling.cancel()


def serve(application: str, *, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        loop="uvloop",
        http=ImpatientHttp,
        ws=ImpatientWebSocket,
        ws_max_size=WEBSOCKET_MESSAGE_MAX,
        lifespan="off",
        access_log=False,  # it would have whole URLs
        log_config=None,  # logs.py configures logging
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # tenants/client_address.py reads them, where WEIR_BEHIND_PROXY says that it may
    )
    server = PoliteServer(config)
    with contextlib.suppress(KeyboardInterrupt):  # which it raises again when it has stopped
        server.run()
    if not server.started:
        sys.exit(_NOT_STARTED)


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir.uvicorn_server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    serve("weir.asgi:application", host=asked.host, port=asked.port)


if __name__ == "__main__":
    main()
