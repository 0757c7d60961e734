"""What comes while nothing waits is handed to a worker that has said it has room: as a claim would, one call sooner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from engine_worker.broker import Channel, Claim, GatewayBroker, Verdict, WorkerBroker
from tests.engine_worker.broker.driving import (
    claim_one,
    lapse_leases,
    last,
    name,
    publish,
    put,
    until,
    usage_events,
)


@pytest.fixture
async def handed(worker: WorkerBroker) -> AsyncIterator[Channel[Claim]]:
    async with worker.handed() as channel:
        yield channel


@pytest.fixture
async def other(redis_url: str, model: str) -> AsyncIterator[WorkerBroker]:
    broker = WorkerBroker(redis_url, model=model, worker_id="w2", timeout_s=30)
    yield broker
    await broker.aclose()


async def taken(channel: Channel[Claim]) -> Claim:
    async with asyncio.timeout(30):
        claim = await anext(channel)
    assert isinstance(claim, Claim)
    return claim


async def state(gateway: GatewayBroker, model: str, request_id: str) -> str:
    return (await gateway.request_state(model, request_id)).state


async def served(redis_url: str, model: str, tenant: str) -> float | None:
    async with Redis.from_url(redis_url, protocol=2) as client:
        score: float | None = await client.zscore(f"weir:{{m:{model}}}:served:1", tenant)
    return score


async def test_it_is_what_a_claim_would_have_given(gateway, worker, handed, make, model, redis_url):
    await put(gateway, make("claimed", tenant_id="t1"))
    claimed = await claim_one(worker)
    assert await worker.claim(1, offers=True) == []
    assert await put(gateway, make("handed", tenant_id="t2")) == 0
    claim = await taken(handed)
    assert claim.request == make("handed", tenant_id="t2")
    for field in ("epoch", "attempt", "logged_token_ids", "log", "tier_class"):
        assert getattr(claim, field) == getattr(claimed, field)
    assert 0 < claim.remaining_ms <= 60_000
    assert claim.queued_ms == 0
    assert await state(gateway, model, "handed") == "running"
    # What the other had been served when its turn came is where the newcomer starts.
    assert claim.counter == claimed.counter == 0
    for one in (claimed, claim):
        assert await publish(worker, one, last(one, 0, 5, 6)) is Verdict.OK
    assert await served(redis_url, model, "t1") == await served(redis_url, model, "t2") == (3 + 2 * 2) * 1000
    events = {event.request_id: event for event in await usage_events(redis_url, model)}
    assert events["handed"].attempts == 1
    assert events["handed"].worker_id == "w1"
    assert events["handed"].completion_tokens == 2
    assert events["handed"].claimed_at_ms == events["handed"].created_at_ms
    assert (
        events["handed"].created_at_ms
        <= events["handed"].first_token_at_ms
        <= events["handed"].finished_at_ms
    )
    assert (await gateway.request_state(model, "handed")).tokens == 2


async def test_no_more_than_there_is_room_for(gateway, worker, handed, make, model):
    await put(gateway, make("r1"))
    assert [name(claim) for claim in await worker.claim(3, offers=True)] == ["r1"]
    for n in (2, 3, 4):
        await put(gateway, make(f"r{n}"))
    assert [name(await taken(handed)) for _ in range(2)] == ["r2", "r3"]
    assert await state(gateway, model, "r4") == "queued"
    assert await worker.wait_for_work(5)
    assert [name(claim) for claim in await worker.claim(1, offers=True)] == ["r4"]
    await put(gateway, make("r5"))
    assert await state(gateway, model, "r5") == "queued"


async def test_nobody_passes_what_waits(gateway, worker, handed, make, model):
    await put(gateway, make("of-another-worker", adapter="french"))
    assert await worker.claim(2, offers=True) == []
    await put(gateway, make("r1"))
    assert await state(gateway, model, "r1") == "queued"


async def test_nobody_passes_what_is_put_off(gateway, worker, handed, make, model, redis_url):
    await put(gateway, make("r1"))
    await claim_one(worker)
    await lapse_leases(redis_url, model)
    await worker.expire()
    assert await worker.claim(2, offers=True) == []
    await put(gateway, make("r2"))
    assert await state(gateway, model, "r2") == "queued"


async def test_an_adapter_is_left_to_who_has_it(gateway, worker, handed, make, model):
    await worker.claim(2, offers=True)
    await put(gateway, make("r1", adapter="french"))
    assert await state(gateway, model, "r1") == "queued"


async def test_who_does_not_listen_any_more_is_handed_nothing(gateway, worker, other, make, model):
    async with worker.handed():
        await worker.claim(2, offers=True)
    await put(gateway, make("r1"))
    assert await state(gateway, model, "r1") == "queued"
    assert name(await claim_one(other)) == "r1"


async def test_an_offer_lapses(gateway, worker, handed, make, model, monkeypatch):
    monkeypatch.setattr("engine_worker.broker.worker.OFFER_MS", 30)
    await worker.claim(2, offers=True)
    await asyncio.sleep(0.1)
    await put(gateway, make("r1"))
    assert await state(gateway, model, "r1") == "queued"


async def test_an_offer_ends_with_the_next_claim(gateway, worker, handed, make, model):
    await worker.claim(2, offers=True)
    await worker.claim(0)
    await put(gateway, make("r1"))
    assert await state(gateway, model, "r1") == "queued"


async def test_the_one_with_the_most_room_gets_it(gateway, worker, other, handed, make):
    await worker.claim(2, offers=True)
    async with other.handed() as handed_to_other:
        await other.claim(4, offers=True)
        for n in range(4):
            await put(gateway, make(f"r{n}"))
        assert [name(await taken(handed_to_other)) for _ in range(3)] == ["r0", "r1", "r2"]
        assert name(await taken(handed)) == "r3"


async def test_one_that_its_worker_never_heard_of_goes_to_another(
    gateway, worker, other, handed, make, model, redis_url
):
    await worker.claim(1, offers=True)
    await put(gateway, make("r1"))
    assert await state(gateway, model, "r1") == "running"
    await lapse_leases(redis_url, model)
    await other.expire()

    async def is_claimed() -> bool:
        return [(name(claim), claim.epoch, claim.attempt) for claim in await other.claim(1)] == [("r1", 2, 2)]

    await until(is_claimed)
    claim = await taken(handed)
    assert await publish(worker, claim, last(claim, 0, 5)) is Verdict.FENCED


async def test_a_repeated_call_hands_nothing_over_twice(gateway, worker, handed, make, model):
    await worker.claim(2, offers=True)
    call = gateway._call

    async def twice(verb, model, args):
        await call(verb, model, args)
        return await call(verb, model, args)

    gateway._call = twice
    assert await put(gateway, make("r1")) == 0
    assert name(await taken(handed)) == "r1"
    await handed.caught_up()
    assert not handed._buffer


async def test_too_long_a_body_is_claimed(gateway, worker, handed, make, model):
    await worker.claim(2, offers=True)
    await put(gateway, make("r1", prompt_token_ids=[70_000] * 20_000))
    assert await state(gateway, model, "r1") == "queued"
