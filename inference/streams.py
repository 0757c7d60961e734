"""Redis to an async iterator of chunks: one live channel per process, demultiplexed to its streams.

Pub/sub may lose messages, the token log may not: a stream drops what it has seen, and whatever it
missed (a gap in the numbers, a reconnect, its own buffer overflowing because its reader is slow, long
silence) it reads from the log. So a slow reader costs a bounded buffer, and never another stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context
from types import TracebackType
from typing import Final, Self

import structlog

from engine_worker.broker import BrokerUnavailable, Gap, GatewayBroker, UnknownRequest, live_channel
from engine_worker.protocol import Chunk, ProtocolError

log = structlog.get_logger(__name__)

_BUFFER_CHUNKS: Final = 512
_TOLD_AT_ONCE: Final = 64
"""Chunks in one turn of the event loop: some milliseconds' work of their streams. A step of a large batch, or what
came while the loop was busy, would be hundreds."""
_FIRST_COUNTS: Final = 8
"""With its first chunk a stream's answer begins: status, headers, what is made once."""
_LAST_COUNTS: Final = 4
"""After its last one it is settled."""
_SILENCE_S: Final = 5.0
"""After so long without a chunk the log is asked: whatever went wrong, a stream never hangs on it."""
_RETRY_S: Final = 0.5
_LOST_AFTER_S: Final = 30.0
"""So long may Redis be away in the middle of a stream."""


class StreamLost(Exception):
    """The rest of this generation can't be read; it may go on at the worker."""


class LiveStreams:
    """One per event loop. Opens its live channel with the first stream; a task named `live-fan-in` reads it."""

    def __init__(self, broker: GatewayBroker, gateway_id: str) -> None:
        self._broker = broker
        self.channel = live_channel(gateway_id)
        self._streams: dict[str, set[TokenStream]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    async def open(
        self, model: str, request_id: str, *, from_seq: int = 0, is_new: bool = False
    ) -> TokenStream:
        """Hears the request's chunks from now on. Enter the stream before the request is queued.

        `from_seq` is the first token wanted; what lies between it and now is read from the log, unless
        the request `is_new` and has no log yet. Raises BrokerUnavailable.
        """
        await self._listening()
        stream = TokenStream(self, self._broker, model, request_id, from_seq, has_gap=not is_new)
        self._streams.setdefault(request_id, set()).add(stream)
        return stream

    def forget(self, stream: TokenStream) -> None:
        if streams := self._streams.get(stream.request_id):
            streams.discard(stream)
            if not streams:
                del self._streams[stream.request_id]

    def interrupt(self) -> None:
        """Whoever waits for a chunk is told that there is none."""
        for streams in self._streams.values():
            for stream in streams:
                stream.interrupt()

    async def _listening(self) -> None:
        if self._pump is None or self._pump.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._pump = asyncio.create_task(
                self._run(self._ready), name="live-fan-in", context=Context()
            )  # for everybody: not in the context of the request that comes first
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._broker.live(self.channel) as live:
                ready.set_result(None)
                told = 0
                while True:
                    try:
                        batch = await anext(live)
                    except ProtocolError as error:
                        log.error("live_channel_unreadable", error=str(error))
                        continue
                    if isinstance(batch, Gap):
                        for streams in self._streams.values():
                            for stream in streams:
                                stream.miss()
                        continue
                    for chunk in batch:
                        for stream in self._streams.get(chunk.request_id, ()):
                            stream.put(chunk)
                        told += _work_of(chunk)
                        if told >= _TOLD_AT_ONCE:
                            told = 0
                            await asyncio.sleep(0)  # those send what they have, before the others
        except BrokerUnavailable as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # whoever awaits it sees it; nobody may
        except StopAsyncIteration:
            log.error("live_channel_ended")
        finally:
            if not ready.done():
                ready.cancel()


class TokenStream:
    """One generation's chunks in order, without gaps or repeats, ending after the one that has `finish`."""

    def __init__(
        self,
        owner: LiveStreams,
        broker: GatewayBroker,
        model: str,
        request_id: str,
        from_seq: int,
        *,
        has_gap: bool,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.next_seq = from_seq
        """The first token that has not been handed out."""
        self.is_finished = False
        self._owner = owner
        self._broker = broker
        self._buffer: deque[Chunk] = deque()
        self._has_gap = has_gap
        self._waiter: asyncio.Future[None] | None = None
        self._is_interrupted = False
        self._heard_at = asyncio.get_running_loop().time()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._owner.forget(self)
        self._buffer.clear()

    def put(self, chunk: Chunk) -> None:
        if len(self._buffer) >= _BUFFER_CHUNKS:
            self.miss()
            return
        self._buffer.append(chunk)
        self._wake()

    def miss(self) -> None:
        """Something may have been lost: forget the buffer, the log has it all."""
        self._buffer.clear()
        self._has_gap = True
        self._wake()

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._wake()

    async def next(self, timeout_s: float) -> Chunk | None:
        """The next chunk, or None when there was none within `timeout_s`, or until it was interrupted.

        Raises StreamLost; after the last chunk, StopAsyncIteration.
        """
        if self.is_finished:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if loop.time() - self._heard_at > _SILENCE_S:
                self._has_gap = True
            if self._has_gap:
                await self._fill()
            if chunk := self._take():
                self._heard_at = loop.time()
                return chunk
            left = deadline - loop.time()
            if left <= 0 or self._is_interrupted:
                self._is_interrupted = False
                return None
            if self._has_gap:
                await asyncio.sleep(min(left, _RETRY_S))
                continue
            await self._news(loop, min(left, _SILENCE_S))

    async def _news(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        # A timer costs less than half of asyncio.timeout around an Event, and this is once a token.
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _end, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None:
            _end(self._waiter)

    def take_ready(self) -> Chunk | None:
        """The next chunk if it is here already."""
        return None if self._has_gap or self.is_finished else self._take()

    def _take(self) -> Chunk | None:
        while self._buffer:
            chunk = self._buffer[0]
            if chunk.seq > self.next_seq:
                self._has_gap = True
                return None
            self._buffer.popleft()
            end = chunk.seq + len(chunk.token_ids)
            if chunk.finish is None and end <= self.next_seq:
                continue  # seen
            self.next_seq = max(end, self.next_seq)
            self.is_finished = chunk.finish is not None
            return chunk
        return None

    async def _fill(self) -> None:
        """Puts everything from `next_seq` on at the front of the buffer; the gap stays while Redis is away."""
        loop = asyncio.get_running_loop()
        try:
            chunks = await self._broker.read_log(self.model, self.request_id, from_seq=self.next_seq)
        except UnknownRequest as error:
            raise StreamLost(
                "the generation is gone: its retention is over, or the queue was lost"
            ) from error
        except BrokerUnavailable as error:
            if loop.time() - self._heard_at > _LOST_AFTER_S:
                raise StreamLost("the token log can't be reached") from error
            return
        self._has_gap = False
        self._heard_at = loop.time()
        # What came live meanwhile stands after it: it follows, or is a repeat and dropped by its number.
        self._buffer.extendleft(reversed(chunks))
        if self._buffer and self._buffer[0].seq > self.next_seq:
            raise StreamLost(f"the token log has a hole at token {self.next_seq}")


def _work_of(chunk: Chunk) -> int:
    if chunk.queued_ms is not None:
        return _FIRST_COUNTS
    return 1 if chunk.finish is None else _LAST_COUNTS


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
