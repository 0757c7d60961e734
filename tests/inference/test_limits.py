"""Limits against the ledger: recalled after Redis was lost, equal to it at rest, and told honestly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from redis.asyncio import Redis

from inference.errors import BudgetSpent, InvalidRequest, RateLimited
from inference.services.ledger import record_usage
from inference.services.recall import recall_from_ledger
from inference.services.reconcile import counter_differences
from inference.services.refusal import refusal
from tenants.models import ModelPrice, Tenant
from tenants.principal import Calendar, LimitMetric, LimitScope, Principal
from tenants.principal_selectors import find_stored_key
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, BucketState, Refused, Settlement
from tenants.services import remove_quota_limit, set_quota_limit
from tests.factories import TEST, a_budget, a_limit, a_principal, make_key, make_tenant, set_limit
from tests.inference.ledger_driving import an_event, ledger_redis_url

pytestmark = pytest.mark.django_db(transaction=True)
DAY = 86_400


async def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As Django's own threads: with a connection that goes when it is done."""

    def run() -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


@pytest.fixture
async def redis():
    client = Redis.from_url(ledger_redis_url())
    await client.flushdb()
    yield client
    await client.flushdb()
    await client.aclose()


def priced() -> None:
    ModelPrice.objects.create(
        model="tiny",
        valid_from=datetime(2026, 1, 1, tzinfo=UTC),
        input_microusd_per_mtok=2_000_000,
        cached_input_microusd_per_mtok=1_000_000,
        output_microusd_per_mtok=3_000_000,
    )


@pytest.fixture
def tenant() -> Tenant:
    priced()
    return make_tenant()


def principal_of(tenant: Tenant) -> Principal:
    key = make_key(tenant).api_key
    stored = find_stored_key(key.lookup_id)
    assert stored is not None
    return stored.principal


def used(tenant: Tenant, rid: str, at: datetime, prompt: int, output: int, **given: object):
    at_ms = int(at.timestamp() * 1000)
    return an_event(
        str(tenant.public_id), rid, prompt_tokens=prompt, completion_tokens=output, created_at_ms=at_ms,
        finished_at_ms=at_ms + 100, **given,
    )  # fmt: skip


def test_limits_of_every_kind_reach_the_principal(tenant):
    key = make_key(tenant).api_key
    set_limit(tenant.tier, LimitMetric.INPUT_TOKENS, 1000, period_s=1)
    set_limit(tenant, LimitMetric.COST, 5_000_000, calendar=Calendar.MONTH)
    set_limit(tenant, LimitMetric.OUTPUT_TOKENS, 500, model="tiny")
    set_limit(key, LimitMetric.TOKENS, 700, calendar=Calendar.DAY, is_hard=False)
    Tenant.objects.filter(pk=tenant.pk).update(timezone="Asia/Tokyo")
    stored = find_stored_key(key.lookup_id)
    assert stored is not None
    told = [(x.scope, x.metric, x.calendar, x.is_hard, x.owner_id) for x in stored.principal.limits]
    owner = str(tenant.public_id)
    assert told == [
        ("tier", "input_tokens", None, True, owner),
        ("tenant", "cost", "month", True, owner),
        ("model", "output_tokens", None, True, "tiny"),
        ("key", "tokens", "day", False, str(key.public_id)),
    ]
    assert stored.principal.zone == "Asia/Tokyo"
    assert [price.output_microusd_per_mtok for price in stored.principal.prices["tiny"]] == [3_000_000]


def test_a_budget_set_again_is_another(tenant):
    first = set_quota_limit(
        actor=TEST, owner=tenant, metric=LimitMetric.TOKENS, amount=5, calendar=Calendar.DAY
    )
    before = principal_of(tenant).limits[0].serial
    remove_quota_limit(actor=TEST, limit=first)
    set_quota_limit(actor=TEST, owner=tenant, metric=LimitMetric.TOKENS, amount=5, calendar=Calendar.DAY)
    assert principal_of(tenant).limits[0].serial != before


async def test_the_ledger_is_played_back_never_fuller_than_it_was(tenant):
    """FAULTS 71 and the issue's recovery: exact for budgets, at most the true level for rates."""
    now = datetime.now(UTC)
    if now.hour == 0 and now.minute < 5:
        pytest.skip("too close to midnight for minutes ago to be today")
    key, other = "0197e5a0-0000-7000-8000-000000000001", "0197e5a0-0000-7000-8000-000000000002"
    events = [
        used(tenant, "a", now - timedelta(seconds=90), 100, 50, key_id=key),
        used(tenant, "b", now - timedelta(seconds=30), 10, 5, key_id=other),
        used(tenant, "c", now - timedelta(seconds=20), 10, 5, key_id=key, model="free"),
        used(tenant, "yesterday", now - timedelta(days=1), 999, 999, key_id=key),
    ]
    await in_thread(record_usage, events)
    principal = replace(
        a_principal(tenant_public_id=str(tenant.public_id)),
        tenant_id=tenant.pk,
    )
    limits = [
        a_budget(LimitMetric.TOKENS, 10_000),
        a_budget(LimitMetric.COST, 10_000),
        a_budget(LimitMetric.OUTPUT_TOKENS, 10_000, scope=LimitScope.KEY, owner_id=key),
        a_budget(LimitMetric.INPUT_TOKENS, 10_000, scope=LimitScope.MODEL, owner_id="tiny"),
        a_limit(LimitMetric.REQUESTS, 6, period_s=DAY, burst=6),
        a_limit(LimitMetric.TOKENS, 60, period_s=60, burst=200),
        a_limit(LimitMetric.CONCURRENCY, 3),
    ]
    known = (await recall_from_ledger(principal, limits, now)).amounts
    assert known[:4] == (180, 2 * 110 + 3 * 55, 55, 110)
    # A day's requests: 4 used of 6, refilled at one in four hours since yesterday's.
    assert 2_000 <= known[4] < 6_000
    # 200 full; 150 at -90 s, one a second back: full is 200 again only after 150 s. True: 50+60-15+10-15+20 = 110.
    assert 108_000 <= known[5] <= 110_000


