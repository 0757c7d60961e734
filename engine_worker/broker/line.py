"""A connection to Redis without streams between: what is sent in one turn of the loop is two writes at most, the first
one at once, and each reply is told in the moment in which it is read.

redis-py makes the connection (TLS, unix sockets, passwords, Sentinel's master). Its asyncio streams then would wake a
task for each write and for each read; here the protocol speaks to who waits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Final

from hiredis import Reader, pack_command
from redis.asyncio.connection import Connection, DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError

_PACK: Final[Any] = pack_command
_NOTHING: Final = object()


class Line(asyncio.Protocol, ABC):
    """Takes over a connection that is made, and on which nothing is under way.

    Subclasses say what a reply means (`heard`), and what is to be done at the end (`ended`, once).
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._has_written = False
        """In this turn of the loop: what is sent in it now waits for its end."""
        self._reader = Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_NOTHING
        )
        self.is_broken = False
        self.heard_at = self._loop.time()
        # redis-py shows it nowhere else. Its own reader gets nothing from here on.
        writer: Any = connection._writer
        self._transport: asyncio.Transport = writer.transport
        self._transport.set_protocol(self)
        if self._transport.is_closing():  # and its end was told to the reader
            self.give_up(RedisConnectionError("the connection was closed at once"))

    @abstractmethod
    def heard(self, reply: Any) -> None:
        """An error reply is an exception, here and inside of lists."""

    @abstractmethod
    def ended(self, error: RedisError) -> None:
        """Once: nothing more comes."""

    def send(self, command: tuple[str | bytes | float, ...]) -> None:
        packed: bytes = _PACK(command)
        if self._has_written:
            self._outgoing.append(packed)
            return
        self._has_written = True
        self._loop.call_soon(self._turn_over)
        self._transport.write(packed)

    def give_up(self, error: RedisError) -> None:
        """Nothing more comes of it."""
        if not self.is_broken:
            self.is_broken = True
            self._transport.abort()
            self.ended(error)

    async def aclose(self) -> None:
        self.give_up(RedisConnectionError("closed"))
        await self._connection.disconnect(nowait=True)

    def _turn_over(self) -> None:
        self._has_written = False
        if self._outgoing and not self.is_broken:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()

    def data_received(self, data: bytes) -> None:
        if self.is_broken:
            return
        self.heard_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                if isinstance(reply, RedisConnectionError):  # it is loading, or has lost its master
                    raise reply
                self.heard(reply)
        except RedisError as error:
            self.give_up(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.give_up(RedisConnectionError(f"the connection was lost: {error or 'closed by the server'}"))
