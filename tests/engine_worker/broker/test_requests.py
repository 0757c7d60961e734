"""The life of a request in the broker: order, bounds, claim, tokens, end."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.broker import (
    DuplicateRequestId,
    GatewayBroker,
    Held,
    QueueFull,
    UnknownRequest,
    Verdict,
    WorkerBroker,
)
from engine_worker.protocol import Chunk
from tests.engine_worker.broker.driving import (
    card,
    end_backoffs,
    last,
    publish,
    put,
    tokens,
    until,
    usage_events,
)
from tests.engine_worker.conftest import Make


async def claimed_ids(worker: WorkerBroker, count: int = 10) -> list[str]:
    return [claim.request.request_id for claim in await worker.claim(count)]


async def test_a_request_walks_from_queue_to_ledger(gateway, worker, make, model, redis_url):
    request = make("r1", prompt_token_ids=[5, 6, 7, 8])
    async with gateway.live(request.reply_channel) as live:
        assert await put(gateway, request) == 0
        (claim,) = await worker.claim(4)
        assert claim.request == request
        assert (claim.epoch, claim.attempt, claim.logged_token_ids) == (1, 1, ())
        assert 50_000 < claim.remaining_ms <= 60_000
        assert await publish(worker, claim, tokens(claim, 0, 10)) is Verdict.OK
        assert await publish(worker, claim, last(claim, 1, 11, 12)) is Verdict.OK
        heard = [await anext(live), await anext(live)]
    assert heard == [[tokens(claim, 0, 10)], [last(claim, 1, 11, 12)]]
    assert await gateway.read_log(model, "r1") == [tokens(claim, 0, 10), last(claim, 1, 11, 12)]
    assert await gateway.read_log(model, "r1", from_seq=1) == [last(claim, 1, 11, 12)]

    state = await gateway.request_state(model, "r1")
    assert (state.state, state.tokens, state.attempts, state.tenant_id) == ("finished", 3, 1, "t1")
    assert state.finish == last(claim, 1, 11, 12).finish

    (event,) = await usage_events(redis_url, model)
    assert (event.request_id, event.tenant_id, event.model, event.tier) == ("r1", "t1", model, "standard")
    assert (event.finish_reason, event.prompt_tokens, event.completion_tokens) == ("stop", 4, 3)
    assert (event.key_id, event.endpoint, event.reservation_id) == ("key-1", "chat.completions", "res-r1")
    assert (event.worker_id, event.attempts) == ("w1", 1)
    assert event.claimed_at_ms is not None
    assert event.first_token_at_ms is not None
    assert event.created_at_ms <= event.claimed_at_ms <= event.first_token_at_ms <= event.finished_at_ms


async def test_tiers_go_strictly_by_rank_and_then_by_arrival(gateway, worker, make):
    for request_id, rank, tenant in [
        ("batch", 2, "t1"),
        ("std-1", 1, "t1"),
        ("std-2", 1, "t2"),
        ("std-3", 1, "t1"),
        ("rt", 0, "t3"),
    ]:
        await put(gateway, make(request_id, tier_rank=rank, tenant_id=tenant))
    assert await claimed_ids(worker) == ["rt", "std-1", "std-2", "std-3", "batch"]


async def test_position_counts_what_goes_first(gateway, worker, make, model):
    assert await put(gateway, make("b1", tier_rank=2)) == 0
    assert await put(gateway, make("b2", tier_rank=2)) == 1
    assert await put(gateway, make("r1", tier_rank=0)) == 0
    assert (await gateway.request_state(model, "b2")).position == 2
    await worker.claim(1)
    assert (await gateway.request_state(model, "b2")).position == 1
    assert (await gateway.request_state(model, "r1")).position is None


async def test_a_worker_gets_no_more_than_it_asks_for(gateway, worker, make):
    for n in range(5):
        await put(gateway, make(f"r{n}"))
    assert await claimed_ids(worker, 2) == ["r0", "r1"]
    assert await claimed_ids(worker, 10) == ["r2", "r3", "r4"]
    assert await claimed_ids(worker, 10) == []


async def test_a_request_for_an_adapter_waits_for_a_worker_that_has_it(
    gateway, worker, make, redis_url, model
):
    """It holds up nobody: neither its tenant's line, nor other tenants, nor lower tiers."""
    await worker.register(card(model), b"{}")
    for request_id, rank, tenant, adapter in (
        ("a0", 0, "t1", "polite"), ("a1", 1, "t1", "polite"), ("plain-1", 1, "t1", ""), ("a2", 1, "t2", "rude"),
        ("plain-2", 1, "t3", ""), ("plain-3", 2, "t1", ""),
    ):  # fmt: skip
        await put(gateway, make(request_id, tier_rank=rank, tenant_id=tenant, adapter=adapter))
    assert {claim.request.request_id for claim in await worker.claim(2)} == {"plain-1", "plain-2"}
    assert [claim.request.request_id for claim in await worker.claim(9)] == ["plain-3"]
    other = WorkerBroker(redis_url, model=model, worker_id="w2", timeout_s=30)
    try:
        await other.register(card(model, adapters={"polite": ""}), b"{}")
        assert [claim.request.request_id for claim in await other.claim(9)] == ["a0", "a1"]
    finally:
        await other.aclose()
    assert (await gateway.request_state(model, "a2")).state == "queued"  # until its deadline


