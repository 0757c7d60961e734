"""One store, one caller: what each verb takes, gives back and answers."""

from __future__ import annotations

import asyncio

import pytest

from tenants.principal import LimitMetric, LimitScope
from tenants.quotas.errors import ReservationClosed
from tenants.quotas.types import Admitted, Refused
from tests.factories import a_limit, a_principal

# Slow refill: one unit per day at most, so that a slow machine changes no figure.
DAY = 86_400


async def reserve(store, principal, rid="r1", *, prompt=10, output=20, lease_ms=60_000):
    return await store.reserve(
        reservation_id=rid,
        principal=principal,
        prompt_tokens=prompt,
        max_output_tokens=output,
        lease_ms=lease_ms,
    )


async def settle(store, rid="r1", *, prompt=10, completion=5):
    await store.settle(
        tenant_public_id="t1", reservation_id=rid, prompt_tokens=prompt, completion_tokens=completion
    )


async def remaining(store, principal):
    return [bucket.remaining for bucket in await store.peek(principal)]


@pytest.fixture
def principal():
    return a_principal(
        a_limit(LimitMetric.REQUESTS, 5, period_s=DAY),
        a_limit(LimitMetric.TOKENS, 100, period_s=DAY),
        a_limit(LimitMetric.CONCURRENCY, 3),
    )


async def test_reserve_then_settle_charges_the_exact_figure(store, principal):
    decision = await reserve(store, principal)
    assert isinstance(decision, Admitted)
    assert [bucket.remaining for bucket in decision.buckets] == [4, 70, 2]
    await settle(store)
    assert await remaining(store, principal) == [4, 85, 3]


async def test_release_undoes_everything(store, principal):
    await reserve(store, principal)
    await store.release(tenant_public_id="t1", reservation_id="r1")
    assert await remaining(store, principal) == [5, 100, 3]


async def test_repeating_any_call_changes_nothing(store, principal):
    for _ in range(3):
        assert isinstance(await reserve(store, principal), Admitted)
    assert await remaining(store, principal) == [4, 70, 2]
    for _ in range(3):
        await settle(store)
        await settle(store, completion=20)
        await store.release(tenant_public_id="t1", reservation_id="r1")
    assert await remaining(store, principal) == [4, 85, 3]


async def test_an_id_is_never_used_twice(store, principal):
    await reserve(store, principal)
    await settle(store)
    with pytest.raises(ReservationClosed):
        await reserve(store, principal)
    assert await remaining(store, principal) == [4, 85, 3]


async def test_usage_after_a_release_is_charged_in_full_once(store, principal):
    # The enqueue seemed to fail, the gateway released, and yet the request had run.
    await reserve(store, principal)
    await store.release(tenant_public_id="t1", reservation_id="r1")
    await settle(store)
    await settle(store)
    assert await remaining(store, principal) == [4, 85, 3]


async def test_a_reserve_that_arrives_after_its_release_takes_nothing(store, principal):
    await store.release(tenant_public_id="t1", reservation_id="r1")
    with pytest.raises(ReservationClosed):
        await reserve(store, principal)
    await settle(store)
    assert await remaining(store, principal) == [5, 100, 3]


async def test_settling_an_unknown_id_changes_nothing(store, principal, redis):
    await settle(store, "never-seen")
    assert await remaining(store, principal) == [5, 100, 3]
    assert await redis.keys("*") == []


async def test_limit_n_admits_exactly_n(store):
    principal = a_principal(a_limit(LimitMetric.REQUESTS, 3, period_s=DAY))
    verdicts = [type(await reserve(store, principal, f"r{i}")) for i in range(5)]
    assert verdicts == [Admitted, Admitted, Admitted, Refused, Refused]


async def test_refused_by_one_takes_from_none(store, principal):
    for i in range(3):
        await reserve(store, principal, f"r{i}", prompt=1, output=1)
    before = await remaining(store, principal)
    decision = await reserve(store, principal, "one-too-many", prompt=1, output=1)
    assert isinstance(decision, Refused)
    assert decision.binding.metric is LimitMetric.CONCURRENCY
    assert await remaining(store, principal) == before == [2, 94, 0]


