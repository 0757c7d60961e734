"""A claim that waits at the server: the request that comes is had with the wake, and by nobody who has left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from engine_worker.broker import GatewayBroker, WorkerBroker
from tests.engine_worker.broker.driving import name, put, until


@pytest.fixture
async def waiting(worker: WorkerBroker, redis_url: str) -> Any:
    """Begins to wait; done when the server holds the claim."""
    begun: list[asyncio.Task[Any]] = []

    async def begin(count: int = 2) -> asyncio.Task[Any]:
        task = asyncio.create_task(worker.claim_queued(count, timeout_s=5))
        begun.append(task)
        await until(lambda: is_held(redis_url))
        return task

    yield begin
    for task in begun:
        task.cancel()


async def is_held(redis_url: str) -> bool:
    async with Redis.from_url(redis_url, protocol=2) as client:
        return any("b" in each["flags"] for each in await client.client_list())


async def test_who_waits_has_the_request_with_the_wake(gateway: GatewayBroker, make, waiting):
    claims = await waiting()
    await put(gateway, make("r1"))
    async with asyncio.timeout(10):
        (claim,) = await claims
    assert (name(claim), claim.attempt) == ("r1", 1)


async def test_where_nothing_comes_there_is_nothing_and_what_is_queued_is_had_at_once(gateway, worker, make):
    assert await worker.claim_queued(2, timeout_s=0.05) == []
    for number in range(3):
        await put(gateway, make(f"r{number}"))
    async with asyncio.timeout(10):
        assert len(await worker.claim_queued(2, timeout_s=5)) == 2
        assert len(await worker.claim_queued(2, timeout_s=5)) == 1


async def test_a_server_that_has_forgotten_the_script_is_told_it(gateway, worker, make, redis_url):
    await put(gateway, make("r1"))
    async with Redis.from_url(redis_url, protocol=2) as client:
        await client.script_flush()
    async with asyncio.timeout(10):
        assert [name(claim) for claim in await worker.claim_queued(2, timeout_s=5)] == ["r1"]


async def test_who_has_left_takes_nothing(gateway, worker, make, waiting, redis_url):
    claims = await waiting()
    claims.cancel()
    await until(lambda: is_free(redis_url))
    await put(gateway, make("r1"))
    assert [name(claim) for claim in await worker.claim(1)] == ["r1"]


async def is_free(redis_url: str) -> bool:
    return not await is_held(redis_url)