async def test_redis_flushed_gives_nothing_for_free(tenant, redis):
    """The issue's recovery: the same limits before and after, from the ledger alone."""
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, 500, period_s=DAY)
    await in_thread(set_limit, tenant, LimitMetric.COST, 1000, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    stores = [QuotaStore(ledger_redis_url(), recall=recall_from_ledger) for _ in range(2)]
    price = principal.prices["tiny"][0]
    events, now = [], datetime.now(UTC)
    for i in range(6):
        decision = await stores[i % 2].reserve(
            reservation_id=f"r{i}", principal=principal, prompt_tokens=10, max_output_tokens=40,
            lease_ms=60_000, model="tiny", price=price, accepted_at=now,
        )  # fmt: skip
        assert isinstance(decision, Admitted)
        events.append(used(tenant, f"r{i}", now, 10, 20 + i, reservation_id=f"r{i}"))
    rows, _ = await in_thread(record_usage, events)
    await stores[0].settle_many(
        [
            Settlement(str(tenant.public_id), r.reservation_id, 10, r.completion_tokens, r.cost_microusd)
            for r in rows
        ]
    )
    before = [state.remaining for state in await stores[0].peek(principal)]
    spent = 6 * 20 + 3 * sum(range(20, 26))
    assert before == [500 - 60 - sum(range(20, 26)), 1000 - spent]
    assert await in_thread(counter_differences, ledger_redis_url()) == []
    await redis.flushdb()

    async def ask(i: int):
        return await stores[i % 2].reserve(
            reservation_id=f"again{i}", principal=principal, prompt_tokens=1, max_output_tokens=0,
            lease_ms=60_000, model="tiny", price=price,
        )  # fmt: skip

    await asyncio.gather(*(ask(i) for i in range(20)))
    for i in range(20):
        await stores[0].release(tenant_public_id=str(tenant.public_id), reservation_id=f"again{i}")
    after = [state.remaining for state in await stores[0].peek(principal)]
    assert after[1] == before[1]
    assert before[0] - 2 <= after[0] <= before[0]
    for store in stores:
        await store.aclose()


async def test_reconcile_says_which_counter_is_wrong(tenant, redis):
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, 500, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    store = QuotaStore(ledger_redis_url(), recall=recall_from_ledger)
    await store.reserve(
        reservation_id="r1", principal=principal, prompt_tokens=10, max_output_tokens=40, lease_ms=60_000
    )
    assert await in_thread(counter_differences, ledger_redis_url()) == []
    await store.settle(
        tenant_public_id=str(tenant.public_id), reservation_id="r1", prompt_tokens=10, completion_tokens=2
    )
    (difference,) = await in_thread(counter_differences, ledger_redis_url())
    assert difference.whose.startswith(tenant.slug)
    assert difference.amounts == {"tokens": 12}
    await store.aclose()


def refused(limit, *, remaining=0, requested=5, retry_after_ms: int | None = 2000, is_spent=False) -> Refused:
    return Refused((BucketState(limit, remaining, 9000),), limit, requested, retry_after_ms, is_spent)


def test_a_refusal_names_the_limit_its_scope_and_when():
    rate = a_limit(LimitMetric.INPUT_TOKENS, 100, period_s=3600, scope=LimitScope.MODEL, owner_id="tiny")
    error = refusal(refused(rate, remaining=3))
    assert isinstance(error, RateLimited)
    assert (error.type, error.code, error.retry_after_ms) == ("tokens", "rate_limit_exceeded", 2000)
    assert (
        "the model tiny's limit: 100 input tokens per hour, used 97 input tokens, requested 5"
        in error.message
    )
    assert error.headers["x-weir-limit-scope"] == "model"
    assert error.headers["x-ratelimit-remaining-tokens"] == "3"

    budget = a_budget(LimitMetric.COST, 1_500_000, calendar=Calendar.MONTH, scope=LimitScope.KEY)
    now = datetime(2026, 11, 30, 23, 0, tzinfo=UTC)
    spent = refusal(refused(budget, requested=70, retry_after_ms=3_600_000, is_spent=True), now)
    assert isinstance(spent, BudgetSpent)
    assert (spent.http_status, spent.code) == (429, "insufficient_quota")
    assert spent.headers["x-should-retry"] == "false"
    assert "the key's month is spent: limit $1.500000, used $1.500000, requested $0.000070" in spent.message
    assert "begins at 2026-12-01 00:00 UTC" in spent.message

    waits = refusal(refused(budget))
    assert isinstance(waits, RateLimited)
    assert "reserved by requests that still run" in waits.message

    never = refusal(refused(budget, requested=2_000_000, retry_after_ms=None))
    assert isinstance(never, InvalidRequest)
    assert never.code == "request_exceeds_limit"
