"""One connection for all the scripts of a loop: nobody gets another's reply, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from django.conf import settings
from redis import asyncio as aioredis
from redis.exceptions import RedisError, ResponseError

from engine_worker.broker.shared import SharedConnection
from tests.engine_worker.broker.driving import until

ECHO = "return ARGV[1]"


@pytest.fixture
async def shared() -> AsyncIterator[SharedConnection]:
    shared = SharedConnection(settings.REDIS_URL, timeout_s=10)
    yield shared
    await shared.aclose()


async def echo(shared: SharedConnection, number: int) -> int:
    return int(await shared.eval(ECHO, 0, number))


async def test_many_at_once_each_get_their_own_in_two_writes(shared, monkeypatch):
    await echo(shared, 0)
    line = shared._line
    writes = Writes(line._transport)
    monkeypatch.setattr(line, "_transport", writes)
    assert await asyncio.gather(*(echo(shared, number) for number in range(100))) == list(range(100))
    assert writes.number == 2  # the first at once, the others together


class Writes:
    """A transport, and how often it was written to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.number = 0

    def write(self, data: bytes) -> None:
        self.number += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


async def test_who_leaves_takes_nobody_with_them(shared):
    await echo(shared, 0)
    calls = [asyncio.create_task(echo(shared, number)) for number in range(30)]
    await asyncio.sleep(0)  # all are on their way
    for call in calls[::3]:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [number for number in ended if not isinstance(number, asyncio.CancelledError)] == [
        number for number in range(30) if number % 3
    ]
    assert await echo(shared, 31) == 31


async def test_every_kind_of_argument_arrives_as_it_is(shared):
    for given, told in (
        ("é", "é".encode()),
        (b"\0\xff\r\n", b"\0\xff\r\n"),
        (-(2**63), b"-9223372036854775808"),
        ("", b""),
    ):
        assert await shared.eval(ECHO, 0, given) == told


async def test_an_error_is_its_callers_alone(shared):
    good, bad = await asyncio.gather(
        echo(shared, 1), shared.eval("return redis.error_reply('no')", 0), return_exceptions=True
    )
    assert good == 1
    assert isinstance(bad, ResponseError)


async def test_a_cut_connection_is_replaced(shared):
    await echo(shared, 0)
    async with aioredis.Redis.from_url(settings.REDIS_URL) as other:
        for _ in range(3):
            client_id = await shared._call("CLIENT", "ID")
            assert await other.client_kill_filter(_id=str(client_id)) == 1
            assert await asyncio.gather(*(echo(shared, number) for number in range(10))) == list(range(10))


async def test_no_answer_in_time_costs_the_connection():
    shared = SharedConnection(settings.REDIS_URL, timeout_s=0.5)
    try:
        await echo(shared, 0)
        line = shared._line
        line._transport.pause_reading()  # deaf from now on
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError):
                await echo(shared, 1)
        assert line.is_broken
        async with asyncio.timeout(10):
            assert await echo(shared, 2) == 2
    finally:
        await shared.aclose()


async def test_a_late_answer_of_a_server_that_answers_is_forgotten():
    shared = SharedConnection(settings.REDIS_URL, timeout_s=0.4)
    try:
        await echo(shared, 0)
        line = shared._line
        line._transport.pause_reading()
        late = asyncio.create_task(echo(shared, 1))
        await asyncio.sleep(0.2)
        line.heard_at = asyncio.get_running_loop().time()  # as of a call before it
        in_time = asyncio.create_task(echo(shared, 2))
        with pytest.raises(TimeoutError):
            await late
        assert not line.is_broken
        line._transport.resume_reading()
        assert await in_time == 2
        assert shared._line is line
        await asyncio.sleep(0.5)
        assert line._watch is None  # nobody waits: nobody looks
    finally:
        await shared.aclose()


async def test_who_leaves_while_waiting_for_work_takes_none_of_it_along(shared):
    key = "weir:test:left-while-waiting"
    async with aioredis.Redis.from_url(settings.REDIS_URL) as other:
        first = await shared._call("CLIENT", "ID")
        left = asyncio.create_task(shared.blpop([key], 0.0))
        await until(lambda: is_blocked(other, first))
        left.cancel()
        stays = asyncio.create_task(shared.blpop([key], 30.0))
        await until(lambda: is_gone(other, first))
        await other.rpush(key, "work")
        async with asyncio.timeout(20):
            assert await stays == [key.encode(), b"work"]
            assert await shared.blpop([key], 0.01) is None


async def is_blocked(other: aioredis.Redis, client_id: int) -> bool:
    return "b" in (await other.client_list(client_id=[client_id]))[0]["flags"]


async def is_gone(other: aioredis.Redis, client_id: int) -> bool:
    return not await other.client_list(client_id=[client_id])


async def test_no_server_is_an_error_of_redis():
    shared = SharedConnection("redis://127.0.0.1:1", timeout_s=1)
    with pytest.raises(RedisError):
        await shared.eval(ECHO, 0, 1)
    await shared.aclose()
