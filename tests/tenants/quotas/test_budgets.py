"""Budgets: per calendar period, hard or soft, never overdrawn, and from the ledger where Redis knows nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tenants.pricing import Price
from tenants.principal import Calendar, LimitMetric, LimitScope
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.periods import period_at
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, Recalled, Refused
from tests.factories import a_budget, a_limit, a_principal

PRICE = Price("p", datetime(2026, 1, 1, tzinfo=UTC), 2_000_000, 1_000_000, 3_000_000)
"""2 micro-USD an input token, 3 an output token."""


async def reserve(
    store, principal, rid="r1", *, prompt=10, output=20, price=PRICE, at=None, model="", lease_ms=60_000
):
    return await store.reserve(
        reservation_id=rid,
        principal=principal,
        prompt_tokens=prompt,
        max_output_tokens=output,
        lease_ms=lease_ms,
        model=model,
        price=price,
        accepted_at=at,
    )


async def settle(store, rid="r1", *, prompt=10, completion=5):
    cost = PRICE.cost_microusd(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
    await store.settle(
        tenant_public_id="t1",
        reservation_id=rid,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost_microusd=cost,
    )


async def remaining(store, principal, at=None):
    return [bucket.remaining for bucket in await store.peek(principal, at)]


async def test_money_and_tokens_are_reserved_and_settled_exactly(store):
    principal = a_principal(
        a_budget(LimitMetric.COST, 1000),
        a_budget(LimitMetric.TOKENS, 100, calendar=Calendar.MONTH),
        a_budget(LimitMetric.INPUT_TOKENS, 50),
        a_budget(LimitMetric.OUTPUT_TOKENS, 50),
    )
    decision = await reserve(store, principal)
    assert isinstance(decision, Admitted)
    assert decision.max_output_tokens == 20
    assert [bucket.remaining for bucket in decision.buckets] == [1000 - 20 - 60, 70, 40, 30]
    for _ in range(2):
        await settle(store)
        await store.release(tenant_public_id="t1", reservation_id="r1")
    assert await remaining(store, principal) == [1000 - 20 - 15, 85, 40, 45]


@pytest.mark.parametrize(
    ("budget", "granted"),
    [
        (a_budget(LimitMetric.TOKENS, 17), 7),
        (a_budget(LimitMetric.OUTPUT_TOKENS, 3), 3),
        (a_budget(LimitMetric.COST, 20 + 3 * 4 + 2), 4),
        (a_budget(LimitMetric.COST, 20 + 3 * 5), 5),
        (a_budget(LimitMetric.INPUT_TOKENS, 10), 20),
        (a_budget(LimitMetric.COST, 23, is_hard=False), 20),
    ],
    ids=lambda value: str(value),
)
async def test_a_hard_budget_grants_only_the_output_it_has_left(store, budget, granted):
    decision = await reserve(store, a_principal(budget))
    assert isinstance(decision, Admitted)
    assert decision.max_output_tokens == granted
    # The same id again: the same answer.
    again = await reserve(store, a_principal(budget))
    assert isinstance(again, Admitted)
    assert again.max_output_tokens == granted


async def test_spent_reserved_and_impossible_are_told_apart(store):
    principal = a_principal(a_budget(LimitMetric.TOKENS, 100))
    assert isinstance(await reserve(store, principal, "r1", prompt=10, output=90), Admitted)
    waits = await reserve(store, principal, "r2")
    assert isinstance(waits, Refused)
    assert (waits.is_spent, waits.requested) == (False, 11)
    assert waits.retry_after_ms is not None
    assert waits.retry_after_ms <= 1000
    await settle(store, "r1", prompt=10, completion=85)
    spent = await reserve(store, principal, "r2")
    assert isinstance(spent, Refused)
    assert spent.is_spent
    now = datetime.now(UTC)
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert spent.retry_after_ms == pytest.approx((midnight - now) / timedelta(milliseconds=1), abs=2000)
    never = await reserve(store, principal, "r3", prompt=100)
    assert isinstance(never, Refused)
    assert never.retry_after_ms is None
    # What is left still serves who needs less: one token of output.
    fits = await reserve(store, principal, "r4", prompt=3)
    assert isinstance(fits, Admitted)
    assert fits.max_output_tokens == 2


async def test_a_soft_budget_counts_and_refuses_nobody(store):
    principal = a_principal(a_budget(LimitMetric.TOKENS, 25, is_hard=False))
    for i in range(3):
        decision = await reserve(store, principal, f"r{i}")
        assert isinstance(decision, Admitted)
        assert decision.max_output_tokens == 20
    assert await remaining(store, principal) == [0]


async def test_refused_by_a_rate_takes_nothing_from_a_budget(store):
    """FAULTS 53."""
    principal = a_principal(
        a_budget(LimitMetric.TOKENS, 100), a_limit(LimitMetric.REQUESTS, 1, period_s=86_400)
    )
    await reserve(store, principal, "r1", prompt=1, output=1)
    assert isinstance(await reserve(store, principal, "r2"), Refused)
    assert await remaining(store, principal) == [98, 0]


@pytest.mark.parametrize("metric", [LimitMetric.TOKENS, LimitMetric.COST], ids=str)
async def test_two_hundred_at_the_edge_of_a_budget_over_four_gateways(four_stores, metric):
    """FAULTS 50: whatever each of them uses, what is spent never passes what was granted."""
    principal = a_principal(a_budget(metric, 1003))
    start = asyncio.Barrier(200)
    spent, refused = [], []

    async def ask(i: int, rid: str) -> bool:
        decision = await reserve(four_stores[i % 4], principal, rid, prompt=3, output=10)
        if isinstance(decision, Refused):
            refused.append(rid)
            return False
        used = decision.max_output_tokens if i % 2 else min(4, decision.max_output_tokens)
        await settle(four_stores[(i + 1) % 4], rid, prompt=3, completion=used)
        spent.append(3 + used if metric is LimitMetric.TOKENS else 6 + 3 * used)
        return True

    async def client(i: int) -> None:
        await start.wait()
        for attempt in range(3):
            await ask(i, f"r{i}-{attempt}")

    await asyncio.gather(*(client(i) for i in range(200)))
    assert len(refused) > 0
    assert sum(spent) <= 1003
    assert await remaining(four_stores[0], principal) == [1003 - sum(spent)]
    # Some were refused for what others gave back later. One who stays gets it all, but for less than a token.
    late = 0
    while await ask(1, f"late{late}"):
        late += 1
        assert late < 200
    least = 3 + 1 if metric is LimitMetric.TOKENS else 6 + 3
    assert 1003 - least < sum(spent) <= 1003
    assert await remaining(four_stores[0], principal) == [1003 - sum(spent)]


async def test_the_period_is_part_of_the_key_daylight_saving_included(store):
    """FAULTS 55: nothing is reset, so nothing that is spent meanwhile can be wiped."""
    budgets = (a_budget(LimitMetric.TOKENS, 100), a_budget(LimitMetric.TOKENS, 1000, calendar=Calendar.MONTH))
    berlin = replace(a_principal(*budgets), zone="Europe/Berlin")
    # In the year 2097 the clocks turn on the last Sundays of March and October, as now.
    for eve, ends in [
        (datetime(2097, 3, 31, 21, 59, 59, tzinfo=UTC), datetime(2097, 3, 31, 22, 0, tzinfo=UTC)),
        (datetime(2097, 10, 31, 22, 59, 59, tzinfo=UTC), datetime(2097, 10, 31, 23, 0, tzinfo=UTC)),
    ]:
        await reserve(store, berlin, f"before{eve:%m}", prompt=60, output=0, at=eve)
        await reserve(store, berlin, f"after{eve:%m}", prompt=70, output=0, at=ends)
        assert await remaining(store, berlin, eve) == [40, 940]
        assert await remaining(store, berlin, ends) == [30, 930]
        # What was accepted before midnight counts there, however late it ends.
        await settle(store, f"before{eve:%m}", prompt=60, completion=7)
        assert await remaining(store, berlin, eve) == [33, 933]
        assert await remaining(store, berlin, ends) == [30, 930]


@pytest.mark.parametrize(
    ("zone", "moment", "name", "hours"),
    [
        ("Europe/Berlin", datetime(2026, 3, 29, 12, tzinfo=UTC), "2026-03-29", 23),
        ("Europe/Berlin", datetime(2026, 10, 25, 12, tzinfo=UTC), "2026-10-25", 25),
        ("UTC", datetime(2026, 10, 25, 12, tzinfo=UTC), "2026-10-25", 24),
        ("Pacific/Kiritimati", datetime(2026, 12, 31, 12, tzinfo=UTC), "2027-01-01", 24),
    ],
)
def test_a_day_has_the_hours_that_its_zone_gives_it(zone, moment, name, hours):
    period = period_at(Calendar.DAY, moment, zone)
    assert period.name == name
    before = period_at(Calendar.DAY, moment - timedelta(days=1), zone)
    assert (period.ends_at_ms - before.ends_at_ms) == hours * 3_600_000
    month = period_at(Calendar.MONTH, moment, zone)
    assert (month.name, month.first_day.day, month.end_day.day) == (name[:7], 1, 1)


async def test_a_budget_of_one_model_is_not_anothers(store):
    principal = a_principal(
        a_budget(LimitMetric.TOKENS, 100, scope=LimitScope.MODEL, owner_id="large"),
        a_limit(LimitMetric.REQUESTS, 5, period_s=86_400, scope=LimitScope.MODEL, owner_id="small"),
    )
    decision = await reserve(store, principal, "r1", model="large")
    assert [bucket.limit.owner_id for bucket in decision.buckets] == ["large"]
    await reserve(store, principal, "r2", model="small")
    assert isinstance(await reserve(store, principal, "r3", model="other", prompt=1000), Admitted)
    assert await remaining(store, principal) == [70, 4]


async def test_what_the_dead_reserved_comes_back(store, redis, monkeypatch):
    """FAULTS 51: nobody settles, nobody releases; it lapses, and a late settlement still counts."""
    monkeypatch.setattr("tenants.quotas.store._DEAD_AFTER_MS", 1)
    principal = a_principal(
        a_budget(LimitMetric.TOKENS, 100), a_limit(LimitMetric.TOKENS, 100, period_s=86_400)
    )
    await reserve(store, principal, "dead", prompt=10, output=80, lease_ms=1)
    await asyncio.sleep(0.02)
    decision = await reserve(store, principal, "next", prompt=10, output=80)
    assert isinstance(decision, Admitted)
    assert decision.max_output_tokens == 80
    await settle(store, "dead", prompt=10, completion=3)
    assert await remaining(store, principal) == [0, 0]
    await settle(store, "next", prompt=10, completion=70)
    assert await remaining(store, principal) == [7, 7]
    assert await redis.zcard("weir:{t:t1}:open") == 0


async def test_what_redis_does_not_know_starts_from_the_ledger(redis, quota_redis_url):
    asked = []

    async def recall(principal, limits, moment):
        asked.append([limit.metric for limit in limits])
        return Recalled(tuple(40 if limit.is_budget else 25_500 for limit in limits))

    store = QuotaStore(quota_redis_url, recall=recall)
    principal = a_principal(
        a_budget(LimitMetric.COST, 100),
        a_limit(LimitMetric.TOKENS, 100, period_s=86_400),
        a_limit(LimitMetric.CONCURRENCY, 10),
    )
    decisions = await asyncio.gather(
        *(reserve(store, principal, f"r{i}", prompt=1, output=2) for i in range(5))
    )
    assert all(isinstance(decision, Admitted) for decision in decisions)
    # Read once, however many came at the same time.
    assert asked == [[LimitMetric.COST, LimitMetric.TOKENS]]
    assert await remaining(store, principal) == [100 - 40 - 5 * 8, 25 - 5 * 3, 5]
    await redis.flushdb()
    await reserve(store, principal, "r9", prompt=1, output=2)
    assert await remaining(store, principal) == [60 - 8, 22, 9]
    assert len(asked) == 2
    # A period that begins while Redis watches begins with nothing: the ledger need not be there.
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await reserve(store, principal, "r10", prompt=1, output=2, at=tomorrow)
    assert len(asked) == 2
    assert (await remaining(store, principal, tomorrow))[0] == 92
    # A budget that was set anew knows nothing of what was used while there was none.
    renewed = a_principal(replace(principal.limits[0], serial=7))
    await reserve(store, renewed, "r11", prompt=1, output=2)
    assert asked[2:] == [[LimitMetric.COST]]
    await store.aclose()


async def test_neither_redis_nor_the_ledger_knows(redis, quota_redis_url):
    async def recall(principal, limits, moment):
        raise QuotaUnavailable("the ledger can't be read")

    store = QuotaStore(quota_redis_url, recall=recall)
    with pytest.raises(QuotaUnavailable):
        await reserve(store, a_principal(a_budget(LimitMetric.COST, 100)))
    assert isinstance(await reserve(store, a_principal(a_limit(LimitMetric.CONCURRENCY, 1)), "r2"), Admitted)
    await store.aclose()
