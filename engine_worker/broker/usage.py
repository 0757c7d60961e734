"""The ledger's side of the broker: usage events, each until it is acknowledged. Synchronous, for Celery."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import structlog
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.retry import Retry

from engine_worker.broker import keys, scripts
from engine_worker.broker.connection import connect_sync, disconnect_sync
from engine_worker.protocol import ProtocolError, UsageEvent, decode

_log = structlog.get_logger(__name__)

GROUP: Final = "ledger"
_ASK_AGAIN_S: Final = 0.05
_PAGE: Final = 1000
_SWEPT_AT_ONCE: Final = 100
_SWEEPS_MAX: Final = 20
_ABANDONED_AFTER_MS: Final = 60_000
"""An entry that a consumer took, and neither acknowledged nor gave back for so long, goes to another."""


@dataclass(frozen=True, slots=True)
class EntryRef:
    stream: str
    entry_id: str


class UsageReader:
    """A consumer group over every model's usage stream: at least once; the ledger's unique request id makes it once.

    Raises redis.exceptions.RedisError when Redis is away; events wait in the stream.
    """

    def __init__(self, url: str, *, abandoned_after_ms: int = _ABANDONED_AFTER_MS) -> None:
        self._abandoned_after_ms = abandoned_after_ms
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), 2, supported_errors=(RedisConnectionError,))
        self._redis = connect_sync(url, connect_timeout_s=2.0, timeout_s=10.0, retry=retry)

    def close(self) -> None:
        disconnect_sync(self._redis)

    def sweep(self) -> None:
        """Ends what outlived its deadline, whatever its model: see `GatewayBroker.expire`.

        A worker sweeps its model and a gateway those that it queued to. Where both are gone, or gateways have been
        started again since, this is all that remembers who waits.
        """
        for model in self._models():
            for _ in range(_SWEEPS_MAX):
                done = scripts.load("expire").call_sync(
                    self._redis, keys.model_prefix(model), (_SWEPT_AT_ONCE,)
                )
                if max(done) < _SWEPT_AT_ONCE:
                    break

    def read(self, *, consumer: str, count: int, block_ms: int) -> list[tuple[EntryRef, UsageEvent]]:
        """Up to `count` events; first those this or a dead consumer took and never acknowledged.

        Waits at most `block_ms` (0: not at all) for a new one when there is none. An entry that
        can't be decoded is logged and left pending, since it is money and needs a newer reader; the
        others do not wait for it.
        """
        streams = self._streams()
        found: list[tuple[EntryRef, UsageEvent]] = []
        for stream in streams:
            if len(found) < count:
                found += self._take_over(stream, consumer, count - len(found))
        if streams and len(found) < count:
            found += self._read_new(streams, consumer, count - len(found), 0 if found else block_ms)
        return found

    def ack(self, refs: Sequence[EntryRef]) -> None:
        """Call after the ledger's commit: the entries are gone for good."""
        for stream, ids in _by_stream(refs).items():
            with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(stream, GROUP, *ids)
                pipe.xdel(stream, *ids)
                pipe.execute()

    def give_back(self, refs: Sequence[EntryRef], *, consumer: str) -> None:
        """What it took and can't record at the moment: the next `read`, whoever's, takes it at once."""
        for stream, ids in _by_stream(refs).items():
            self._redis.xclaim(stream, GROUP, consumer, 0, [*ids], idle=self._abandoned_after_ms, justid=True)

    def pending(self) -> int:
        """Events that the ledger has not acknowledged."""
        sizes: list[Any] = [self._redis.xlen(keys.model_prefix(model) + "usage") for model in self._models()]
        return sum(sizes)

    def waiting(self) -> list[UsageEvent]:
        """All events that the ledger has not acknowledged, taken from nobody. For a backup."""
        found: list[UsageEvent] = []
        for model in self._models():
            stream, after = keys.model_prefix(model) + "usage", "-"
            while reply := cast(list[Any], self._redis.xrange(stream, min=after, count=_PAGE)):
                found += [event for _, event in _entries(stream, reply)]
                after = f"({reply[-1][0].decode()}"
        return found

    def _models(self) -> list[str]:
        return sorted(model.decode() for model in cast(set[bytes], self._redis.smembers(keys.MODELS)))

    def _streams(self) -> list[str]:
        streams = [keys.model_prefix(model) + "usage" for model in self._models()]
        for stream in streams:
            try:
                # From 0, not from now: events that came before the first reader count as well.
                self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        return streams

    def _take_over(self, stream: str, consumer: str, count: int) -> list[tuple[EntryRef, UsageEvent]]:
        reply: Any = self._redis.xautoclaim(
            stream, GROUP, consumer, min_idle_time=self._abandoned_after_ms, start_id="0-0", count=count
        )
        return _entries(stream, reply[1])

    def _read_new(
        self, streams: Sequence[str], consumer: str, count: int, block_ms: int
    ) -> list[tuple[EntryRef, UsageEvent]]:
        """One command per stream: the streams of several models lie on several nodes of a cluster.

        Only where there is a single stream can the server do the waiting; else it is asked again and again.
        """
        found: list[tuple[EntryRef, UsageEvent]] = []
        deadline = time.monotonic() + block_ms / 1000
        while True:
            for stream in streams:
                if len(found) < count:
                    block = block_ms if len(streams) == 1 and block_ms else None
                    reply: Any = self._redis.xreadgroup(
                        GROUP, consumer, {stream: ">"}, count=count - len(found), block=block
                    )
                    found += [entry for _, entries in reply or [] for entry in _entries(stream, entries)]
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(_ASK_AGAIN_S)


def _by_stream(refs: Sequence[EntryRef]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for ref in refs:
        ids.setdefault(ref.stream, []).append(ref.entry_id)
    return ids


def _entries(
    stream: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]
) -> list[tuple[EntryRef, UsageEvent]]:
    found = []
    for entry_id, fields in entries:
        if not fields:
            continue  # deleted meanwhile
        ref = EntryRef(stream=stream, entry_id=entry_id.decode())
        try:
            found.append((ref, decode(fields[b"e"], UsageEvent)))
        except (ProtocolError, KeyError) as error:
            _log.error("usage_event_unreadable", stream=stream, entry_id=ref.entry_id, error=str(error))
    return found
