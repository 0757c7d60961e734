"""Daphne with back-pressure: `python -m weir.daphne_server` takes what `python -m daphne` takes.

Daphne hands to the transport whatever the application sends and never looks back, so that a client that does
not read costs as much memory as there is to say. Here a send waits until the client has read most of what was
sent before, and a client that reads nothing for `STALL_S` is cut off: the application then hears of it as of any
client that left. Others never wait: each connection has a coroutine of its own.

Twisted, below, waits for headers and bodies as long as a byte comes now and then. Here they come in time, as with
uvicorn's gateway, or the connection is closed, for a body with an answer that says why.

Twisted parses forms, on the event loop and for nobody, and answers one that is none itself, without a word. Here a body
is the application's. And a websocket message that is too large is told so (close code 1009) before its connection ends.

Twisted lets 50 clients wait to be accepted: more who come while the loop is held are turned away by the kernel, after
seconds or a minute. Here as many may wait as with uvicorn.

Daphne cuts what is open when it is told to stop. Here it ends, or breaks off with a word, as stopping.py says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import structlog
from daphne.cli import CommandLineInterface
from daphne.http_protocol import WebRequest
from daphne.server import Server
from twisted.internet.defer import Deferred
from twisted.web import http

from weir.servers import WEBSOCKET_MESSAGE_MAX
from weir.slow_clients import BODY_PACE, BODY_S, HEADERS_S, LAST_READS_S, SLOW_BODIES, STALL_S
from weir.stopping import LAST_WORDS_S, STOPPING

log = structlog.get_logger(__name__)

BACKLOG_MAX: Final = 256 * 1024
"""Bytes that may wait in this process for one client; its kernel buffer is besides."""
ACCEPT_QUEUE: Final = 2048
"""Connections that the kernel holds until they are accepted; it takes no more than `net.core.somaxconn`."""
_LOOK_S: Final = 0.05
_Channel: Any = http.HTTPChannel  # much of Twisted has no types


class ImpatientChannel(_Channel):  # type: ignore[misc]
    """A connection of HTTP/1.1, until it is taken over by a websocket."""

    headers_s = HEADERS_S
    body_s = BODY_S
    transport: Any
    _giving_up: asyncio.TimerHandle | None = None
    _body_bytes = 0
    _is_refused = False
    requests: list[Any]
    _command: bytes
    _path: bytes
    _make_request: Callable[..., Any]

    @property
    def requestFactory(self) -> Callable[..., Any]:
        return self._make_request

    @requestFactory.setter
    def requestFactory(self, factory: Callable[..., Any]) -> None:
        """Daphne says what it is for each connection."""
        self._make_request = partial(factory, parsePOSTFormSubmission=False)

    def connectionMade(self) -> None:
        super().connectionMade()
        self._expect(self.headers_s, self._late_headers)

    def dataReceived(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._giving_up is None and not self._handlingRequest:
            self._expect(self.headers_s, self._late_headers)  # of the next request on this connection
        super().dataReceived(data)

    def allHeadersReceived(self) -> None:
        super().allHeadersReceived()
        self._body_bytes = 0
        self._expect(self.body_s, self._look_at_body)

    def rawDataReceived(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().rawDataReceived(data)

    def allContentReceived(self) -> None:
        self._expect_nothing()
        super().allContentReceived()

    def connectionLost(self, reason: Any = None) -> None:
        self._expect_nothing()
        super().connectionLost(reason)

    def _late_headers(self) -> None:
        log.warning("slow_client_cut_off", waiting_for="headers")
        self.transport.abortConnection()

    def _look_at_body(self) -> None:
        if self._body_bytes < BODY_PACE:
            self._refuse_slow_body()
            return
        self._body_bytes = 0
        self._expect(self.body_s, self._look_at_body)

    def _refuse_slow_body(self) -> None:
        log.warning("slow_client_cut_off", waiting_for="body")
        self._is_refused = True
        self.transport.write(SLOW_BODIES.answer(self._scope()).on_wire())
        self._expect(LAST_READS_S, self.transport.loseConnection)

    def _scope(self) -> dict[str, Any]:
        """What Daphne would tell the application of a request that is not whole yet. Twisted begins the next one only
        when this one is answered."""
        (request,) = self.requests
        path, _, query = self._path.partition(b"?")
        return {
            "type": "http",
            "method": self._command.decode("latin-1"),
            "path": unquote(path.decode("latin-1")),
            "query_string": query,
            "headers": [
                (name.lower(), value)
                for name, values in request.requestHeaders.getAllRawHeaders()
                for value in values
            ],
        }

    def _expect(self, within_s: float, otherwise: Callable[[], None]) -> None:
        self._expect_nothing()
        self._giving_up = asyncio.get_running_loop().call_later(within_s, otherwise)

    def _expect_nothing(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class BoundedServer(Server):  # type: ignore[misc]  # Daphne has no types
    backlog_max = BACKLOG_MAX
    stall_s = STALL_S

    def __init__(self, *args: Any, endpoints: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs |= {
            "websocket_max_message_size": WEBSOCKET_MESSAGE_MAX,
            "websocket_max_frame_size": WEBSOCKET_MESSAGE_MAX,
        }
        super().__init__(*args, endpoints=[_with_accept_queue(text) for text in endpoints], **kwargs)
        self._ports: list[Any] = []

    @property
    def http_factory(self) -> Any:
        return self._http_factory

    @http_factory.setter
    def http_factory(self, factory: Any) -> None:
        """Daphne makes it as it starts to run."""
        factory.protocol = ImpatientChannel
        self._http_factory = factory

    @property
    def ws_factory(self) -> Any:
        return self._ws_factory

    @ws_factory.setter
    def ws_factory(self, factory: Any) -> None:
        """The same for websockets."""
        factory.setProtocolOptions(failByDrop=False)
        self._ws_factory = factory

    def listen_success(self, port: Any) -> None:
        self._ports.append(port)
        super().listen_success(port)

    def kill_all_applications(self) -> Deferred[None]:
        """Twisted stops when this is done."""
        return Deferred.fromFuture(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        for port in self._ports:
            port.stopListening()
        await self._answered(STOPPING.drain_s)
        STOPPING.break_off()
        await self._answered(LAST_WORDS_S)
        await asyncio.sleep(_LOOK_S)  # Twisted writes between the turns
        for application in (left := self._open(object)):
            application.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS_S)

    async def _answered(self, within_s: float) -> None:
        """Until all that is open is answered. Websockets have no end of their own, and come again elsewhere."""
        if answering := self._open(WebRequest):
            await asyncio.wait(answering, timeout=within_s)

    def _open(self, kind: type) -> list[asyncio.Future[None]]:
        return [
            details["application_instance"]
            for protocol, details in self.connections.items()
            if isinstance(protocol, kind) and "application_instance" in details
        ]

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


def _with_accept_queue(endpoint: str) -> str:
    """Twisted's description of where to listen. An inherited socket (`fd:`) has its queue from who made it."""
    if endpoint.startswith(("tcp:", "ssl:", "unix:")) and "backlog=" not in endpoint:
        return f"{endpoint}:backlog={ACCEPT_QUEUE}"
    return endpoint


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