@pytest.mark.parametrize(
    ("scope", "bounds"),
    [("tier", {"max_queued": 2}), ("tenant", {"max_queued_per_tenant": 2})],
)
async def test_the_queue_is_bounded(gateway, worker, make, scope, bounds):
    await put(gateway, make("r1"), **bounds)
    await put(gateway, make("r2"), **bounds)
    with pytest.raises(QueueFull) as refused:
        await put(gateway, make("r3"), **bounds)
    assert refused.value.scope == scope
    assert 1000 <= refused.value.retry_after_ms <= 30_000
    other = make("r4", tenant_id="t2")
    if scope == "tenant":
        await put(gateway, other, **bounds)
    await put(gateway, make("r5", tier_rank=0), **bounds)  # another tier's queue has room
    await worker.claim(2)
    await put(gateway, make("r3"), **bounds)  # what was refused left no trace, and there is room again


async def test_duplicate_ids_are_refused_in_every_state(gateway, worker, make):
    await put(gateway, make("r1"))
    for step in ("queued", "running", "finished"):
        with pytest.raises(DuplicateRequestId):
            await put(gateway, make("r1"))
        if step == "queued":
            (claim,) = await worker.claim(1)
        elif step == "running":
            await publish(worker, claim, last(claim, 0, 1))


async def test_of_two_at_once_with_one_id_exactly_one_gets_in(redis_url, make, model):
    gateways = [GatewayBroker(redis_url, timeout_s=5) for _ in range(8)]
    barrier = asyncio.Barrier(len(gateways))

    async def attempt(gateway: GatewayBroker) -> bool:
        await gateway.workers()  # connect before the start
        await barrier.wait()
        try:
            await put(gateway, make("r1"))
        except DuplicateRequestId:
            return False
        return True

    assert sum(await asyncio.gather(*(attempt(gateway) for gateway in gateways))) == 1
    for gateway in gateways:
        await gateway.aclose()


async def test_each_request_goes_to_one_worker_only(redis_url, gateway, make, model):
    for n in range(60):
        await put(gateway, make(f"r{n}"))
    workers = [WorkerBroker(redis_url, model=model, worker_id=f"w{n}", timeout_s=5) for n in range(6)]
    barrier = asyncio.Barrier(len(workers))

    async def drain(worker: WorkerBroker) -> list[str]:
        await barrier.wait()
        mine: list[str] = []
        while got := await claimed_ids(worker, 3):
            mine += got
        return mine

    taken = [request_id for part in await asyncio.gather(*map(drain, workers)) for request_id in part]
    assert sorted(taken) == sorted(f"r{n}" for n in range(60))
    for worker in workers:
        await worker.aclose()


