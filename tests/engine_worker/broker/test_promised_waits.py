"""How long a request may wait: refused where that can't be promised, ended where it is over, cheaply in a flood."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from engine_worker.broker import Held, QueueFull, WorkerBroker
from engine_worker.broker.full_queues import FullQueues
from engine_worker.protocol import charged_prompt_tokens
from tests.engine_worker.broker.driving import (
    backdate,
    claim_one,
    end_backoffs,
    lapse_leases,
    name,
    publish,
    put,
    tokens,
    usage_events,
)


async def test_a_wait_that_can_not_be_promised_is_refused_at_once(gateway, worker, make, model, redis_url):
    await put(gateway, make("r0"), max_wait_ms=60_000)
    await backdate(redis_url, model, "r0", 25_000)
    await claim_one(worker)  # one place took 25 s: the second in line would wait about 50, the third 75
    await put(gateway, make("r1"), max_wait_ms=100_000)
    await put(gateway, make("r2"), max_wait_ms=100_000)
    with pytest.raises(QueueFull) as refused:
        await put(gateway, make("r3"), max_wait_ms=100_000)
    assert refused.value.scope == "wait"
    assert 14_000 < refused.value.retry_after_ms < 17_000  # 75 s less the 60 s that are promised of 100 s
    await put(gateway, make("patient"), max_wait_ms=150_000)
    await put(gateway, make("other", tenant_id="t2"), max_wait_ms=60_000)  # its own line is empty


@pytest.mark.parametrize("found_by", ["claim", "sweep"])
async def test_one_that_has_waited_as_long_as_was_promised_is_ended_before_it_costs_anything(
    gateway, worker, make, model, redis_url, found_by
):
    """What comes too late is worth nothing: else an overloaded engine works for nobody."""
    await put(gateway, make("begun"), max_wait_ms=60_000)
    begun = await claim_one(worker)
    await publish(worker, begun, tokens(begun, 0, 7))
    await worker.release([Held(begun.request.request_id, begun.epoch)], failed=False)
    await put(gateway, make("late"), max_wait_ms=60_000)
    await put(gateway, make("fresh"), max_wait_ms=60_000)
    for request_id in ("begun", "late"):
        await backdate(redis_url, model, request_id, 61_000)
    if found_by == "sweep":
        async with Redis.from_url(redis_url, protocol=2) as client:
            await client.zincrby(f"weir:{{m:{model}}}:deadlines", -61_000, "late")
        await gateway.expire(model)
        assert (await gateway.request_state(model, "late")).state == "finished"
    # One that has a token goes on: what was made of it would be lost.
    assert [name(claim) for claim in await worker.claim(3)] == ["begun", "fresh"]
    state = await gateway.request_state(model, "late")
    assert (state.state, state.attempts) == ("finished", 0)
    assert state.finish
    assert (state.finish.reason, state.finish.prompt_tokens) == ("deadline", 0)


async def test_claimed_by_a_worker_that_dies_it_waits_no_longer_than_was_promised(
    gateway, make, model, redis_url
):
    """Over all attempts: a client that was promised two seconds is not held until its deadline."""
    request = make("r1")
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request, max_wait_ms=2_000)
        dying = WorkerBroker(redis_url, model=model, worker_id="dying", lease_ms=50, timeout_s=5)
        assert name(await claim_one(dying)) == "r1"
        await dying.aclose()  # nothing renews its lease any more, and the gateway's sweep finds that
        async with asyncio.timeout(60):
            (chunk,) = await anext(live)
    assert (chunk.finish.reason, chunk.finish.completion_tokens) == ("deadline", 0)
    (event,) = await usage_events(redis_url, model)
    assert (event.attempts, event.worker_id) == (1, "dying")
    assert 2_000 <= event.finished_at_ms - event.created_at_ms < 30_000
    assert charged_prompt_tokens(finish_reason="deadline", prompt_tokens=5, completion_tokens=0) == 0


@pytest.mark.parametrize("lost_by", ["lapse", "release"])
async def test_time_at_a_worker_that_was_there_is_not_waiting(
    gateway, worker, make, model, redis_url, lost_by
):
    """A long prompt may take longer to compute than its tier lets it wait: an upgrade in the middle must not end it."""
    prefix = f"weir:{{m:{model}}}:"
    await put(gateway, make("r1"), max_wait_ms=60_000)
    claim = await claim_one(worker)
    async with Redis.from_url(redis_url, protocol=2) as client:
        await client.hincrby(prefix + "req:r1", "had", -100_000)  # 100 s at the worker, after 10 in the queue
        await backdate(redis_url, model, "r1", 110_000)
        await publish(worker, claim)
        if lost_by == "release":
            await worker.release([Held("r1", claim.epoch)], failed=False)
            waited_ms = 10_000
        else:
            await client.zincrby(
                prefix + "leases", -worker.lease_ms, "r1"
            )  # silent since just now and a lease
            await client.hincrby(prefix + "req:r1", "created", -worker.lease_ms)
            await client.hincrby(prefix + "req:r1", "had", -worker.lease_ms)
            assert await worker.expire() == (0, 1, 0)
            await end_backoffs(redis_url, model)
            waited_ms = 20_000
        at_ms = 1000 * (await client.time())[0]
        leaves_at_ms = await client.zscore(prefix + "deadlines", "r1")
        assert abs(leaves_at_ms - at_ms - (60_000 - waited_ms)) < 5_000
    assert name(await claim_one(worker)) == "r1"


async def test_of_a_worker_lost_too_late_it_is_ended_at_once(gateway, worker, make, model, redis_url):
    await put(gateway, make("r1"), max_wait_ms=60_000)
    await claim_one(worker)
    await backdate(redis_url, model, "r1", 61_000)
    await lapse_leases(redis_url, model)
    assert await worker.expire() == (0, 0, 1)
    state = await gateway.request_state(model, "r1")
    assert state.state == "finished"
    assert state.finish.reason == "deadline"


async def test_a_flood_of_refusals_asks_the_broker_now_and_then(gateway, worker, make, model, redis_url):
    line: dict[str, Any] = {"tier_rank": 1, "tenant_id": "t1"}
    await put(gateway, make("r0"), max_wait_ms=60_000)
    await backdate(redis_url, model, "r0", 50_000)
    await claim_one(worker)
    await put(gateway, make("r1"), max_wait_ms=60_000)
    gateway.refuse_if_full(model, **line, max_wait_ms=60_000)  # nothing has been refused
    with pytest.raises(QueueFull) as asked:
        await put(gateway, make("r2"), max_wait_ms=60_000)
    with pytest.raises(QueueFull) as known:
        gateway.refuse_if_full(model, **line, max_wait_ms=60_000)
    assert known.value.scope == "wait"
    assert asked.value.retry_after_ms - 1000 <= known.value.retry_after_ms <= asked.value.retry_after_ms
    # Who is more patient, another tenant and another tier are asked for.
    gateway.refuse_if_full(model, **line, max_wait_ms=90_000)
    gateway.refuse_if_full(model, **line | {"tenant_id": "t2"}, max_wait_ms=60_000)
    gateway.refuse_if_full(model, **line | {"tier_rank": 0}, max_wait_ms=60_000)


def test_a_refusal_is_remembered_for_a_tenth_of_the_wait_and_a_second_at_most():
    now = 0.0
    full = FullQueues(clock=lambda: now)
    for number in range(10_000):
        full.remember(("m", 1, f"t{number}"), 5_000, QueueFull("wait", 7_000))
    now = 0.49
    with pytest.raises(QueueFull) as refused:
        full.check(("m", 1, "t9999"), 5_000)
    assert refused.value.retry_after_ms == 6_510
    now = 0.51
    full.check(("m", 1, "t9999"), 5_000)
    full.remember(("m", 1, "t0"), 60_000, QueueFull("wait", 7_000))
    now = 1.52
    full.check(("m", 1, "t0"), 60_000)
    # Bounds in requests are asked for each time: one may just have left.
    full.remember(("m", 1, "t0"), 60_000, QueueFull("tier", 7_000))
    full.check(("m", 1, "t0"), 60_000)


async def test_at_the_onset_of_a_flood_the_whole_queue_s_pace_tells_the_wait(
    gateway, worker, make, model, redis_url
):
    """Each of many tenants has a short line that has never moved: what they wait for is all of them together."""
    for n in range(10):
        await put(gateway, make(f"t{n}-0", tenant_id=f"t{n}"), max_wait_ms=60_000)
    await claim_one(worker)  # others wait from here on
    async with Redis.from_url(redis_url, protocol=2) as client:
        await client.decrby(f"weir:{{m:{model}}}:moved", 100_000)
    await claim_one(worker)  # 100 s later: one in 100 s leaves, and eight wait
    await put(gateway, make("ninth", tenant_id="t0"), max_wait_ms=1_650_000)
    with pytest.raises(QueueFull) as refused:
        await put(gateway, make("eleventh", tenant_id="t0"), max_wait_ms=1_650_000)
    assert refused.value.scope == "wait"
    assert 10_000 <= refused.value.retry_after_ms <= 30_000  # 1000 s less the 990 s that are promised
    await put(gateway, make("patient", tenant_id="t0"), max_wait_ms=3_000_000)
    while await worker.claim(8):
        pass
    # Nothing waits: the time until the next one is no pace.
    await put(gateway, make("later", tenant_id="t1"), max_wait_ms=60_000)
    await claim_one(worker)
    async with Redis.from_url(redis_url, protocol=2) as client:
        assert await client.exists(f"weir:{{m:{model}}}:moved") == 0
