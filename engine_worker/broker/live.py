"""The live channel: one pub/sub connection per gateway process, over which all its tokens come; and one per worker,
over which it is handed what it need not claim.

Pub/sub forgets: what is published while the connection is down, or faster than it is read, is lost
to it. That is allowed, because the token log has everything; a `Gap` tells the reader to look there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast

import msgspec
from redis.asyncio import Connection
from redis.exceptions import RedisError

from engine_worker.broker.connection import close_pool, lone_connections
from engine_worker.broker.errors import BrokerUnavailable
from engine_worker.broker.line import Line
from engine_worker.protocol import PROTOCOL_VERSION, Chunk
from engine_worker.waiting import Backoff

_CHUNKS = msgspec.msgpack.Decoder(list[Chunk])
_PING_INTERVAL_S: Final = 5.0


class Gap:
    """Messages may have been missed: read the token log of every open stream from its next sequence number."""

    def __repr__(self) -> str:
        return "GAP"


GAP: Final = Gap()

_Told = TypeVar("_Told")


class Channel(Generic[_Told]):
    """`async with channel: async for told in channel: ...`

    Entering waits until the server has confirmed the subscription, so what is published afterwards is heard.
    Iteration yields what `decode` makes of each message, or `GAP`. The buffer holds `max_messages`; when a slow
    reader lets it fill up, it is emptied into one GAP. A task named `live-channel` owned by this object watches
    the connection, and reconnects with backoff.
    """

    def __init__(
        self,
        url: str,
        channel: str,
        decode: Callable[[bytes], _Told | Gap],
        *,
        timeout_s: float,
        max_messages: int = 4096,
        ping_interval_s: float = _PING_INTERVAL_S,
    ) -> None:
        self.channel = channel
        self._decode = decode
        self._timeout_s = timeout_s
        self._max_messages = max_messages
        self._ping_interval_s = ping_interval_s
        self._pool = lone_connections(url, timeout_s=timeout_s)
        self._buffer: deque[_Told | Gap] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._subscription = await self._subscribe()
        except (RedisError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't subscribe to the live channel: {error}") from error
        self._task = asyncio.create_task(self._read_for_ever(), name="live-channel")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.gather(self._task, return_exceptions=True)
        finally:
            # Here and not in the task: one that is cancelled before its first step never gets to clean up.
            await self._subscription.aclose()
            await close_pool(self._pool)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Told | Gap:
        assert self._task is not None, "enter the live channel before reading it"
        while not self._buffer:
            self._arrived.clear()
            await self._arrived.wait()
            if not self._buffer and self._task.done():
                raise StopAsyncIteration
        return self._buffer.popleft()

    async def caught_up(self) -> None:
        """Until its reader has taken all that was published before; or the connection is lost, and with it the rest."""
        with contextlib.suppress(RedisError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._subscription.ping()
        while self._buffer:  # noqa: ASYNC110 - its reader needs a turn or two
            await asyncio.sleep(0)

    def _heard(self, message: bytes) -> None:
        self._put(self._decode(message))

    def _put(self, item: _Told | Gap) -> None:
        if len(self._buffer) >= self._max_messages:
            self._buffer.clear()
            item = GAP
        if not (item is GAP and self._buffer and self._buffer[-1] is GAP):
            self._buffer.append(item)
        self._arrived.set()

    async def _subscribe(self) -> _Subscription:
        connection: Connection = self._pool.make_connection()
        try:
            await cast(Any, connection).connect()
            subscription = _Subscription(connection, self._heard)
            subscription.send(("SUBSCRIBE", self.channel))
            await subscription.confirmed
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return subscription

    async def _read_for_ever(self) -> None:
        try:
            while True:
                await self._watch(self._subscription)
                await self._subscription.aclose()
                self._subscription = await self._reconnect()
                self._put(GAP)
        finally:
            self._arrived.set()

    async def _reconnect(self) -> _Subscription:
        backoff = Backoff()
        while True:
            await backoff.sleep()
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    return await self._subscribe()

    async def _watch(self, subscription: _Subscription) -> None:
        """Until the connection fails. Silence is probed: a peer that vanished without a word says nothing."""
        loop = asyncio.get_running_loop()
        pinged_at = float("-inf")
        while True:
            await asyncio.wait([subscription.over], timeout=self._ping_interval_s)
            if subscription.is_broken:
                return
            if loop.time() - subscription.heard_at < self._ping_interval_s:
                continue
            if subscription.heard_at < pinged_at:
                return
            pinged_at = loop.time()
            subscription.ping()


class _Subscription(Line):
    """Tells what is published the moment it is read."""

    def __init__(self, connection: Connection, tell: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._tell = tell
        self.confirmed: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self._pinged: deque[asyncio.Future[None]] = deque()
        super().__init__(connection)

    def ping(self) -> asyncio.Future[None]:
        """Done when it is answered, and so all that came before is told."""
        answered: asyncio.Future[None] = self._loop.create_future()
        if self.is_broken:
            _done(answered)
            return answered
        self._pinged.append(answered)
        self.send(("PING",))
        return answered

    def heard(self, reply: Any) -> None:
        if isinstance(reply, RedisError):  # it may not subscribe
            self.give_up(reply)
        elif reply[0] == b"message":
            self._tell(reply[2])
        elif reply[0] == b"pong":
            _done(self._pinged.popleft())
        elif reply[0] == b"subscribe":
            _done(self.confirmed)

    def ended(self, error: RedisError) -> None:
        self.over.set_result(None)
        for waiting in (self.confirmed, *self._pinged):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # seen: who waits for it hears it, and may have left
        self._pinged.clear()


def _done(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class LiveChannel(Channel[list[Chunk]]):
    """Yields a `list[Chunk]` per worker step."""

    def __init__(self, url: str, channel: str, **given: Any) -> None:
        super().__init__(url, channel, _chunks, **given)


def _chunks(message: bytes) -> list[Chunk] | Gap:
    """What can't be understood is a gap: the one request it is about meets it again, by name, in its log."""
    try:
        chunks = _CHUNKS.decode(message)
    except msgspec.MsgspecError:
        return GAP
    return chunks if all(chunk.v == PROTOCOL_VERSION for chunk in chunks) else GAP
