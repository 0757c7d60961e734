"""However a request ends, it ends once: one last chunk, one usage event, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from engine_worker.broker import GatewayBroker, Held, Verdict, WorkerBroker
from tests.engine_worker.broker.driving import (
    claim_one,
    end_backoffs,
    lapse_leases,
    last,
    publish,
    put,
    tokens,
    until,
    usage_events,
)


async def leftovers(redis_url: str, model: str) -> set[str]:
    """Keys of the model that a finished request must not leave, and any that would stay for ever."""
    prefix = f"weir:{{m:{model}}}:"
    lasting = {"arrivals", "usage"}  # written reasons in keys.py
    left = set()
    async with Redis.from_url(redis_url, protocol=2) as client:
        async for key in client.scan_iter(match=prefix.replace("{", "[{]").replace("}", "[}]") + "*"):
            name = key.decode().removeprefix(prefix)
            if name not in lasting and await client.pttl(key) == -1:
                left.add(name)
    return left


async def test_a_queued_request_that_is_cancelled_is_over_at_once(gateway, worker, make, model, redis_url):
    request = make("r1")
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        await gateway.cancel(model, "r1")
        await gateway.cancel(model, "r1")
        (chunk,) = await anext(live)
    assert (chunk.epoch, chunk.seq, chunk.token_ids) == (0, 0, [])
    assert (chunk.finish.reason, chunk.finish.prompt_tokens, chunk.finish.completion_tokens) == (
        "cancelled",
        0,  # no worker touched it: nothing is charged
        0,
    )
    assert await worker.claim(1) == []
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.completion_tokens, event.attempts) == ("cancelled", 0, 0)
    assert event.prompt_tokens == 0
    assert (event.claimed_at_ms, event.first_token_at_ms, event.worker_id) == (None, None, None)
    assert await leftovers(redis_url, model) == set()


async def test_who_waits_can_be_refused_with_a_reason(gateway, worker, make, model, redis_url):
    """A failure on record, not a client that left; no dead letter. What a worker has is left to it."""
    await put(gateway, make("runs"))
    running = await claim_one(worker)
    request = make("waits")
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        for name in ("runs", "waits", "waits", "nobody"):
            await gateway.refuse(model, name, code="model_unavailable", message="No worker.")
        (chunk,) = await anext(live)
    assert (chunk.request_id, chunk.finish.reason) == ("waits", "error")
    assert (chunk.finish.error.code, chunk.finish.error.message) == ("model_unavailable", "No worker.")
    state = await gateway.request_state(model, "waits")
    assert (state.state, state.finish) == ("finished", chunk.finish)
    assert await publish(worker, running, last(running, 0, 5)) is Verdict.OK
    (refused, served) = await usage_events(redis_url, model)
    assert (refused.finish_reason, refused.error_code) == ("error", "model_unavailable")
    assert (refused.prompt_tokens, refused.completion_tokens) == (0, 0)
    assert (served.request_id, served.finish_reason) == ("runs", "stop")
    assert await leftovers(redis_url, model) == set()


async def test_a_running_request_that_is_cancelled_is_ended_by_its_worker(
    gateway, worker, make, model, redis_url
):
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    await publish(worker, claim, tokens(claim, 0, 1))
    await gateway.cancel(model, "r1")
    assert await publish(worker, claim) is Verdict.CANCELLED
    assert await publish(worker, claim, tokens(claim, 1, 2)) is Verdict.CANCELLED  # the step in flight counts
    await publish(worker, claim, last(claim, 2, reason="cancelled"))
    await gateway.cancel(model, "r1")
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.completion_tokens) == ("cancelled", 2)
    assert await leftovers(redis_url, model) == set()


async def test_cancelled_while_its_worker_was_lost_it_is_not_given_to_another(
    gateway, worker, make, model, redis_url
):
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    await publish(worker, claim, tokens(claim, 0, 1, 2))
    await gateway.cancel(model, "r1")
    await lapse_leases(redis_url, model)
    assert await worker.expire() == (0, 0, 1)
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.completion_tokens) == ("cancelled", 2)
    assert (
        await publish(worker, claim, last(claim, 2, 3)) is Verdict.CANCELLED
    )  # too late, and so nothing is written
    assert len(await usage_events(redis_url, model)) == 1
    assert len(await gateway.read_log(model, "r1")) == 2


@pytest.mark.parametrize("finder", ["claim", "expire"])
async def test_a_deadline_in_the_queue_never_touches_a_worker(
    gateway, worker, make, model, redis_url, finder
):
    request = make("late", created_at_ms=1000, deadline_ms=1000)
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        await put(gateway, make("good"))
        if finder == "expire":
            assert await worker.expire() == (1, 0, 0)
        assert [claim.request.request_id for claim in await worker.claim(5)] == ["good"]
        (chunk,) = await anext(live)
    assert (chunk.request_id, chunk.finish.reason, chunk.finish.completion_tokens) == ("late", "deadline", 0)
    (event,) = await usage_events(redis_url, model)
    assert (event.request_id, event.finish_reason, event.completion_tokens, event.attempts) == (
        "late",
        "deadline",
        0,
        0,
    )


async def test_gateways_end_what_no_worker_is_left_to_end(gateway, make, model, redis_url):
    request = make("r1", created_at_ms=1000, deadline_ms=1100)
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        (chunk,) = await anext(live)
    assert chunk.finish.reason == "deadline"
    assert len(await usage_events(redis_url, model)) == 1


async def test_a_lapsed_lease_goes_to_the_front_with_its_tokens(gateway, worker, make, model, redis_url):
    await put(gateway, make("first"))
    (claim,) = await worker.claim(1)
    for n in range(3):
        await put(gateway, make(f"later-{n}"))
    await publish(worker, claim, tokens(claim, 0, 7, 8))
    await publish(worker, claim, tokens(claim, 2, 9))
    assert await worker.expire() == (0, 0, 0)  # the lease holds
    await lapse_leases(redis_url, model)
    assert await worker.expire() == (0, 1, 0)
    assert await publish(worker, claim, tokens(claim, 3, 10)) is Verdict.FENCED
    await end_backoffs(redis_url, model)
    (again,) = await worker.claim(1)
    assert again.request.request_id == "first"
    assert (again.epoch, again.attempt, again.logged_token_ids) == (2, 2, (7, 8, 9))
    assert await publish(worker, claim, tokens(claim, 3, 10)) is Verdict.FENCED
    assert await publish(worker, claim, last(claim, 3, 10)) is Verdict.FENCED
    assert await publish(worker, again, last(again, 3, 11)) is Verdict.OK
    log = await gateway.read_log(model, "first")
    assert [token for chunk in log for token in chunk.token_ids] == [7, 8, 9, 11]
    assert len(await usage_events(redis_url, model)) == 1


async def test_renewing_keeps_a_lease(redis_url, gateway, make, model):
    worker = WorkerBroker(redis_url, model=model, worker_id="w1", lease_ms=400, timeout_s=5)
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    loop = asyncio.get_running_loop()
    end = loop.time() + 1.0
    while loop.time() < end:
        assert await publish(worker, claim) is Verdict.OK
        assert await worker.expire() == (0, 0, 0)
        await asyncio.sleep(0.05)

    async def lapses() -> bool:
        return (await worker.expire())[1] == 1

    await until(lapses)  # and unrenewed it lapses
    await worker.aclose()


async def test_leases_that_lapse_while_the_server_answers_nobody_are_not_the_workers_fault(
    redis_url, gateway, worker, make, model
):
    gateway._sweep = lambda model: None  # it would be one more that sweeps
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    prefix = f"weir:{{m:{model}}}:"
    async with Redis.from_url(redis_url, protocol=2) as client:

        async def silence(lapsed_ms_ago: int) -> None:
            """For 60 s nobody was answered, and in that time the lease lapsed."""
            seconds, micros = await client.time()
            now_ms = seconds * 1000 + micros // 1000
            await client.set(prefix + "swept", now_ms - 60_000)
            await client.zadd(prefix + "leases", {"r1": now_ms - lapsed_ms_ago})

        await silence(1000)
        assert await worker.expire() == (0, 0, 0)
        assert await worker.expire() == (0, 0, 0)  # whoever sweeps next
        assert await publish(worker, claim) is Verdict.OK  # it is there, and renews
        await client.delete(prefix + "silent")
        assert await worker.expire() == (0, 0, 0)
        await silence(1000)
        await worker.expire()
        await client.delete(prefix + "silent")  # the moment is over, and it has said nothing
        assert await worker.expire() == (0, 1, 0)
        await end_backoffs(redis_url, model)
        await worker.claim(1)
        await silence(61_000)
        assert await worker.expire() == (0, 1, 0)  # it was late before


async def test_after_the_last_attempt_it_ends_with_an_error(gateway, worker, make, model, redis_url):
    request = make("r1")
    async with gateway.live(request.reply_channel) as live:
        await gateway.enqueue(request, max_queued=9, max_queued_per_tenant=9, max_attempts=2)
        for attempt in (1, 2):
            (claim,) = await worker.claim(1)
            assert claim.attempt == attempt
            await publish(worker, claim, tokens(claim, attempt - 1, attempt))
            await lapse_leases(redis_url, model)
            await worker.expire()
            await end_backoffs(redis_url, model)
        heard = [chunk for _ in range(3) for chunk in await anext(live)]
    assert heard[-1].finish.reason == "error"
    assert heard[-1].finish.error.code == "worker_lost"
    assert heard[-1].seq == 2
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.error_code, event.completion_tokens, event.attempts) == (
        "error",
        "worker_lost",
        2,
        2,
    )
    assert event.error_message == heard[-1].finish.error.message
    assert await leftovers(redis_url, model) == set()


async def test_handing_back_is_no_failure_unless_it_is_one(gateway, worker, make, model, redis_url):
    await put(gateway, make("r1"))
    for expected_attempt, failed in [(1, False), (1, False), (1, True), (2, False)]:
        (claim,) = await worker.claim(1)
        assert claim.attempt == expected_attempt
        await worker.release([Held("r1", claim.epoch)], failed=failed)
        await worker.release([Held("r1", claim.epoch)], failed=failed)  # a repeat is fenced
        assert (await worker.claim(0)) == []
        if failed:
            assert await worker.claim(1) == []  # put off
            await end_backoffs(redis_url, model)
    assert (await gateway.request_state(model, "r1")).state == "queued"


async def test_a_late_cancel_or_end_can_not_touch_a_new_request_under_the_same_id(
    gateway, worker, make, model, redis_url
):
    await gateway.enqueue(make("r1"), max_queued=9, max_queued_per_tenant=9, retention_ms=1)
    (old,) = await worker.claim(1)
    await publish(worker, old, last(old, 0, 1))
    async with Redis.from_url(redis_url, protocol=2) as client:

        async def is_forgotten() -> bool:
            return not await client.exists(f"weir:{{m:{model}}}:req:r1")

        await until(is_forgotten)
    await put(gateway, make("r1", tenant_id="t2"))
    await worker.release([Held("r1", old.epoch)], failed=True)
    assert (await gateway.request_state(model, "r1")).state == "queued"
    assert await publish(worker, old, last(old, 0, 1)) is Verdict.FENCED


async def test_cancel_and_finish_at_once_make_one_end(redis_url, make, model):
    gateways = [GatewayBroker(redis_url, timeout_s=5) for _ in range(3)]
    worker = WorkerBroker(redis_url, model=model, worker_id="w1", timeout_s=5)
    for n in range(30):
        await put(gateways[0], make(f"r{n}"))
    claims = await worker.claim(15)  # half are running, half still queued
    barrier = asyncio.Barrier(5)

    async def cancel(gateway: GatewayBroker) -> None:
        await barrier.wait()
        for n in range(30):
            await gateway.cancel(model, f"r{n}")

    async def finish() -> None:
        await barrier.wait()
        for claim in claims:
            await publish(worker, claim, last(claim, 0, 1))

    async def sweep() -> None:
        await barrier.wait()
        for _ in range(30):
            await worker.expire()

    await asyncio.gather(*map(cancel, gateways), finish(), sweep())
    events = await usage_events(redis_url, model)
    assert sorted(event.request_id for event in events) == sorted(f"r{n}" for n in range(30))
    for n in range(30):
        log = await gateways[0].read_log(model, f"r{n}")
        assert sum(chunk.finish is not None for chunk in log) == 1
    assert await leftovers(redis_url, model) == set()
    for broker in (*gateways, worker):
        await broker.aclose()
