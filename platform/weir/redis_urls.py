"""REDIS_URL as Celery, the channel layer and the cache want it: none of them can use a cluster."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from redis import ConnectionPool
from redis.sentinel import Sentinel

from engine_worker.broker.address import FORMS, RedisAddress, parse
from weir.environment import BadEnvironment


def check_redis_url(name: str, url: str) -> RedisAddress:
    """`name` is the variable that held `url`. Raises BadEnvironment without the URL: there may be a password."""
    try:
        return parse(url)
    except ValueError as error:
        raise BadEnvironment(f"{name} should be {FORMS}") from error


def channels_host(name: str, url: str) -> dict[str, Any]:
    """An entry of channels_redis's `hosts`."""
    address = _one_server(name, url, "The channel layer")
    # The layer waits 5 s at a time for a message; redis-py's own timeout of 5 s would win that race and take
    # every idle websocket with it.
    timeouts = {"socket_timeout": 15, "socket_connect_timeout": 5}
    if address.kind == "single":
        return {"address": address.node_url, **timeouts}
    return {
        "sentinels": list(address.sentinels),
        "master_name": address.service,
        "sentinel_kwargs": _sentinel_kwargs(address),
        "db": address.db,
        "username": address.username,
        "password": address.password,
        **timeouts,
    }


class CachePool:
    """Makes the connection pools of Django's cache, which knows single servers alone."""

    @staticmethod
    def from_url(url: str, **options: Any) -> ConnectionPool:
        address = parse(url)
        if address.kind == "single":
            return ConnectionPool.from_url(address.node_url, **options)
        watchers: Any = Sentinel  # without annotations
        master = watchers(list(address.sentinels), sentinel_kwargs=_sentinel_kwargs(address)).master_for(
            address.service, db=address.db, username=address.username, password=address.password, **options
        )
        pool: ConnectionPool = master.connection_pool
        return pool


def celery_broker(name: str, url: str) -> tuple[str, dict[str, Any]]:
    """kombu's URL, and transport options that belong to it."""
    address = _one_server(name, url, "Celery")
    if address.kind == "single":
        # kombu calls a unix socket redis+socket; its path must stay percent-encoded as it is.
        return address.node_url.replace("unix://", "redis+socket://", 1), {}
    login = ""
    if address.password is not None:
        login = f"{quote(address.username or '', safe='')}:{quote(address.password, safe='')}@"
    urls = [f"sentinel://{login}{host}:{port}/{address.db}" for host, port in address.sentinels]
    return ";".join(urls), {
        "master_name": address.service,
        "sentinel_kwargs": _sentinel_kwargs(address),
    }


def _one_server(name: str, url: str, who: str) -> RedisAddress:
    address = check_redis_url(name, url)
    if address.kind == "cluster":
        raise BadEnvironment(
            f"{who} can't use a Redis cluster: set {name} to one server or to a Sentinel's master"
        )
    return address


def _sentinel_kwargs(address: RedisAddress) -> dict[str, Any]:
    return {
        "socket_timeout": 2,
        "socket_connect_timeout": 2,
        "password": address.sentinel_password,
    }