async def test_one_publish_serves_the_whole_batch_with_one_message_per_channel(gateway, worker, make, model):
    a, b = f"weir:live:a-{model}", f"weir:live:b-{model}"
    async with gateway.live(a) as live_a, gateway.live(b) as live_b:
        for n in range(40):
            await put(gateway, make(f"r{n}", reply_channel=a if n % 2 else b))
        claims = await worker.claim(40)
        verdicts = await worker.publish(
            [Held(c.request.request_id, c.epoch, [tokens(c, 0, n)]) for n, c in enumerate(claims)]
        )
        assert verdicts == [Verdict.OK] * 40
        odd, even = await anext(live_a), await anext(live_b)
    assert isinstance(odd, list)
    assert isinstance(even, list)
    assert [chunk.request_id for chunk in odd] == [f"r{n}" for n in range(1, 40, 2)]
    assert [chunk.request_id for chunk in even] == [f"r{n}" for n in range(0, 40, 2)]


async def test_a_repeated_publish_changes_nothing(gateway, worker, make, model, redis_url):
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    steps: list[Chunk] = [tokens(claim, 0, 1), tokens(claim, 1, 2, 3), last(claim, 3, 4)]
    for step in steps:
        assert await publish(worker, claim, step) is Verdict.OK
        assert await publish(worker, claim, step) is Verdict.OK
    assert await publish(worker, claim, *steps) is Verdict.OK
    assert await gateway.read_log(model, "r1") == steps
    assert len(await usage_events(redis_url, model)) == 1


async def test_a_worker_ahead_of_the_log_is_fenced_and_the_request_goes_on_from_the_log(
    gateway, worker, make, model, redis_url
):
    # The server lost its last writes: what the worker sends no longer joins up.
    await put(gateway, make("r1"))
    (claim,) = await worker.claim(1)
    await publish(worker, claim, tokens(claim, 0, 1))
    assert await publish(worker, claim, tokens(claim, 2, 3)) is Verdict.FENCED
    assert await worker.expire() == (0, 1, 0)
    await end_backoffs(redis_url, model)
    (again,) = await worker.claim(1)
    assert again.logged_token_ids == (1,)


async def test_attach_sends_live_tokens_to_one_more_gateway(gateway, worker, make, model):
    second = f"weir:live:second-{model}"
    request = make("r1")
    await put(gateway, request)
    (claim,) = await worker.claim(1)
    await publish(worker, claim, tokens(claim, 0, 1))
    async with gateway.live(request.reply_channel) as first_live, gateway.live(second) as second_live:
        await gateway.attach(model, "r1", second)
        await gateway.attach(model, "r1", second)
        await publish(worker, claim, last(claim, 1, 2))
        assert await anext(first_live) == [last(claim, 1, 2)]
        assert await anext(second_live) == [last(claim, 1, 2)]


async def test_attaching_for_ever_stays_bounded(gateway, worker, make, model, redis_url):
    await put(gateway, make("r1"))
    for n in range(50):
        await gateway.attach(model, "r1", f"weir:live:g{n}")
    (claim,) = await worker.claim(1)
    async with gateway.live("weir:live:g49") as newest:
        await publish(worker, claim, tokens(claim, 0, 1))
        assert await anext(newest) == [tokens(claim, 0, 1)]


async def test_unknown_requests_are_named_as_such(gateway, model):
    with pytest.raises(UnknownRequest):
        await gateway.read_log(model, "nope")
    with pytest.raises(UnknownRequest):
        await gateway.request_state(model, "nope")
    with pytest.raises(UnknownRequest):
        await gateway.attach(model, "nope", "weir:live:g1")
    await gateway.cancel(model, "nope")


async def test_the_log_outlives_the_end_by_the_retention_only(gateway, worker, make: Make, model):
    await gateway.enqueue(make("r1"), max_queued=9, max_queued_per_tenant=9, retention_ms=300)
    (claim,) = await worker.claim(1)
    await publish(worker, claim, last(claim, 0, 1))
    assert await gateway.read_log(model, "r1")

    async def is_gone() -> bool:
        try:
            await gateway.read_log(model, "r1")
        except UnknownRequest:
            return True
        return False

    await until(is_gone)
    await put(gateway, make("r1"))  # the id is free again: a new request, untouched by the old one's end
    (again,) = await worker.claim(1)
    assert again.epoch == 1
