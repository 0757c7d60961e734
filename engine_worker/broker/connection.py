"""Connections to Redis (or Valkey): one client per event loop, every command bounded in time.

    redis://HOST:PORT/DB, rediss://..., unix:///PATH    one server
    redis+cluster://HOST:PORT                           Redis Cluster; any of its nodes

A cancelled or timed-out command closes its connection (redis-py does so since 4.5.5, and a test
here holds it to that): the late reply can't reach the next caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, cast

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from engine_worker.broker.errors import BrokerUnavailable
from engine_worker.broker.shared import SharedConnection

_CLUSTER: Final = "redis+cluster://"

Caller: TypeAlias = Redis | SharedConnection
"""Calls scripts by `evalsha` and `eval`."""


def connect(url: str, *, timeout_s: float, max_connections: int = 64) -> Redis:
    """A client with a bounded pool; waiting for a connection counts towards the timeout.

    A connection that turns out to be dead (the server restarted) is replaced once, silently; the
    broker's scripts can all be repeated. A timeout is never retried: the caller has waited enough.
    On a cluster the client follows moved slots; every script's keys share one (keys.py).
    """
    if is_cluster(url):
        cluster = RedisCluster.from_url(
            one_node(url),
            max_connections=max_connections,
            socket_timeout=None,  # see below
            socket_connect_timeout=timeout_s,
            protocol=2,
        )
        return cast(Redis, cluster)  # the commands used here are the same
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=timeout_s,
        # None, because redis-py would bound a write with asyncio.wait_for, which can swallow a
        # cancellation before Python 3.12 (python/cpython#86296). `bounded` bounds the whole call.
        socket_timeout=None,
        socket_connect_timeout=timeout_s,
        protocol=2,
        retry=Retry(ConstantBackoff(0.02), 1, supported_errors=(RedisConnectionError,)),
        retry_on_error=[RedisConnectionError],
    )
    return Redis.from_pool(pool)


def connect_for_scripts(url: str, client: Redis, *, timeout_s: float) -> Caller:
    """Who calls the scripts of one event loop: a connection that they share, on a cluster `client` itself."""
    return client if is_cluster(url) else SharedConnection(url, timeout_s=timeout_s)


def is_cluster(url: str) -> bool:
    return url.startswith(_CLUSTER)


def one_node(url: str) -> str:
    """A plain URL: the cluster's named node, or the one server there is."""
    return url.replace(_CLUSTER, "redis://", 1) if is_cluster(url) else url


async def disconnect(client: Caller) -> None:
    await client.aclose()
    if not isinstance(client, RedisCluster | SharedConnection):
        await client.connection_pool.disconnect()


@asynccontextmanager
async def bounded(timeout_s: float) -> AsyncIterator[None]:
    """Whatever goes wrong inside with Redis becomes BrokerUnavailable, after `timeout_s` at the latest."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise BrokerUnavailable(f"Redis did not answer within {timeout_s:g} s") from error
    except RedisError as error:
        raise BrokerUnavailable(f"{type(error).__name__}: {error}") from error