async def test_a_prompt_above_the_burst_never_fits(store):
    principal = a_principal(
        a_limit(LimitMetric.TOKENS, 100, period_s=DAY), a_limit(LimitMetric.CONCURRENCY, 1)
    )
    await reserve(store, principal, "r0", prompt=1, output=1)
    decision = await reserve(store, principal, prompt=101, output=1)
    assert isinstance(decision, Refused)
    # Though concurrency refuses as well: what can never change is what the client must hear.
    assert (decision.retry_after_ms, decision.requested) == (None, 101)
    assert decision.binding.metric is LimitMetric.TOKENS


async def test_output_above_the_burst_is_clamped_and_its_excess_is_a_debt(store):
    principal = a_principal(a_limit(LimitMetric.TOKENS, 100, period_s=DAY))
    decision = await reserve(store, principal, prompt=90, output=4096)
    assert isinstance(decision, Admitted)
    assert decision.buckets[0].remaining == 0
    await settle(store, prompt=90, completion=60)
    (bucket,) = await store.peek(principal)
    assert bucket.remaining == 0
    # 50 tokens of debt and 100 to fill: one and a half days.
    assert bucket.reset_after_ms == pytest.approx(1.5 * DAY * 1000, rel=1e-3)


async def test_retry_after_is_when_this_very_request_fits(store):
    principal = a_principal(a_limit(LimitMetric.TOKENS, 1000, period_s=1, burst=1000))
    await reserve(store, principal, prompt=1000, output=0)
    small = await reserve(store, principal, "small", prompt=100, output=0)
    large = await reserve(store, principal, "large", prompt=900, output=0)
    assert isinstance(small, Refused)
    assert isinstance(large, Refused)
    assert small.retry_after_ms is not None
    assert large.retry_after_ms is not None
    assert small.retry_after_ms <= 100 < large.retry_after_ms <= 900


async def test_a_lapsed_lease_frees_its_slot(store):
    principal = a_principal(a_limit(LimitMetric.CONCURRENCY, 1))
    await reserve(store, principal, "dies", lease_ms=150)
    decision = await reserve(store, principal, "next")
    assert isinstance(decision, Refused)
    assert decision.retry_after_ms is not None
    assert 0 < decision.retry_after_ms <= 150
    async with asyncio.timeout(5):
        # The server's clock decides, and it sends no event.
        while isinstance(await reserve(store, principal, "next"), Refused):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_peek_costs_nothing_and_writes_nothing(store, principal, redis):
    for _ in range(10):
        assert await remaining(store, principal) == [5, 100, 3]
    assert await redis.keys("*") == []
    assert await store.peek(a_principal()) == ()


async def test_every_key_has_the_tenants_tag_and_a_life(store, principal, redis):
    await reserve(store, principal)
    await reserve(store, principal, "r2")
    await settle(store)
    await store.release(tenant_public_id="t1", reservation_id="never-seen")
    keys = await redis.keys("*")
    assert len(keys) == 7
    for key in keys:
        assert key.startswith(b"weir:{t:t1}:")
        assert 0 < await redis.pttl(key) <= 2 * DAY * 1000


async def test_keys_of_a_limit_are_counted_apart(store):
    tenant = a_limit(LimitMetric.REQUESTS, 10, period_s=DAY)
    one = a_limit(LimitMetric.REQUESTS, 2, period_s=DAY, scope=LimitScope.KEY, owner_id="k1")
    two = a_limit(LimitMetric.REQUESTS, 2, period_s=DAY, scope=LimitScope.KEY, owner_id="k2")
    await reserve(store, a_principal(tenant, one), "r1")
    await reserve(store, a_principal(tenant, two), "r2")
    assert await remaining(store, a_principal(tenant, one, two)) == [8, 1, 1]


async def test_without_limits_everything_is_admitted(store):
    assert isinstance(await reserve(store, a_principal()), Admitted)
    await settle(store)


async def test_a_lowered_limit_binds_at_once(store, principal):
    await reserve(store, principal)
    lowered = a_principal(a_limit(LimitMetric.TOKENS, 40, period_s=DAY))
    assert await remaining(store, lowered) == [40]
    await settle(store, prompt=0, completion=0)
    assert await remaining(store, lowered) == [40]
