"""The operator's side of the broker: what waits and runs, and what to do with the dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine_worker.broker import keys, scripts
from engine_worker.broker.connection import bounded, connect, disconnect
from engine_worker.broker.errors import UnknownRequest
from engine_worker.protocol import Chunk, WorkerStatus, decode


@dataclass(frozen=True, slots=True)
class TenantLine:
    tenant_id: str
    """The tenant's public id."""
    waiting: int
    oldest_ms: int
    """How long its first in line has waited."""
    counter: float
    """Virtual token counter, thousandths of a weighted token: the least goes next."""


@dataclass(frozen=True, slots=True)
class TierQueue:
    rank: int
    waiting: int
    oldest_ms: int
    tenants: tuple[TenantLine, ...]
    """In the order of their turns."""


@dataclass(frozen=True, slots=True)
class ModelQueue:
    """One model's requests at one moment. Tiers without a backlog are left out."""

    model: str
    running: int
    delayed: int
    """In back-off after a failed attempt."""
    dead: int
    tiers: tuple[TierQueue, ...]

    @property
    def is_idle(self) -> bool:
        """The dead aside."""
        return not (self.running or self.delayed or self.tiers)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    model: str
    request_id: str
    tenant_id: str
    died_at_ms: int
    attempts: int
    tokens: int
    """Delivered before it died."""
    error_code: str
    error_message: str


class OperatorBroker:
    """One per event loop. Raises BrokerUnavailable after `timeout_s` at the latest."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._redis = connect(url, timeout_s=timeout_s, max_connections=4)

    async def aclose(self) -> None:
        await disconnect(self._redis)

    async def models(self) -> list[str]:
        """Models that ever had a worker, by name."""
        async with bounded(self._timeout_s):
            members: Any = await cast(Any, self._redis.smembers(keys.MODELS))
        return sorted(member.decode() for member in members)

    async def queue(self, model: str, *, max_tenants: int = 100) -> ModelQueue:
        """At most `max_tenants` of each tier are listed, those whose turn comes first."""
        running, delayed, dead, tiers = await self._call("overview", model, (max_tenants,))
        return ModelQueue(
            model=model,
            running=running,
            delayed=delayed,
            dead=dead,
            tiers=tuple(
                TierQueue(
                    rank=rank,
                    waiting=waiting,
                    oldest_ms=oldest_ms,
                    tenants=tuple(
                        TenantLine(tenant.decode(), count, age_ms, float(counter))
                        for tenant, count, age_ms, counter in tenants
                    ),
                )
                for rank, waiting, oldest_ms, tenants in tiers
            ),
        )

    async def worker_clocks(self, model: str) -> dict[str, float]:
        """By how many seconds each living worker's clock was ahead of the server's at its last heartbeat."""
        prefix = keys.model_prefix(model)
        async with bounded(self._timeout_s):
            beats: Any = await self._redis.zrange(prefix + "workers", 0, -1, withscores=True)
            if not beats:
                return {}
            found: Any = await self._redis.mget([f"{prefix}worker:{worker.decode()}" for worker, _ in beats])
        return {
            worker.decode(): (decode(status, WorkerStatus).updated_at_ms - beat_ms) / 1000
            for (worker, beat_ms), status in zip(beats, found, strict=True)
            if status
        }

    async def dead_letters(self, model: str, *, limit: int = 100) -> list[DeadLetter]:
        """The latest first."""
        prefix = keys.model_prefix(model)
        letters = []
        async with bounded(self._timeout_s):
            dead: Any = await self._redis.zrange(prefix + "dead", 0, limit - 1, desc=True, withscores=True)
            async with self._redis.pipeline(transaction=False) as pipe:
                for request_id, _ in dead:
                    pipe.hmget(prefix + "req:" + request_id.decode(), "tenant", "attempts", "tokens")
                    pipe.lindex(prefix + "log:" + request_id.decode(), -1)
                replies = await pipe.execute()
        for (request_id, died_at_ms), fields, last in zip(dead, replies[::2], replies[1::2], strict=True):
            if last is None:
                continue  # its time ran out just now
            finish = decode(last, Chunk).finish
            error = finish.error if finish else None
            letters.append(
                DeadLetter(
                    model=model,
                    request_id=request_id.decode(),
                    tenant_id=fields[0].decode(),
                    died_at_ms=int(died_at_ms),
                    attempts=int(fields[1]),
                    tokens=int(fields[2]),
                    error_code=error.code if error else "",
                    error_message=error.message if error else "",
                )
            )
        return letters

    async def requeue(self, model: str, request_id: str) -> bool:
        """Gives a dead request another life, with its log, from where its answer broke off; False when it isn't dead.

        It gets as many attempts and as much time as at first. What it makes from now on is a usage event
        of its own, `ID~2` and so on, without the prompt. Raises: UnknownRequest.
        """
        return await self._on_dead("requeue", model, request_id)

    async def drop(self, model: str, request_id: str) -> bool:
        """Forgets a dead request's prompt now and the rest after the retention. Raises: UnknownRequest."""
        return await self._on_dead("drop", model, request_id)

    async def _on_dead(self, verb: str, model: str, request_id: str) -> bool:
        reply = await self._call(verb, model, (request_id,))
        if reply == b"unknown":
            raise UnknownRequest(request_id)
        return bool(reply != b"alive")

    async def _call(self, verb: str, model: str, args: Sequence[str | bytes | int]) -> Any:
        async with bounded(self._timeout_s):
            return await scripts.load(verb)(self._redis, keys.model_prefix(model), args)
