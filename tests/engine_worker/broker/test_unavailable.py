"""Redis is slow, gone, or the caller leaves in the middle: short answers, right answers, nothing orphaned."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
from redis.asyncio import BlockingConnectionPool, Redis, UnixDomainSocketConnection

from engine_worker.broker import BrokerUnavailable, GatewayBroker, WorkerBroker
from engine_worker.broker.connection import connect
from tests.engine_worker.broker.driving import put, until, usage_events
from tests.engine_worker.broker.wire import Wire


@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_every_call_ends_within_its_timeout(redis_url, make, model, tmp_path, fault):
    async with Wire(redis_url, tmp_path) as wire:
        gateway = GatewayBroker(wire.url, timeout_s=0.3)
        await gateway.workers()
        getattr(wire, fault)()
        for call in (
            lambda: put(gateway, make("r1")),
            lambda: gateway.cancel(model, "r1"),
            lambda: gateway.read_log(model, "r1"),
            lambda: gateway.request_state(model, "r1"),
            lambda: gateway.attach(model, "r1", "c"),
            gateway.model_cards,
            gateway.workers,
        ):
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                await call()
            assert time.monotonic() - began < 1.5
        wire.mend()
        await until(lambda: works(gateway))
        await gateway.aclose()


@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_an_idle_worker_hears_of_work_again_once_redis_is_back(redis_url, make, model, tmp_path, fault):
    async with Wire(redis_url, tmp_path) as wire:
        gateway = GatewayBroker(redis_url)
        worker = WorkerBroker(wire.url, model=model, worker_id="w", timeout_s=1)
        numbers = itertools.count()

        async def hears() -> bool:
            await put(gateway, make(f"r{next(numbers)}"))
            try:
                await worker.wait_for_better(0.01)
                return await worker.wait_for_work(0.01)
            except BrokerUnavailable:
                return False

        await until(hears)
        getattr(wire, fault)()
        for wait in (worker.wait_for_work, worker.wait_for_better):
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                await wait(0.01)
            assert time.monotonic() - began < 10
        wire.mend()
        await until(hears)
        await worker.aclose()
        await gateway.aclose()


async def works(gateway: GatewayBroker) -> bool:
    try:
        await gateway.workers()
    except BrokerUnavailable:
        return False
    return True


async def test_a_restarted_connection_is_replaced_without_the_caller_noticing(
    redis_url, make, model, tmp_path
):
    async with Wire(redis_url, tmp_path) as wire:
        gateway = GatewayBroker(wire.url, timeout_s=2)
        await put(gateway, make("r1"))
        wire.cut()
        wire.mend()
        assert (await gateway.request_state(model, "r1")).state == "queued"
        await gateway.aclose()


async def test_an_enqueue_whose_answer_never_came_is_undone(redis_url, worker, make, model, tmp_path):
    async with Wire(redis_url, tmp_path) as wire:
        gateway = GatewayBroker(wire.url, timeout_s=0.3)
        await gateway.workers()
        wire.freeze()  # the command will arrive, its answer will not
        with pytest.raises(BrokerUnavailable):
            await put(gateway, make("r1"))
        wire.mend()

        async def is_ended() -> bool:
            return [event.finish_reason for event in await usage_events(redis_url, model)] == ["cancelled"]

        # Whether the command arrived at all depends on what the wire still held: if so, it is cancelled.
        async def is_settled() -> bool:
            return await is_ended() or not await worker.claim(1)

        await until(is_settled)
        assert await worker.claim(1) == []
        await gateway.aclose()


async def test_a_caller_that_leaves_during_enqueue_leaves_no_request_behind(redis_url, worker, make, model):
    """Cancelled at every possible await, a request is either never seen or cancelled: no slot stays taken."""
    gateway = GatewayBroker(redis_url, timeout_s=5)
    for ticks in range(40):
        task = asyncio.create_task(put(gateway, make(f"r{ticks}")))
        for _ in range(ticks % 20):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(outcome, BaseException):
            await gateway.cancel(model, f"r{ticks}")  # it got in before; its caller cleans up as usual

    async def queue_is_empty() -> bool:
        return not await worker.claim(1)

    await until(queue_is_empty)
    async with Redis.from_url(redis_url, protocol=2) as client:

        async def nothing_alive() -> bool:
            prefix = f"weir:{{m:{model}}}:"
            return not await client.exists(prefix + "tiers", prefix + "deadlines", prefix + "leases")

        await until(nothing_alive)
    await gateway.aclose()


async def test_cancelled_calls_never_hand_their_answers_to_others(redis_url, make, model):
    """FAULTS 76: calls cancelled at random under load; every answer that does come belongs to its question."""
    gateway = GatewayBroker(redis_url, timeout_s=5)
    for n in range(20):
        await put(gateway, make(f"r{n}", tenant_id=f"tenant-{n}"))
    rng = random.Random(76)
    cancelled = answered = 0

    async def ask(n: int) -> None:
        nonlocal answered
        state = await gateway.request_state(model, f"r{n}")
        assert state.tenant_id == f"tenant-{n}"
        answered += 1

    for _ in range(60):
        tasks = [asyncio.create_task(ask(rng.randrange(20))) for _ in range(30)]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 15):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, asyncio.CancelledError):
                cancelled += 1
            elif outcome is not None:
                raise outcome
    assert cancelled > 100
    assert answered > 100
    await gateway.aclose()


async def test_cancelled_calls_give_their_connections_back(redis_url):
    client = connect(redis_url, timeout_s=5, max_connections=2)
    rng = random.Random(59)
    for _ in range(200):
        tasks = [asyncio.create_task(client.echo(str(n))) for n in range(8)]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 4):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Any that were not given back would be missing from the two.
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(client.echo(str(n)) for n in range(20)))
    assert answers == [str(n).encode() for n in range(20)]
    assert len(client.connection_pool._in_use_connections) == 0
    await client.aclose()
    await client.connection_pool.disconnect()


class KeptConnection(UnixDomainSocketConnection):
    """The client as it would be without the guard: a cancelled command leaves its connection open."""

    async def disconnect(self, nowait: bool = False, *args: object, **kwargs: object) -> None:
        if not nowait:
            await super().disconnect(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they came


async def test_control_a_connection_that_is_kept_after_a_cancel_gives_wrong_answers(redis_url):
    path = redis_url.removeprefix("unix://")
    pool = BlockingConnectionPool(
        connection_class=KeptConnection, path=path, protocol=2, max_connections=1, socket_timeout=None
    )
    client = Redis.from_pool(pool)
    await client.mset({"weir:test:a": "a", "weir:test:b": "b"})
    blocked = asyncio.create_task(client.blpop(["weir:test:none"], timeout=0.2))
    await asyncio.sleep(0.05)  # it is waiting at the server
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    answers = [await client.get("weir:test:a"), await client.get("weir:test:b")]
    assert answers != [b"a", b"b"], "the control must show the fault that the guard prevents"
    await client.delete("weir:test:a", "weir:test:b")
    for connection in (*pool._available_connections, *pool._in_use_connections):
        await UnixDomainSocketConnection.disconnect(connection)
    await client.aclose()
