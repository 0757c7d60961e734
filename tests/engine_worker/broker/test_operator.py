"""What an operator sees of the queue, and does with the dead."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from engine_worker.broker import GatewayBroker, Held, OperatorBroker, UnknownRequest, WorkerBroker
from engine_worker.protocol import GenerateRequest
from tests.engine_worker.broker.driving import (
    backdate,
    claim_one,
    last,
    name,
    publish,
    put,
    tokens,
    usage_events,
)


@pytest.fixture
async def operator(redis_url: str) -> AsyncIterator[OperatorBroker]:
    broker = OperatorBroker(redis_url, timeout_s=5)
    yield broker
    await broker.aclose()


async def die(gateway: GatewayBroker, worker: WorkerBroker, request: GenerateRequest) -> None:
    """Its only attempt fails after two tokens."""
    await gateway.enqueue(request, max_queued=9, max_queued_per_tenant=9, max_attempts=1)
    (claim,) = await worker.claim(1)
    await publish(worker, claim, tokens(claim, 0, 7, 8))
    await worker.release(
        [Held(request.request_id, claim.epoch)], failed=True, code="engine_failed", message="It broke."
    )


async def test_the_queue_by_tier_and_tenant(gateway, worker, operator, make, model):
    await put(gateway, make("gone", tier_rank=0))
    await worker.claim(1)
    for request_id, rank, tenant in [("a", 1, "t1"), ("b", 1, "t2"), ("c", 1, "t2"), ("d", 2, "t3")]:
        await put(gateway, make(request_id, tier_rank=rank, tenant_id=tenant))
    (claim,) = await worker.claim(1)
    queue = await operator.queue(model)
    assert (queue.running, queue.delayed, queue.dead) == (2, 0, 0)
    standard, batch = queue.tiers
    assert (standard.rank, standard.waiting, batch.rank, batch.waiting) == (1, 2, 2, 1)
    assert 0 <= standard.oldest_ms < 60_000
    (line,) = standard.tenants
    assert (line.tenant_id, line.waiting, line.counter) == ("t2", 2, 0.0)
    assert [line.tenant_id for line in batch.tenants] == ["t3"]
    await worker.release([Held("a", claim.epoch)], failed=True)
    assert (await operator.queue(model)).delayed == 1


async def test_the_dead_are_listed_with_their_last_error(gateway, worker, operator, make, model):
    await die(gateway, worker, make("r1"))
    await die(gateway, worker, make("r2"))
    assert (await operator.queue(model)).dead == 2
    latest, _ = letters = await operator.dead_letters(model)
    assert {letter.request_id for letter in letters} == {"r1", "r2"}
    assert (latest.tenant_id, latest.attempts, latest.tokens) == ("t1", 1, 2)
    assert (latest.error_code, latest.error_message) == ("engine_failed", "It broke.")


async def test_a_second_life_goes_on_from_the_log_and_is_billed_apart(
    gateway, worker, operator, make, model, redis_url
):
    await die(gateway, worker, make("r1"))
    assert (await gateway.request_state(model, "r1")).state == "dead"
    assert (await gateway.read_log(model, "r1"))[-1].finish.error.code == "engine_failed"
    assert await operator.requeue(model, "r1")
    assert not await operator.requeue(model, "r1")
    (claim,) = await worker.claim(1)
    assert (claim.attempt, claim.logged_token_ids) == (1, (7, 8))
    assert 50_000 < claim.remaining_ms <= 60_000
    await publish(worker, claim, last(claim, 2, 9))
    log = await gateway.read_log(model, "r1")
    assert [token for chunk in log for token in chunk.token_ids] == [7, 8, 9]
    assert [chunk.finish.reason for chunk in log if chunk.finish] == ["stop"]
    first, second = await usage_events(redis_url, model)
    assert (first.request_id, first.prompt_tokens, first.completion_tokens) == ("r1", 3, 2)
    assert (second.request_id, second.prompt_tokens, second.completion_tokens) == ("r1~2", 0, 1)


async def test_a_dropped_one_can_not_come_back(gateway, worker, operator, make, model):
    await die(gateway, worker, make("r1"))
    assert await operator.drop(model, "r1")
    assert not await operator.drop(model, "r1")
    assert not await operator.requeue(model, "r1")
    assert await operator.dead_letters(model) == []
    assert (await gateway.request_state(model, "r1")).state == "finished"


async def test_only_the_dead_can_be_requeued(gateway, worker, operator, make, model):
    await put(gateway, make("r1"))
    assert not await operator.requeue(model, "r1")
    with pytest.raises(UnknownRequest):
        await operator.requeue(model, "nope")
    with pytest.raises(UnknownRequest):
        await operator.drop(model, "nope")


async def test_one_that_an_operator_gives_another_life_waits_until_its_deadline(
    gateway, worker, operator, make, model, redis_url
):
    await put(gateway, make("r1"), max_wait_ms=60_000, max_attempts=1)
    claim = await claim_one(worker)
    await worker.release([Held("r1", claim.epoch)], failed=True, code="engine_failed", message="m")
    await backdate(redis_url, model, "r1", 61_000)
    assert await operator.requeue(model, "r1")
    assert await worker.expire() == (0, 0, 0)
    again = await claim_one(worker)
    assert name(again) == "r1"
    await worker.release([Held("r1", again.epoch)], failed=False)
    assert await worker.expire() == (0, 0, 0)
    assert name(await claim_one(worker)) == "r1"
