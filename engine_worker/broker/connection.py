"""Connections to Redis (or Valkey): one client per event loop, every command bounded in time.

What URLs there are: address.py. A cancelled or timed-out command closes its connection (redis-py does
so since 4.5.5, and a test here holds it to that): the late reply can't reach the next caller.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, TypeAlias, cast

import redis
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry as SyncRetry
from redis.sentinel import Sentinel as SyncSentinel

from engine_worker.broker.address import RedisAddress, parse
from engine_worker.broker.errors import BrokerUnavailable
from engine_worker.broker.shared import SharedConnection


class _MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Waits for a connection as BlockingConnectionPool does; each is to whoever is master when it is made."""


Caller: TypeAlias = Redis | SharedConnection
"""Calls scripts by `evalsha` and `eval`."""


def connect(url: str, *, timeout_s: float, max_connections: int = 64) -> Redis:
    """A client with a bounded pool; waiting for a connection counts towards the timeout.

    A connection that turns out to be dead (the server restarted, or is no longer the master) is replaced
    once, silently; the broker's scripts can all be repeated. A timeout is never retried: the caller has
    waited enough. On a cluster the client follows moved slots; every script's keys share one (keys.py).
    """
    address = parse(url)
    common: dict[str, Any] = {
        "max_connections": max_connections,
        # None, because redis-py would bound a write with asyncio.wait_for, which can swallow a
        # cancellation before Python 3.12 (python/cpython#86296). `bounded` bounds the whole call.
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
    }
    if address.kind == "cluster":
        cluster = RedisCluster.from_url(address.node_url, **common)
        return cast(Redis, cluster)  # the commands used here are the same
    common |= {
        "timeout": timeout_s,
        "retry": Retry(ConstantBackoff(0.02), 1, supported_errors=(RedisConnectionError,)),
    }
    if address.kind == "sentinel":
        # redis-py's Sentinel has no annotations.
        of_masters: Any = _MasterPool
        pool: ConnectionPool = of_masters(
            address.service, _sentinels(address, timeout_s), **_login(address), **common
        )
    else:
        pool = BlockingConnectionPool.from_url(
            address.node_url, retry_on_error=[RedisConnectionError], **common
        )
    return Redis.from_pool(pool)


def connect_for_scripts(url: str, client: Redis, *, timeout_s: float) -> Caller:
    """Who calls the scripts of one event loop: a connection that they share, where there is one server; else
    `client` itself, which knows the cluster's nodes, or Sentinel's master."""
    return SharedConnection(url, timeout_s=timeout_s) if parse(url).kind == "single" else client


def lone_connections(url: str, *, timeout_s: float) -> Any:
    """A pool that serves only as the factory of single connections, for who subscribes: to the master, or on a
    cluster to one node (what any of them publishes all of them send)."""
    address = parse(url)
    common: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if address.kind == "sentinel":
        of_masters: Any = SentinelConnectionPool
        return of_masters(address.service, _sentinels(address, timeout_s), **_login(address), **common)
    return ConnectionPool.from_url(address.node_url, **common)


def connect_sync(url: str, *, connect_timeout_s: float, timeout_s: float, retry: SyncRetry) -> redis.Redis:
    """For processes without an event loop. Close it with `disconnect_sync`."""
    address = parse(url)
    common: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": connect_timeout_s,
        "socket_timeout": timeout_s,
        "retry": retry,
    }
    if address.kind == "sentinel":
        of_sentinels = {
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": connect_timeout_s,
            "password": address.sentinel_password,
        }
        watchers: Any = SyncSentinel
        manager = watchers(list(address.sentinels), sentinel_kwargs=of_sentinels)
        master: redis.Redis = manager.master_for(address.service, **_login(address), **common)
        return master
    kind: Any = redis.RedisCluster if address.kind == "cluster" else redis.Redis
    client: redis.Redis = kind.from_url(address.node_url, **common)
    return client


async def disconnect(client: Caller) -> None:
    await client.aclose()
    if not isinstance(client, RedisCluster | SharedConnection):
        await close_pool(client.connection_pool)


async def close_pool(pool: ConnectionPool) -> None:
    await pool.disconnect()
    if isinstance(pool, SentinelConnectionPool):
        await pool.sentinel_manager.aclose()


def disconnect_sync(client: redis.Redis) -> None:
    client.close()
    if not isinstance(client, redis.RedisCluster):
        pool = client.connection_pool
        pool.disconnect()
        for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
            sentinel.close()


def is_cluster(client: Redis) -> bool:
    return isinstance(client, RedisCluster)


def _login(address: RedisAddress) -> dict[str, Any]:
    return {"db": address.db, "username": address.username, "password": address.password}


def _sentinels(address: RedisAddress, timeout_s: float) -> Sentinel:
    # A sentinel that does not answer must leave time to ask the next.
    each_s = timeout_s / (1 + len(address.sentinels))
    options = {
        "socket_timeout": each_s,
        "socket_connect_timeout": each_s,
        "retry": Retry(NoBackoff(), 0),
        "password": address.sentinel_password,
    }
    watchers: Any = Sentinel
    found: Sentinel = watchers(list(address.sentinels), sentinel_kwargs=options)
    return found


class Bounded:
    """Whatever goes wrong inside with Redis becomes `unavailable`, after `timeout_s` at the latest."""

    # Not a generator with a decorator: that costs each request as much again as the time-out itself.
    def __init__(
        self, timeout_s: float, unavailable: type[Exception], *, caller: Caller | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._unavailable = unavailable
        # One that is shared keeps the time of its calls.
        self._timeout = None if isinstance(caller, SharedConnection) else asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        if self._timeout is not None:
            await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, traceback)
            except TimeoutError as late:
                error = late
        if error is None:
            return
        if isinstance(error, TimeoutError):
            raise self._unavailable(f"Redis did not answer within {self._timeout_s:g} s") from error
        if isinstance(error, RedisError):
            raise self._unavailable(f"{type(error).__name__}: {error}") from error


def bounded(timeout_s: float, *, caller: Caller | None = None) -> Bounded:
    """`caller`: who makes the only call inside."""
    return Bounded(timeout_s, BrokerUnavailable, caller=caller)
