"""What follows a reservation in the same call: it runs where all that was asked for is granted, and only there."""

from __future__ import annotations

import pytest

from tenants.principal import Calendar, LimitMetric
from tenants.quotas.errors import ReservationClosed
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import GAP, Admitted, Recalled, Refused, Then
from tests.factories import a_budget, a_limit, a_principal

DAY = 86_400
FOLLOW = "redis.call('RPUSH', KEYS[1], ARGV[2]) return {#KEYS, #ARGV, ARGV[1], ARGV[2]}"


def following(key: str = "followed") -> Then:
    gaps = ",".join(f"{GAP}/{GAP}" for _ in range(3))
    return Then(FOLLOW, key, (b"\x00\x01\xff", f"left {gaps}"))


async def reserve(store, principal, then, rid="r1", *, output=20):
    return await store.reserve(
        reservation_id=rid,
        principal=principal,
        prompt_tokens=10,
        max_output_tokens=output,
        lease_ms=60_000,
        then=then,
    )


@pytest.fixture
def principal():
    return a_principal(
        a_limit(LimitMetric.REQUESTS, 2, period_s=DAY),
        a_budget(LimitMetric.TOKENS, 100, calendar=Calendar.MONTH),
        a_limit(LimitMetric.CONCURRENCY, 3),
    )


async def test_it_hears_what_is_left_and_a_repeat_runs_it_again(store, redis, principal):
    then = following()
    decision = await reserve(store, principal, then)
    assert isinstance(decision, Admitted)
    assert [bucket.remaining for bucket in decision.buckets] == [1, 70, 2]
    told = ",".join(f"{bucket.remaining}/{bucket.reset_after_ms}" for bucket in decision.buckets)
    assert then.reply == [1, 2, b"\x00\x01\xff", f"left {told}".encode()]
    assert await redis.lrange("followed", 0, -1) == [then.reply[3]]
    again = following()
    repeated = await reserve(store, principal, again)
    assert [bucket.remaining for bucket in repeated.buckets] == [1, 70, 2]
    assert again.reply is not None


async def test_not_where_less_is_granted_or_nothing(store, redis, principal):
    less, none, closed = following(), following(), following()
    decision = await reserve(store, principal, less, output=200)
    assert (decision.max_output_tokens, less.reply) == (90, None)
    assert isinstance(await reserve(store, principal, none, "r2", output=1), Refused)
    await store.release(tenant_public_id="t1", reservation_id="r1")
    with pytest.raises(ReservationClosed):
        await reserve(store, principal, closed)
    assert (none.reply, closed.reply) == (None, None)
    assert await redis.exists("followed") == 0


async def test_once_after_what_redis_forgot_is_recalled(redis, quota_redis_url, principal):
    asked = []

    async def recall(_principal, limits, _moment):
        asked.append(len(limits))
        return Recalled(amounts=(2000, 40))

    store = QuotaStore(quota_redis_url, recall=recall)
    then = following()
    try:
        decision = await reserve(store, principal, then)
    finally:
        await store.aclose()
    assert [bucket.remaining for bucket in decision.buckets] == [1, 30, 2]
    assert asked == [2]
    assert await redis.lrange("followed", 0, -1) == [then.reply[3]]
